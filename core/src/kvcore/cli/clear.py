"""`kvcore clear`: running caches forget objects."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcore.api.errors import ConfigError
from kvcore.cli.kit import arguments, asking
from kvcore.cli.kit.output import error, print_json, printable

if TYPE_CHECKING:
    from kvcore.service.inspect import Cache

TURN_S = 60.0
"""A cache works at it for half a minute before it says how far it is."""
UNENDED = "a turn found no more of it, and did not come to its end: use `kvcore store rm`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvcore clear`."""
    parser.epilog = "what an engine computes or loads meanwhile may be there again"
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="everything; needs --yes")
    what.add_argument(
        "--namespace",
        metavar="NAMESPACE",
        type=arguments.beginning,
        help=f"what one has, as `kvcore store ls` shows it, or how it begins: {arguments.LEAST} characters or more",
    )
    what.add_argument(
        "--tenant", metavar="NAME", type=_tenant, help="what the tenant has, or its #hash, as `kvcore top` shows it"
    )
    parser.add_argument("--tier", action="append", default=[], metavar="NAME", help="in this tier, too; repeatable")
    parser.add_argument("--tiers", action="store_true", help="in all tiers, too, for all who share them")
    parser.add_argument("--yes", action="store_true", help="--all is meant")
    asking.add_caches(parser)
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """JSON: {caches: [{cache, l1, tiers: {name: objects}, complete, problems}]}. Status 1 when something is left,
    or a cache has not answered. Raises `ConfigError` when no cache can be cleared."""
    if args.all and not args.yes:
        raise ConfigError("--all forgets what every model has: say --yes, too, or choose with --namespace or --tenant")
    what: dict[str, Any] = {"all": True} if args.all else {"namespace": args.namespace, "tenant": args.tenant}
    body = {k: v for k, v in what.items() if v is not None} | {"tiers": args.tiers or args.tier}
    from kvcore.service.inspect import NoAnswer, Refusal

    done: list[dict[str, Any]] = []
    others: list[str] = []
    silent = False
    for cache, said in asking.each(asking.chosen(args), partial(_cleared, body=body)):
        if not isinstance(said, (NoAnswer, Refusal)):
            done.append({"cache": cache.label, **said})
            if not args.json:
                _tell(done[-1])
        elif asking.elsewhere(said):
            others.append(str(said))
        else:
            silent = True
            error(asking.without(said, changes=True))
    if others and not done:
        raise ConfigError("\n".join(others))
    if args.json:
        print_json({"caches": sorted(done, key=lambda one: str(one["cache"]))})
    return 1 if silent or not all(said["complete"] for said in done) else 0


def _cleared(cache: "Cache", body: dict[str, Any]) -> dict[str, Any]:
    """Ask until it is done, or can get no further: a turn begins at the front of a tier."""
    from kvcore.service.inspect import ask

    total: dict[str, Any] = {"l1": 0, "tiers": {}}
    while True:
        said = ask(cache, "/clear", body, timeout_s=TURN_S)
        with asking.understood(cache):
            total["l1"] += said["l1"]
            for name, count in said["tiers"].items():
                total["tiers"][name] = total["tiers"].get(name, 0) + count
            total |= {"complete": bool(said["complete"]), "problems": dict(said["problems"])}
            so_far = _counts(total)
            if said["complete"] or said["problems"]:
                return total
            if not sum(said["tiers"].values()):
                total["problems"] = dict.fromkeys(said["tiers"], UNENDED)
                return total
        error(f"{cache.label}: forgotten so far: {so_far}; it goes on")


def _tell(said: dict[str, Any]) -> None:
    print(printable(f"{said['cache']}: forgotten: {_counts(said)}"), flush=True)
    for name, why in said["problems"].items():
        error(f"{said['cache']}: {name}: {why}")


def _counts(said: dict[str, Any]) -> str:
    return ", ".join(f"{n:,} objects of {place}" for place, n in {"l1": said["l1"], **said["tiers"]}.items())


@arguments.argument
def _tenant(text: str) -> str:
    if not text:
        raise ValueError("the name is empty: what requests without a tenant have, --namespace clears")
    return arguments.word(text)
