"""The command line of `kvcore store`, and what its actions have in common: tiers one after the other, one result."""

import argparse
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from kvcore.api import ConfigError, KVCoreError
from kvcore.api.keys import NAMESPACE_BYTES
from kvcore.api.units import parse_duration
from kvcore.cli.kit import running
from kvcore.cli.kit.arguments import LEAST, beginning
from kvcore.cli.kit.configured import add_file, add_set, flags
from kvcore.cli.kit.opened import Source, VolatileError, chosen, opened, read_config, tier_path
from kvcore.cli.kit.output import LINES, error, paint, print_json, printable
from kvcore.cli.store.copying import copy
from kvcore.cli.store.listing import ls, show_stat, stat
from kvcore.cli.store.removing import namespace_of, rm
from kvcore.cli.store.sweep import gc, verify
from kvcore.l2.frames import Frames

HELP = {
    "ls": "list what the tiers hold, by namespace or object by object",
    "stat": "objects, bytes, capacity and namespaces of every tier",
    "cp": "copy the objects of one tier into another, as they are stored",
    "verify": "read every object and check its header and checksum",
    "rm": "delete a namespace, or everything",
    "gc": "delete what cannot be read any more, or has not been used for long",
}
PER_TIER: dict[str, Callable[[Frames, argparse.Namespace, Source], Awaitable[dict[str, Any]]]] = {
    "ls": ls,
    "stat": stat,
    "verify": verify,
    "rm": rm,
    "gc": gc,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `kvcore store`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    made = {}
    for name, help_text in HELP.items():
        made[name] = action = actions.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        add_file(action, word=name != "cp")
        add_set(action)
        if name == "cp":
            action.add_argument("source", metavar="FROM", help="the name of the tier to copy from")
            action.add_argument("target", metavar="TO", help="the name of the tier to copy to")
            action.add_argument("--to-config", metavar="FILE", help="where TO is, when it is in another configuration")
        else:
            action.add_argument(
                "--tier", action="append", default=[], metavar="NAME", help="only this tier; repeatable (default: all)"
            )
        if name not in ("stat", "gc", "rm"):
            action.add_argument(
                "--namespace", metavar="HEX", type=_namespace, help="only this one, as `kvcore store ls` prints it"
            )
        if name not in ("ls", "stat"):
            action.add_argument("--dry-run", action="store_true", help="change nothing, only say what would be done")
        action.add_argument("--json", action="store_true", help="JSON on stdout")
    made["ls"].epilog = (
        "a store has no names: MODEL is known of what your caches on this machine have used, with its tenant while a "
        "cache is open that has one of its requests on record"
    )
    made["ls"].add_argument("--long", action="store_true", help="every object; with --json, one JSON object a line")
    made["verify"].add_argument("--delete", action="store_true", help="delete what is corrupt")
    made["rm"].add_argument(
        "--namespace",
        metavar="HEX",
        type=beginning,
        help=f"only this one, or how it begins: {LEAST} characters or more",
    )
    made["rm"].add_argument("--all", action="store_true", help="everything")
    made["rm"].add_argument("--yes", action="store_true", help="do not ask before --all")
    made["gc"].add_argument("--versions", action="store_true", help="also objects of another format version")
    made["gc"].add_argument("--serdes", action="store_true", help="also objects whose serde is not installed")
    made["gc"].add_argument(
        "--unused-for",
        metavar="TIME",
        type=_duration,
        help="instead: namespaces of which nothing was stored or loaded for so long, such as 30d; reads no object",
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen action. JSON: {ok, tiers: [{tier, storage, ...}]}; for `cp` {ok, from, to, ...}.

    Status 1 when something is wrong: a tier that cannot be examined, a corrupt object, one that could not be moved.
    """
    if args.action == "rm" and (args.namespace is not None) == args.all:
        raise ConfigError("rm: give either --namespace HEX or --all")
    if args.action == "gc" and args.unused_for is not None and (args.versions or args.serdes):
        raise ConfigError("gc: --unused-for reads no object; use it apart from --versions and --serdes")
    source = read_config(args.config, flags(args))
    if args.action == "cp":
        target = read_config(args.to_config, {}) if args.to_config else source
        result = running.run(copy(args, source, target))
    else:
        result = running.run(_each_tier(args, source) if args.action != "rm" else _remove(args, source))
    if args.json and not getattr(args, "long", False):
        print_json(result)
    elif args.action == "stat":
        show_stat(result["tiers"])
    return 0 if result["ok"] else 1


async def _each_tier(args: argparse.Namespace, source: Source) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    ok = True
    for tier in chosen(source.config, args.tier):
        result: dict[str, Any] = {"tier": tier.name, "storage": tier.storage.plugin}
        try:
            async with opened(tier, source.registry) as frames:
                if source.config.file is None:
                    where = f"{tier.storage.plugin} {tier_path(tier) or ''}".rstrip()
                    note(f"neither --config nor KVCORE_CONFIG names a file: tier {tier.name} is {where}")
                result |= await PER_TIER[args.action](frames, args, source)
        except VolatileError as e:
            result["skipped"] = str(e)
            ok = ok and tier.name not in args.tier  # named, it is a mistake
            note(str(e))
        except ConfigError:
            raise
        except KVCoreError as e:
            text = source.told(e)
            result |= {"ok": False, "error": text}
            error(text)
        results.append(result)
        ok = ok and result.get("ok", True)
    return {"ok": ok, "tiers": results}


async def _remove(args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """`rm`, once it is known which namespace is meant."""
    if args.namespace is not None:
        args.namespace = await namespace_of(args.namespace, chosen(source.config, args.tier), source)
    return await _each_tier(args, source)


def note(text: str) -> None:
    """What is no error, on stderr."""
    print(f"{paint('note:', 'note', sys.stderr)} {printable(text, LINES)}", file=sys.stderr)


def _namespace(text: str) -> bytes:
    try:
        namespace = bytes.fromhex(text)
    except ValueError:
        namespace = b""
    if len(namespace) != NAMESPACE_BYTES or text != namespace.hex():
        raise argparse.ArgumentTypeError(f"{text!r} is no namespace: {2 * NAMESPACE_BYTES} characters of [0-9a-f]")
    return namespace


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as e:
        text = str(e).replace("200ms or 2s", "30d or 12h")  # what is usual here
        raise argparse.ArgumentTypeError(text) from None
