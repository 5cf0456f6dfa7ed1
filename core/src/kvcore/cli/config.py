"""`kvcore config`: check a file, show the values in force and where each comes from."""

import argparse
import os
from typing import Any

from kvcore.api.errors import PluginError
from kvcore.cli.kit.configured import add_file, add_set, flags
from kvcore.cli.kit.output import paint, print_json, table
from kvcore.plugins import registry_from_env


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `kvcore config`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, help_text in (
        ("check", "list every fault of a file, with its place; status 1 when there is one"),
        ("show", "every value in force, with its source: file, environment, flag or default"),
    ):
        action = actions.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        add_file(action, "a YAML file", required=name == "check")
        if name == "check":
            action.usage = "kvcore config check [OPTIONS] FILE"
        add_set(action)
        action.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action."""
    return {"check": _check, "show": _show}[args.action](args)


def _check(args: argparse.Namespace) -> int:
    """JSON: {file, ok, faults: [{place, path, text}], notes: [text]}."""
    from kvcore.config import InvalidConfigError, load_config
    from kvcore.config.advice import capacities, notes_on, unusable
    from kvcore.config.scripts import script_faults

    faults: list[dict[str, str]] = []
    notes: list[str] = []
    registry = registry_from_env()
    try:
        config = load_config(args.config, env=os.environ, flags=flags(args), registry=registry)
        registry.use_hooks(config.hooks)
        if wrong := capacities(config, registry) + script_faults(config.plugins, config.sources):
            raise InvalidConfigError(wrong)
        notes = notes_on(config) + unusable(config, registry)
    except PluginError as e:
        text = str(e)
        faults = [{"place": args.config or "", "path": "hooks", "text": text}]
    except InvalidConfigError as e:
        faults = [{"place": f.place, "path": f.path, "text": f.text} for f in e.faults]
        text = str(e)
    if args.json:
        print_json({"file": args.config, "ok": not faults, "faults": faults, "notes": notes})
    elif faults:
        print(text)
        print(paint(f"{args.config}: {len(faults)} {'fault' if len(faults) == 1 else 'faults'}", "error"))
    else:
        print(paint(f"{args.config}: no faults", "ok"))
        for note in notes:
            print(f"{paint('note:', 'note')} {note}")
    return 1 if faults else 0


def _show(args: argparse.Namespace) -> int:
    """JSON: {file, values: [{path, value, source: {kind, name, line, column}}]}. Secrets are masked."""
    from kvcore.config import load_config

    config = load_config(args.config, env=os.environ, flags=flags(args), registry=registry_from_env())
    rows = config.rows()
    if args.json:
        values: list[dict[str, Any]] = []
        for path, value, source in rows:
            where = {"kind": source.kind, "name": source.name, "line": source.line, "column": source.column}
            values.append({"path": path, "value": value, "source": where})
        print_json({"file": config.file, "values": values})
        return 0
    table(("PATH", "VALUE", "SOURCE"), [(r.path, _text(r.value), str(r.source)) for r in rows])
    return 0


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value) if value != "" else '""'
