"""The command line of `kvcore bench`."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from kvcore.api.errors import ConfigError
from kvcore.cli import interrupted
from kvcore.cli.kit.output import print_json
from kvcore_bench.speed import engine, l2, machine
from kvcore_bench.speed.peer import check_python, find_scripts
from kvcore_bench.speed.rows import Row
from kvcore_bench.speed.setting import Setting
from kvcore_bench.speed.show import show

GROUPS = ("startup", "keys", "l1", "calls", "server", "disk", "serde", "transfer")
"""In the order in which they run: what must not be disturbed by torch comes before it is imported."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvcore bench`."""
    parser.add_argument("--quick", action="store_true", help="fewer rounds and bytes: about a minute")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    parser.add_argument(
        "--only",
        action="append",
        choices=GROUPS,
        metavar="GROUP",
        help=f"only this group; repeatable: {', '.join(GROUPS)}",
    )
    parser.add_argument("--path", metavar="DIR", help="where disk rows write (default: the temporary directory)")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter of a peer's environment, to measure beside ours")
    parser.add_argument(
        "--peer-scripts", metavar="DIR", help="scripts that measure the peer (default: benchmarks/peer)"
    )
    subjects = parser.add_subparsers(dest="subject", metavar="SUBJECT")
    help_text = "the configured tiers instead, with and without their serdes"
    l2.add_arguments(subjects.add_parser("l2", help=help_text, description=help_text, allow_abbrev=False))
    help_text = "a serving engine instead, as its clients see it, with and without a cache behind it"
    engine.add_arguments(subjects.add_parser("engine", help=help_text, description=help_text, allow_abbrev=False))
    parser.set_defaults(words_follow=False)


def run(args: argparse.Namespace) -> int:
    """Measure and print. JSON: {machine: {...}, rows: [{name, value, unit, limit, ratio_to_limit, peer,
    ratio_to_peer, budget, budget_met}]}; a row may have a `note`; its budget is {of, most} or {of, least}.
    Raises `ConfigError` and `PeerError` for what it cannot use."""
    if args.words and not args.words_follow:
        raise ConfigError("kvcore bench: words behind `--` are for kvcore bench engine WORKLOAD --vllm MODEL")
    if args.subject == "l2":
        return l2.run(args)
    if args.subject == "engine":
        return engine.run(args)
    path = Path(args.path or tempfile.gettempdir()).resolve()
    if not path.is_dir():
        raise ConfigError(f"--path {args.path}: no such directory")
    setting = Setting(args.quick, path, _say)
    if args.peer:
        check_python(args.peer)
        setting = Setting(args.quick, path, _say, args.peer, find_scripts(args.peer_scripts))
    described = machine.describe(path, setting.peer_name())
    begun = time.monotonic()
    try:
        rows = measure_all(args.only or GROUPS, setting)
    except Exception as error:
        if interrupted(error):  # closing what was in use has failed: no wonder, and not what happened
            raise KeyboardInterrupt from error
        raise
    described["seconds"] = round(time.monotonic() - begun, 1)
    if args.json:
        print_json({"machine": described, "rows": [row.as_json() for row in rows]})
    else:
        show(described, rows)
    return 0


def measure_all(groups: Sequence[str], setting: Setting) -> list[Row]:
    """The rows of `groups`, in the order of `GROUPS`."""
    rows: list[Row] = []
    chosen = [group for group in GROUPS if group in groups]
    for i, group in enumerate(chosen, 1):
        # No progress bar: its thread would be measured too.
        setting.say(f"[{i}/{len(chosen)}] {group}")
        rows += import_module(f"kvcore_bench.speed.{group}").run(setting)
    return rows


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
