"""`kvcore bench l2`: the configured tiers, with and without their serdes, beside what their medium can do.

GB/s are of payload, before encoding and after decoding: batches as the controllers cut them, as many at once as the
storage likes. p50 and p99 are of calls for one object, one after the other. `exists` is microseconds per object of one
call for all, which is how a lookup asks. The objects are throw-away, of a namespace of their own, and are deleted; a
full tier makes room for them as it does for an engine's.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvcore.api import ConfigError, KVCoreError, format_size, parse_size
from kvcore.cli.kit.arguments import argument
from kvcore.cli.kit.configured import add_file, add_set, flags
from kvcore.cli.kit.heard import heard
from kvcore.cli.kit.opened import Source, chosen, read_config
from kvcore.cli.kit.output import error, paint, print_json, table
from kvcore.cli.kit.progress import Progress
from kvcore.cli.kit.running import Runs
from kvcore.config import TierConfig
from kvcore.l2 import Tier
from kvcore_bench.speed import machine
from kvcore_bench.speed.l2_limit import limit_of
from kvcore_bench.speed.l2_subject import OPERATIONS, Load, Subject
from kvcore_bench.speed.measure import Case, Sampler, measure
from kvcore_bench.speed.rows import Row, Unit
from kvcore_bench.speed.show import number

MIN_BYTES, MAX_BYTES = 4096, 1 << 30
UNITS: dict[str, Unit] = {"store": "GB/s", "exists": "us", "load": "GB/s"}


class Cell(NamedTuple):
    """What was measured of one operation: its row, and those of its latencies. `failed`: what is not in the numbers."""

    tier: str
    size: str
    serde: str
    op: str
    rows: tuple[Row, ...]
    failed: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvcore bench l2`. Those that `kvcore bench` has, too, may stand before `l2` as well."""
    add_file(parser)
    add_set(parser)
    parser.add_argument("--tier", action="append", default=[], metavar="NAME", help="only this tier; repeatable")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default="64KiB,2MiB,32MiB",
        metavar="SIZE,...",
        help="bytes per object, without a serde (default: 64KiB,2MiB,32MiB)",
    )
    for name, help_text in (("--quick", "fewer rounds and bytes"), ("--json", "JSON on stdout")):
        parser.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=help_text)


def run(args: argparse.Namespace) -> int:
    """Measure and print. JSON: {machine, rows} as of `kvcore bench`, with the rows `l2.TIER.SIZE[.serde].OPERATION`,
    and `.p50` and `.p99` of each. Status 1 when a tier could not be measured, or objects failed;
    the rows then say why."""
    if args.only or args.path or args.peer or args.peer_scripts:
        raise ConfigError("bench l2: --only, --path and --peer belong to `kvcore bench` without l2; choose with --tier")
    source = read_config(args.config, flags(args))
    tiers = chosen(source.config, args.tier)
    paths = [path for t in tiers if (path := getattr(t.storage.options, "path", None)) is not None]
    described = machine.describe(Path(paths[0]).expanduser().absolute() if paths else Path(tempfile.gettempdir()), None)
    load = Load(64 << 20, 64, 16) if args.quick else Load(256 << 20, 256, 64)
    rounds = 2 if args.quick else 4
    begun = time.monotonic()
    cells: list[Cell] = []
    with heard(), Runs() as runner, Progress("measuring", unit="") as progress:
        for tier in tiers:
            cells += _measure_tier(runner, tier, source, args.sizes, load, rounds, progress)
    described["seconds"] = round(time.monotonic() - begun, 1)
    if args.json:
        print_json({"machine": described, "rows": [row.as_json() for cell in cells for row in cell.rows]})
    else:
        print(", ".join(f"{key} {value}" for key, value in described.items() if value is not None))
        print()
        _show(cells)
    return 1 if any(cell.failed or row.value is None for cell in cells for row in cell.rows) else 0


def _measure_tier(
    runner: Runs,
    config: TierConfig,
    source: Source,
    sizes: Sequence[int],
    load: Load,
    rounds: int,
    progress: Progress,
) -> list[Cell]:
    cells: list[Cell] = []
    subject: Subject | None = None
    try:
        subject = Subject(runner, config, source.registry, load)
        counts = subject.objects_of(sizes)
        for size in sizes:
            for tier in subject.chains:
                serde = "+".join(s.tag for s in tier.codec.chain)
                progress.now(f"{config.name}, {counts[size]} objects of {format_size(size)}{serde and ', '}{serde}")
                try:
                    if not counts[size]:
                        raise KVCoreError(f"no room for one object of {format_size(size)}, in memory or in the tier")
                    cells += _measure(subject, config, tier, size, counts[size], rounds, serde)
                except KVCoreError as e:
                    error(f"tier {config.name}, {format_size(size)}: {e}")
                    cells += _absent(config.name, size, serde, str(e))
    except KVCoreError as e:  # it is down
        error(str(e))
        names = "+".join(spec.plugin for spec in config.serde)
        chains = ("", names) if names else ("",)
        return [cell for size in sizes for serde in chains for cell in _absent(config.name, size, serde, str(e))]
    finally:
        if subject is not None and (left := subject.close()):
            error(left)
    return cells


def _measure(
    subject: Subject, config: TierConfig, tier: Tier, size: int, count: int, rounds: int, serde: str
) -> list[Cell]:
    prefix = _prefix(config.name, size, serde)
    with (
        subject.measured(tier, size, count, warm_up=rounds > 2) as done,
        limit_of(subject.storage, config.storage.options, size, count) as limit,
    ):
        note = limit.note if limit else ""
        cases = [
            Case(f"{prefix}.store", "GB/s", done.store, limit and _tolerant(limit.write), note=note),
            Case(f"{prefix}.exists", "us", done.exists),
            Case(f"{prefix}.load", "GB/s", done.load, limit and _tolerant(limit.read), note=note),
        ]
        measured = measure(cases, rounds)
        cells = []
        for op, row in zip(OPERATIONS, measured, strict=True):
            calls = f"of {len(done.seconds[op])} calls for one object"
            failed = done.failed()
            row = row._replace(note="; ".join(filter(None, (row.note, failed))))  # noqa: PLW2901
            latencies = [Row(f"{row.name}.p{p}", done.percentile(op, p), "us", note=calls) for p in (50, 99)]
            cells.append(Cell(config.name, _label(size), serde, op, (row, *latencies), failed))
        if serde:
            cells.append(Cell(config.name, _label(size), serde, "ratio", (Row(f"{prefix}.ratio", done.ratio(), "x"),)))
        return cells


def _tolerant(limit: Sampler) -> Callable[[], float | None]:
    """A limit that cannot be measured, on a full disk perhaps, is none; the tier is measured all the same."""

    def sample() -> float | None:
        try:
            return limit()
        except (OSError, subprocess.SubprocessError) as e:
            error(f"the limit cannot be measured: {e}")
            return None

    return sample


def _absent(tier: str, size: int, serde: str, why: str) -> list[Cell]:
    prefix = _prefix(tier, size, serde)
    cells = []
    for op, unit in UNITS.items():
        rows: list[Row] = [Row(f"{prefix}.{op}", None, unit, note=why)]
        rows += [Row(f"{prefix}.{op}.p{p}", None, "us", note=why) for p in (50, 99)]
        cells.append(Cell(tier, _label(size), serde, op, tuple(rows)))
    return cells


def _show(cells: Sequence[Cell]) -> None:
    """The cells that have numbers: why others have none was said as it happened."""
    cells = [cell for cell in cells if cell.rows[0].value is not None]
    if not cells:
        return
    lines = []
    for cell in cells:
        row, *latencies = cell.rows
        value = "-" if row.value is None else f"{number(row.value)} {row.unit}"
        times = [_time(each.value) for each in latencies] or ["", ""]
        lines.append(
            (cell.tier, cell.size, cell.serde or "-", cell.op, value, *times, number(row.limit),
             number(row.ratio_to_limit))
        )  # fmt: skip
    table(("TIER", "SIZE", "SERDE", "OPERATION", "VALUE", "P50", "P99", "LIMIT", "/LIMIT"), lines)
    notes = [f"{cell.tier}: {cell.rows[0].note.removesuffix(cell.failed).rstrip('; ')}" for cell in cells]
    notes += [f"{c.tier}, {c.size}{c.serde and ', '}{c.serde}: {c.failed}" for c in cells if c.failed]
    for text in dict.fromkeys(note for note in notes if not note.endswith(": ")):
        print(paint(text, "dim"))


def _time(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{number(us)} us" if us < 1000 else f"{number(us / 1000)} ms"


def _prefix(tier: str, size: int, serde: str) -> str:
    return f"l2.{tier}.{_label(size)}{'.serde' if serde else ''}"


def _label(size: int) -> str:
    return format_size(size).replace(" ", "")


@argument
def _sizes(text: str) -> list[int]:
    sizes = [parse_size(word) for word in text.split(",")]
    for size in sizes:
        if not MIN_BYTES <= size <= MAX_BYTES or size % 2:
            raise ValueError(
                f"{size} bytes: an even size from {format_size(MIN_BYTES)} to {format_size(MAX_BYTES)} is needed"
            )
    return list(dict.fromkeys(sizes))
