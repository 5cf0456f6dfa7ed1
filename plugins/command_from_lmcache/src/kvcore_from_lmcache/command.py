"""The command line of `kvcore from-lmcache`."""

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import yaml

from kvcore.api import ConfigError
from kvcore.cli.kit.output import paint, print_json, printable, write_file
from kvcore.plugins.known import PACKAGES
from kvcore_from_lmcache import connector, engine, kubernetes, server, sources, words
from kvcore_from_lmcache.draft import Draft, Line, Setting, Verdict
from kvcore_from_lmcache.sources import Found

STORES = ("local_disk", "gds_path", "weka_path", "phx_path", "remote_url", "remote_storage_plugins", "storage_plugins",
          "l2-adapter")  # fmt: skip
"""Settings of LMCache that name a store."""
COLOURS = {"kept": "ok", "changed": "note", "left out": "warning"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE, or `--` and a command line, or the environment."""
    parser.add_argument(
        "source",
        nargs="*",
        metavar="FILE",
        help="LMCache's YAML file (-: standard input), or a Kubernetes manifest that runs it; or, after `--`, a "
        "command line of its server or of an engine with it: -- lmcache server --l1-size-gb 60",
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

    JSON: {config, lines: [{place, setting, verdict, became, why}], warnings: [text], start: [words]}.
    """
    args.out = None if args.out == "-" else args.out
    found, draft = _convert(args)
    read = found.all()
    text = _yaml(draft, _source(args.source, found))
    order = {setting.place: i for i, setting in reversed(list(enumerate(read)))}
    lines = sorted(draft.lines, key=lambda line: _rank(line.setting.place.partition("[")[0], order))
    if args.out:
        _write(args.out, text)
    warnings = _warnings(draft, found)
    if args.json:
        plain = [_plain(line) for line in lines]
        print_json({"config": draft.ordered(), "lines": plain, "warnings": warnings, "start": found.start})
        return 0
    report = sys.stdout if args.out else sys.stderr  # with the YAML on stdout, what people read goes elsewhere
    for line in lines:
        verdict = f"{line.verdict:9}"
        told = printable(str(line).removeprefix(verdict))
        print(paint(verdict, COLOURS[line.verdict], report) + told, file=report)
    for warning in warnings:
        print(f"{paint('warning:', 'warning', report)} {warning}", file=report)
    print(_summary(lines, draft, args.out or "kvcore.yaml"), file=report)
    for head, tail in _then(found, draft):
        print("Then: " + shlex.join([*head, "--config", args.out or "kvcore.yaml", *tail]), file=report)
    if not args.out:
        print(text, end="")
    return 0


def _convert(args: argparse.Namespace) -> tuple[Found, Draft]:
    found = _read(args)
    draft = Draft()
    if found.server or found.connector:
        in_engine = bool(found.engine) or any(_in_engine(setting) for setting in found.connector)
        if not in_engine or found.server:
            server.convert(found.server, draft)
            found.beside += [
                (setting, "of an LMCache in the engine; its server is converted") for setting in found.engine
            ]
            found.engine = []
        else:
            engine.convert(found.engine, draft)
        connector.convert(found.connector, draft)
    elif found.engine or not found.beside:
        engine.convert(found.engine, draft)
    for setting, why in found.beside:
        draft.leave(setting, why)
    return found, draft


def _in_engine(setting: Setting) -> bool:
    return setting.name == "kv_offloading_backend" or (
        setting.name == "kv_connector" and str(setting.value).startswith("LMCache") and "MP" not in setting.value
    )


def _read(args: argparse.Namespace) -> Found:
    given = args.source
    if _is_command(given):
        return _from_words(given, env=args.env)
    file = given[0] if given else os.environ.get(sources.FILE) if args.env else None
    file = "/dev/stdin" if file == "-" else file
    if file is None and not args.env:
        raise ConfigError("nothing to convert: give LMCache's YAML file, or --env, or `-- lmcache server FLAGS`")
    found = _from_file(file) if file is not None else Found()
    if args.env:
        _over(found, sources.from_environment(os.environ), "the environment says otherwise")
    return found


def _is_command(given: Sequence[str]) -> bool:
    one = given[0].lstrip() if len(given) == 1 else ""
    return len(given) > 1 or (one != "-" and one.startswith(("-", "lmcache ")))


def _from_file(path: str) -> Found:
    trees = sources.read_trees(path)
    if kubernetes.is_one(trees):
        return kubernetes.settings(path, trees)
    return Found(engine=[setting for tree in trees for setting in sources.settings_of(tree, path)])


def _from_words(given: Sequence[str], *, env: bool) -> Found:
    line = [words.Word(word) for word in given] if len(given) > 1 else words.split(given[0])
    if (why := words.other_program(line)) is not None:
        raise ConfigError(why)
    found = words.from_words(line)
    if env and found.server:
        raise ConfigError("--env is LMCache's inside an engine: its server reads flags only. Leave --env out")
    file = words.file_of(line)
    if file is not None:
        own, found.engine = found.engine, _from_file(file.text).engine
        _over(found, own, "the command line says otherwise")
    if not found.all():
        raise ConfigError(
            "no flag in this command line is LMCache's: give that of its server, or of an engine with it; or one file"
        )
    return found


def _over(found: Found, above: list[Setting], why: str) -> None:
    found.engine, lost = sources.over(found.engine, above)
    found.beside += [(setting, why) for setting in lost]


def _rank(place: str, order: dict[str, int]) -> tuple[int, int]:
    """Lines of a file as they stand there, then the others as they were read, then defaults."""
    line = place.rpartition(":")[2]
    return (0, int(line)) if line.isdigit() else (1, order[place]) if place in order else (2, 0)


def _warnings(draft: Draft, found: Found) -> list[str]:
    """Nothing of it is LMCache's; or stores were named, and there is not one tier."""
    read = found.all()
    if found.engine == read and read and not any(engine.knows(setting.name) for setting in read):
        return ["not one of these is a setting of LMCache: is it the right file?"]
    named = dict.fromkeys(s.name for s in read if s.name in STORES and s.value)
    if not named or draft.values.get("l2"):
        return []
    return [f"no tier is left of {', '.join(named)}: what leaves L1 is lost. Add one to `l2` (docs/plugins.md)"]


def _yaml(draft: Draft, source: str) -> str:
    values = draft.ordered()
    body = yaml.safe_dump(values, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)
    return f"# Made by `kvcore from-lmcache` from {source}.\n{body}"


def _source(given: Sequence[str], found: Found) -> str:
    """On one line, and without a command line's secrets."""
    if _is_command(given):
        return "a server's flags" if found.server and not found.connector else "an engine's command line"
    return given[0].splitlines()[0] if given else "the environment"


def _write(path: str, text: str) -> None:
    try:
        write_file(path, text, new=True)
    except FileExistsError:
        raise ConfigError(f"{path} exists: give another --out, or remove it") from None


def _summary(lines: list[Line], draft: Draft, out: str) -> str:
    counts = Counter(line.verdict for line in lines)
    tiers = draft.values.get("l2", [])
    used = [("storage", tier["storage"]["plugin"]) for tier in tiers]
    used += [("serde", serde["plugin"]) for tier in tiers for serde in tier.get("serde", ())]
    packages = dict.fromkeys(PACKAGES[plugin] for plugin in used)
    install = f"pip install {' '.join(packages)}; " if packages else ""
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict))
    return f"{told}. Next: {install}kvcore config check {out}"


def _then(found: Found, draft: Draft) -> list[tuple[list[str], list[str]]]:
    """What to start with the file: the words before its name and those behind it."""
    served: list[tuple[list[str], list[str]]] = [(["kvcore", "serve"], [])] if "server" in draft.values else []
    return [*served, (found.start[:3], found.start[3:])] if found.start else served


def _plain(line: Line) -> dict[str, Any]:
    return {
        "place": line.setting.place,
        "setting": line.setting.shown,
        "verdict": line.verdict,
        "became": line.became,
        "why": line.why,
    }
