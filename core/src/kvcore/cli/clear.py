"""`kvcore clear`: running caches forget objects."""

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any

from kvcore.api.errors import ConfigError
from kvcore.cli import arguments, asking
from kvcore.cli.output import error, print_json

if TYPE_CHECKING:
    from kvcore.service.inspect import Cache

TURN_S = 60.0
"""A cache works at it for half a minute before it says how far it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvcore clear`."""
    parser.epilog = "what an engine is reading stays, and what it computes meanwhile may be there again"
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="everything; needs --yes")
    what.add_argument("--namespace", metavar="NAMESPACE", type=_namespace, help="what one namespace has")
    what.add_argument("--tenant", metavar="NAME", help="what a tenant has")
    parser.add_argument("--tier", action="append", default=[], metavar="NAME", help="in this tier, too; repeatable")
    parser.add_argument("--tiers", action="store_true", help="in all tiers, too, for all who share them")
    parser.add_argument("--yes", action="store_true", help="--all is meant")
    asking.add_caches(parser)
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """JSON: {caches: [{cache, l1, tiers: {name: objects}, complete, problems}]}. Status 1 when something is left.
    Raises `ConfigError` when no cache can be cleared."""
    if args.all and not args.yes:
        raise ConfigError("--all forgets what every model has: say --yes, too, or choose with --namespace or --tenant")
    what: dict[str, Any] = {"all": True} if args.all else {"namespace": args.namespace, "tenant": args.tenant}
    body = {k: v for k, v in what.items() if v is not None} | {"tiers": args.tiers or args.tier}
    from kvcore.service.inspect import NoAnswer, Refusal

    done: list[dict[str, Any]] = []
    faults: list[NoAnswer | Refusal] = []
    for cache in asking.chosen(args):
        try:
            done.append({"cache": cache.label, **_cleared(cache, body)})
        except (NoAnswer, Refusal) as fault:
            faults.append(fault)
    if not done:
        raise ConfigError("\n".join(map(str, faults)))
    for left_out in faults:
        if not (isinstance(left_out, Refusal) and left_out.status in asking.NOT_HERE):
            error(f"{left_out}; left out")
    if args.json:
        print_json({"caches": done})
    else:
        _tell(done)
    return 0 if all(said["complete"] for said in done) else 1


def _cleared(cache: "Cache", body: dict[str, Any]) -> dict[str, Any]:
    """Ask until it is done, or can get no further."""
    from kvcore.service.inspect import ask

    total: dict[str, Any] = {"l1": 0, "tiers": {}}
    while True:
        said = ask(cache, "/clear", body, timeout_s=TURN_S)
        with asking.understood(cache):
            total["l1"] += said["l1"]
            for name, count in said["tiers"].items():
                total["tiers"][name] = total["tiers"].get(name, 0) + count
            total |= {"complete": said["complete"], "problems": dict(said["problems"])}
            if said["complete"] or said["problems"]:
                return total


def _tell(done: list[dict[str, Any]]) -> None:
    for said in done:
        counts = {"l1": said["l1"], **said["tiers"]}
        print(f"{said['cache']}: forgotten: " + ", ".join(f"{n:,} objects of {place}" for place, n in counts.items()))
        for name, why in said["problems"].items():
            error(f"{said['cache']}: {name}: {why}")
    sys.stdout.flush()


@arguments.argument
def _namespace(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise ValueError(f"{text!r} is no namespace: 32 characters of [0-9a-f], as `kvcore explain` shows them")
    return text
