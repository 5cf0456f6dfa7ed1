"""The parser, and the one place where errors become messages. Commands import what they need when they are used."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvcore import __version__
from kvcore.api.errors import KVCoreError
from kvcore.cli import extra, held, interrupted
from kvcore.cli.kit.output import error, os_error, settle

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
    "new-plugin": ("kvcore.cli.new_plugin", "write a plugin package that works and passes its own tests"),
    "store": ("kvcore.cli.store", "list, verify, copy and clean what the tiers hold"),
}
"""The core's own: command -> its module and help. A module is imported when its command is used, and offers what a
`Command` does. All others are plugins of the kind `command`."""


def run(argv: Sequence[str] | None = None) -> int:
    """Parse and run. Never lets a `KVCoreError` or an `OSError` out: its text goes to stderr."""
    if sys.stderr is None:  # closed by the caller, as by `2>&-`
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if sys.stdout is None:
        error("standard output is closed: send it somewhere, if only to /dev/null")
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):  # words of others, where the terminal's encoding lacks their letters
        sys.stdout.reconfigure(errors="backslashreplace")
    return settle(_run(list(sys.argv[1:] if argv is None else argv)))


def _run(arguments: list[str]) -> int:
    try:
        parser, command = _parser(arguments[0] if arguments and not arguments[0].startswith("-") else None)
        words: list[str] | None = None
        if getattr(command, "words_follow", False):
            arguments, words = _cut(arguments)
        args, unknown = extra.guarded(command, lambda: parser.parse_known_args(arguments))
        if unknown:
            follow = getattr(args, "words_follow", words is not None)
            leaf = _leaf(parser, args)
            hint = _meant(unknown, leaf, follow=follow)
            leaf.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        if words is not None or args.kvcore_command in COMMANDS:
            args.words = words
        if command is None:
            parser.print_help()
            return 2
        status: int = command.run(args)
        return status
    except KVCoreError as e:
        if interrupted(e) or held():
            raise KeyboardInterrupt from None
        error(str(e))
        return 2 if isinstance(e, extra.NoSuchCommand) else 1
    except SystemExit as e:  # argparse has printed why
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        error(str(e.code))
        return 1
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
    return ": what is another program's stands behind `--`" if follow else ""


def _parser(name: str | None) -> tuple[argparse.ArgumentParser, Any]:
    """The parser, and the command of this name: a `Command`, or a module of the core that offers the same."""
    parser = argparse.ArgumentParser(
        prog="kvcore",
        description="Keep and share the KV cache of LLM inference.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvcore {__version__}")
    sub = parser.add_subparsers(dest="kvcore_command", metavar="COMMAND")
    command: Any = None
    for own, (module, help_text) in COMMANDS.items():
        child = sub.add_parser(own, help=help_text, description=help_text, allow_abbrev=False)
        if own == name:
            command = import_module(module)
            command.add_arguments(child)
    if not name:
        parser.epilog = _plain(extra.others())
    elif name not in COMMANDS:
        command = extra.command(name, COMMANDS)
        child = sub.add_parser(name, description=_plain(command.help), allow_abbrev=False)
        command.add_arguments(child)
    return parser, command


def _plain(text: str) -> str:
    """A text of others that argparse shows as it is: it fills in what has this in it."""
    return text.replace("%", "%%") if "%(prog)" in text else text
