"""The parser, and the one place where errors become messages. Commands import what they need when they are used."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from kvcore import __version__
from kvcore.api.errors import KVCoreError
from kvcore.cli import held, interrupted
from kvcore.cli.output import error, os_error, settle

COMMANDS = {
    "plugins": ("kvcore.cli.plugins", "list, show and check plugins"),
    "config": ("kvcore.cli.config", "check a configuration, show its values and where they come from"),
    "doctor": (
        "kvcore.cli.doctor",
        "examine this machine, the plugins and every tier, in which it stores and loads a probe",
    ),
    "run": ("kvcore.cli.run", "start an engine with kvcore"),
    "serve": ("kvcore.cli.serve", "serve one cache to all engines of this machine"),
    "explain": ("kvcore.cli.explain", "why a request's prompt was found, or not, and what that saved"),
    "diff": ("kvcore.cli.diff", "how much two prompts have in common, to the cache"),
    "top": ("kvcore.cli.top", "what open caches are doing, live"),
    "pin": ("kvcore.cli.pin", "keep a prefix in the L1 of open caches for a time"),
    "clear": ("kvcore.cli.clear", "have open caches forget objects"),
    "bench": ("kvcore.cli.bench", "measure speed against this machine's limits"),
    "plan": ("kvcore.cli.plan", "a model's KV: its size, load against compute time, and what to configure"),
    "record": ("kvcore.cli.record", "record the lookups of running caches as an anonymous trace"),
    "replay": ("kvcore.cli.replay", "send a trace through a real cache: hit rate by tier, and lookup latency"),
    "simulate": ("kvcore.cli.simulate", "replay a trace through eviction policies: hit rate against capacity"),
    "new-plugin": ("kvcore.cli.new_plugin", "write a plugin package that works and passes its own tests"),
    "store": ("kvcore.cli.store", "list, verify, copy and clean what the tiers hold"),
}
"""Command -> its module and help. A module offers `add_arguments(parser)` and `run(args) -> int`; it is imported only
when its command is used, and a command whose module is absent does not exist. Where it has `WORDS_FOLLOW`, what stands
behind `--` is another program's and becomes `args.words`."""


def run(argv: Sequence[str] | None = None) -> int:
    """Parse and run. Never lets a `KVCoreError` or an `OSError` out: its text goes to stderr."""
    if sys.stderr is None:  # closed by the caller, as by `2>&-`
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if sys.stdout is None:
        error("standard output is closed: send it somewhere, if only to /dev/null")
        return 1
    return settle(_run(list(sys.argv[1:] if argv is None else argv)))


def _run(arguments: list[str]) -> int:
    try:
        parser, modules = _parser(next((a for a in arguments if not a.startswith("-")), None))
        words: list[str] | None = None
        if any(getattr(module, "WORDS_FOLLOW", False) for module in modules.values()):
            arguments, words = _cut(arguments)
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            follow = getattr(args, "words_follow", words is not None)
            leaf = _leaf(parser, args)
            hint = _meant(unknown, leaf, follow=follow)
            leaf.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        args.words = words
        if args.command is None:
            parser.print_help()
            return 2
        status: int = modules[args.command].run(args)
        return status
    except KVCoreError as e:
        if interrupted(e) or held():
            raise KeyboardInterrupt from None
        error(str(e))
        return 1
    except SystemExit as e:  # argparse has printed why
        return e.code if isinstance(e.code, int) else 2
    except KeyboardInterrupt:
        error("interrupted")
        return 130
    except OSError as e:
        if held():
            raise KeyboardInterrupt from None
        return os_error(e)


def _cut(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before the first `--`, and behind it."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _leaf(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """That of the command that was chosen."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and getattr(args, action.dest, None) is not None:
            return _leaf(action.choices[getattr(args, action.dest)], args)
    return parser


def _meant(unknown: list[str], parser: argparse.ArgumentParser, *, follow: bool) -> str:
    """What may have been meant. `follow`: words that are like ours may be the engine's."""
    from kvcore.plugins.registry import nearest

    options = parser._option_string_actions
    for name in (word.partition("=")[0] for word in unknown if word.startswith("--") and word != "--"):
        near = [option for option in options if option.startswith(name)]
        if found := near[0] if near else None if follow else nearest(name, options):
            return f" (did you mean {found}?)"
    file = next((word for word in unknown if word.endswith((".yaml", ".yml"))), None)
    if file is not None and "--config" in options:  # there are other words, and FILE is taken by the flag only
        return f" (did you mean --config {file}?)"
    return ": what is the engine's stands behind `--`" if follow else ""


def _parser(command: str | None) -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    parser = argparse.ArgumentParser(
        prog="kvcore", description="Keep and share the KV cache of LLM inference.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvcore {__version__}")
    sub = parser.add_subparsers(dest="command", metavar="COMMAND")
    modules: dict[str, ModuleType] = {}
    for name, (module, help_text) in COMMANDS.items():
        if find_spec(module) is None:
            continue
        child = sub.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        if name == command:
            modules[name] = import_module(module)
            modules[name].add_arguments(child)
    return parser, modules
