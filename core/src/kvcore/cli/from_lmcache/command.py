"""The command line of `kvcore config from-lmcache`."""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import yaml

from kvcore.api import ConfigError
from kvcore.cli.from_lmcache import engine, server, sources
from kvcore.cli.from_lmcache.draft import Draft, Line, Setting, Verdict
from kvcore.cli.output import paint, print_json
from kvcore.plugins.known import PACKAGES

STORES = ("local_disk", "gds_path", "weka_path", "remote_url", "remote_storage_plugins", "l2-adapter")
"""Settings of LMCache that name a store."""
COLOURS = {"kept": "ok", "changed": "note", "left out": "warning"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE, or `--` and a command line, or the environment."""
    parser.add_argument(
        "source",
        nargs="*",
        metavar="FILE",
        help="LMCache's YAML file; or, after `--`, the command line of its server: -- lmcache server --l1-size-gb 60",
    )
    parser.add_argument(
        "--env",
        action="store_true",
        help="read the variables LMCACHE_* of this environment, too; they win over the file, as in LMCache",
    )
    parser.add_argument("--out", metavar="FILE", help="write the kvcore.yaml there; default: stdout")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Convert, and say what became of each setting.

    JSON: {config, lines: [{place, setting, verdict, became, why}], warnings: [text]}.
    """
    draft, read = _convert(args)
    text = _yaml(draft, " ".join(args.source) or "the environment")
    order = {setting.place: i for i, setting in reversed(list(enumerate(read)))}
    lines = sorted(draft.lines, key=lambda line: order.get(line.setting.place.partition("[")[0], len(order)))
    if args.out:
        _write(args.out, text)
    warnings = _warnings(draft, read)
    if args.json:
        print_json({"config": draft.ordered(), "lines": [_plain(line) for line in lines], "warnings": warnings})
        return 0
    report = sys.stdout if args.out else sys.stderr  # with the YAML on stdout, what people read goes elsewhere
    for line in lines:
        verdict = f"{line.verdict:9}"
        print(paint(verdict, COLOURS[line.verdict], report) + str(line).removeprefix(verdict), file=report)
    for warning in warnings:
        print(f"{paint('warning:', 'warning', report)} {warning}", file=report)
    print(_summary(lines, draft, args.out or "kvcore.yaml"), file=report)
    if not args.out:
        print(text, end="")
    return 0


def _convert(args: argparse.Namespace) -> tuple[Draft, list[Setting]]:
    words, file = args.source, os.environ.get("LMCACHE_CONFIG_FILE") if args.env else None
    draft = Draft()
    if len(words) > 1 or (words and words[0].lstrip().startswith(("-", "lmcache "))):
        if args.env:
            raise ConfigError("--env is LMCache's inside an engine: its server reads flags only. Leave --env out")
        read = sources.from_command(words)
        if not read:
            raise ConfigError(f"no flag in {' '.join(words)!r}: give the command line of LMCache's server")
        server.convert(read, draft)
        return draft, read
    file = words[0] if words else file
    if file is None and not args.env:
        raise ConfigError("nothing to convert: give LMCache's YAML file, or --env, or `-- lmcache server FLAGS`")
    read = sources.from_file(file) if file is not None else []
    if args.env:
        read, lost = sources.over(read, sources.from_environment(os.environ))
        for setting in lost:
            draft.leave(setting, "the environment says otherwise")
    engine.convert(read, draft)
    return draft, read


def _warnings(draft: Draft, read: list[Setting]) -> list[str]:
    """Stores were named, and there is not one tier."""
    named = dict.fromkeys(s.name for s in read if s.name in STORES and s.value)
    if not named or draft.values.get("l2"):
        return []
    return [f"no tier is left of {', '.join(named)}: what leaves L1 is lost. Add one to `l2` (docs/plugins.md)"]


def _yaml(draft: Draft, source: str) -> str:
    values = draft.ordered()
    body = yaml.safe_dump(values, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)
    return f"# Made by `kvcore config from-lmcache` from {_first(source)}.\n{body}"


def _first(text: str) -> str:
    """On one line, and without an adapter's secrets."""
    return "a server's flags" if len(text.split()) > 3 else text.splitlines()[0]


def _write(path: str, text: str) -> None:
    try:
        with Path(path).open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists: give another --out, or remove it") from None


def _summary(lines: list[Line], draft: Draft, out: str) -> str:
    counts = Counter(line.verdict for line in lines)
    plugins = [tier["storage"]["plugin"] for tier in draft.values.get("l2", [])]
    packages = dict.fromkeys(PACKAGES["storage", plugin] for plugin in plugins)
    install = f"pip install {' '.join(packages)}; " if packages else ""
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict))
    return f"{told}. Next: {install}kvcore config check {out}"


def _plain(line: Line) -> dict[str, Any]:
    return {
        "place": line.setting.place,
        "setting": line.setting.shown,
        "verdict": line.verdict,
        "became": line.became,
        "why": line.why,
    }
