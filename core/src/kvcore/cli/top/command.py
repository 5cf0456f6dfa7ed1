"""Arguments, and what is asked and shown in which order."""

import argparse
import shutil
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvcore.api.units import parse_duration
from kvcore.cli.kit import asking
from kvcore.cli.kit.arguments import argument
from kvcore.cli.kit.output import lines, paint, print_json
from kvcore.cli.top import show
from kvcore.cli.top.looks import Looks
from kvcore.cli.top.sample import Sample, Watch

if TYPE_CHECKING:
    from kvcore.service.inspect import Cache

MIN_INTERVAL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvcore top`."""
    parser.epilog = "q ends it"
    parser.add_argument(
        "--interval", metavar="TIME", type=_interval, default=1.0, help="between two looks (default: 1s)"
    )
    parser.add_argument("--once", action="store_true", help="one look, as text")
    parser.add_argument("--json", action="store_true", help="one look, as JSON")
    asking.add_caches(parser)


def run(args: argparse.Namespace) -> int:
    """Show until somebody leaves. Status 1 when none of the caches could be asked."""
    watches = [Watch(cache) for cache in asking.chosen(args)]
    if not (args.once or args.json or not sys.stdout.isatty()):
        return _live(args, watches)
    samples = Looks().once(watches)
    if args.json:
        print_json({"caches": [_plain(*pair) for pair in zip(watches, samples, strict=True)]})
    else:
        parts = [show.cache(*pair) for pair in zip(watches, samples, strict=True)]
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
        shown = show.screen(parts, width, sys.maxsize)
        lines(paint(line.text, line.colour) if line.colour else line.text for line in shown)
    return 0 if any(sample.status for sample in samples) else 1


def _live(args: argparse.Namespace, watches: list[Watch]) -> int:
    from kvcore.cli.top.terminal import Terminal

    fixed, looks = bool(args.url or args.cache), Looks()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the terminal is given back first
    with suppress(KeyboardInterrupt), Terminal() as terminal:
        while True:
            begun = time.monotonic()
            parts = [show.cache(*pair) for pair in zip(watches, looks.again(watches), strict=True)]
            columns, rows = terminal.size
            head = show.Text(f"kvcore top  {time.strftime('%H:%M:%S')}  every {args.interval:g} s, q ends it", "dim")
            terminal.draw(show.screen([[head], *parts], columns, rows))
            if terminal.leave(max(0.05, args.interval - (time.monotonic() - begun))):
                return 0
            if not fixed:
                watches = _renewed(watches)
    return 0


def _renewed(watches: list[Watch]) -> list[Watch]:
    """The caches that are open now; those that were known keep what is known of them."""
    from kvcore.service.inspect import caches

    known = {watch.cache: watch for watch in watches}
    found: list[Cache] = caches()
    return [known.get(cache) or Watch(cache) for cache in found] or watches  # the last one is shown as gone


def _plain(watch: Watch, sample: Sample) -> dict[str, Any]:
    return {
        "cache": sample.label,
        "fault": sample.fault,
        "status": sample.status,
        "window": sample.figures.as_dict() if sample.figures is not None else None,
        "total": watch.total.as_dict() if sample.status is not None else None,
        "hot": sample.hot,
    }


@argument
def _interval(text: str) -> float:
    found = parse_duration(text)
    if found < MIN_INTERVAL_S:
        raise ValueError(f"{text} is too short: at least {MIN_INTERVAL_S * 1e3:g}ms")
    return found
