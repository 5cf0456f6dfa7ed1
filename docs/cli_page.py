"""docs/cli.md, out of the parser."""

import argparse
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from kvcore.cli.app import COMMANDS
from kvcore.cli.extra import command
from kvcore.plugins.known import PACKAGES

Actions = list[argparse.Action]
FOLDERS = {
    "kvcore-bench": "../plugins/command_bench/README.md",
    "kvcore-from-lmcache": "../plugins/command_from_lmcache/README.md",
}


def page(note: str) -> str:
    """The page; `note` says who writes it."""
    others = {name: distribution for (kind, name), distribution in PACKAGES.items() if kind == "command"}
    offered: dict[str, tuple[Any, str]] = {name: (import_module(of), text) for name, (of, text) in COMMANDS.items()}
    offered |= {name: (made, made.help) for name in others for made in [command(name, ())]}
    packages = {name: f" ([{of}]({FOLDERS[of]}))" for name, of in others.items()}
    parts = [
        "# Command line",
        note,
        "`kvcore COMMAND --help` says the same. `kvcore --version` prints the version. The status is 0 when all is "
        "well, 1 when something is wrong, 2 when the command was written wrong, and 130 when Ctrl-C cut it short; what "
        "goes on until then, such as `kvcore top`, ends with 0. What a command has to say goes to standard output, "
        "errors to standard error; with `--json` the former is one JSON document, "
        "whose fields are kept as [versions.md](versions.md) says. Options are not abbreviated.",
        "The last of these commands come with packages of their own, named beside them. "
        "[Another](write-a-plugin.md#a-command) is a plugin like any other.",
        "\n".join(
            [
                "| command | |",
                "|---|---|",
                *(
                    f"| [`kvcore {name}`](#kvcore-{name}) | {text}{packages.get(name, '')} |"
                    for name, (_, text) in offered.items()
                ),
            ]
        ),
    ]
    for name, (made, text) in offered.items():
        parser = argparse.ArgumentParser(prog=f"kvcore {name}", description=text, allow_abbrev=False)
        made.add_arguments(parser)
        parts += _command(parser, text)
    return "\n\n".join(parts) + "\n"


def _command(parser: argparse.ArgumentParser, text: str, level: int = 2) -> Iterator[str]:
    """A command and those below it."""
    yield f"{'#' * level} `{parser.prog}`"
    yield _sentence(text or parser.description or "")
    shown = [a for a in parser._actions if a.help != argparse.SUPPRESS and not isinstance(a, argparse._HelpAction)]
    below = [a for a in shown if isinstance(a, argparse._SubParsersAction)]
    shown = [a for a in shown if a not in below]
    yield f"```text\n{parser.usage or _usage(parser.prog, shown, below)}\n```"
    if shown:
        rows = [f"| {_name(a)} | {_help(parser, a)} |" for a in shown]
        yield "\n".join(["| argument | meaning |", "|---|---|", *rows])
    if parser.epilog:
        yield _sentence(parser.epilog)
    for group in below:
        texts = {a.dest: a.help or "" for a in group._choices_actions}
        for name, child in group.choices.items():
            if texts.get(name) != argparse.SUPPRESS:
                yield from _command(child, texts.get(name, ""), level + 1)


def _usage(prog: str, shown: Actions, below: Actions) -> str:
    required = [f"{a.option_strings[-1]} {_value(a)}".rstrip() for a in shown if a.option_strings and a.required]
    options = ["[OPTIONS]"] if any(a.option_strings and not a.required for a in shown) else []
    positional = [_positional(a) for a in shown if not a.option_strings]
    return " ".join([prog, *required, *options, *positional, *map(_below, below)])


def _below(action: argparse.Action) -> str:
    words = f"{action.metavar or action.dest} ..."
    return words if action.required else f"[{words}]"


def _positional(action: argparse.Action) -> str:
    value = _value(action)
    return {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} ..."}.get(str(action.nargs), value)


def _value(action: argparse.Action) -> str:
    """What stands behind an option, or in the place of a positional argument."""
    if action.nargs == 0:
        return ""
    if action.metavar is not None:
        value = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    elif action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = action.dest.upper()
    return f"[{value}]" if action.nargs == "?" and action.option_strings else value


def _name(action: argparse.Action) -> str:
    words = [f"{option} {_value(action)}".rstrip() for option in action.option_strings] or [_value(action)]
    return ", ".join(f"`{word}`".replace("|", "\\|") for word in words)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    if action.required and action.option_strings:
        text = f"{text} (**required**)"
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str) -> str:
    text = " ".join(text.split()).replace("<", "&lt;")
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ":")) or not text else ".")
