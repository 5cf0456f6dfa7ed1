"""Runs `kvcore bench` beside the peer and writes the tables of `docs/performance.md`.

    python benchmarks/run.py --peer PEER/bin/python [--runs 3] [--quick] [--only GROUP] [--path DIR] [--out DIR]

Writes `NAME.json` (all runs) and `table.md` to `benchmarks/results`. With several runs a number is the
best of them and a ratio is their median. Run it on an idle machine.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvcore_bench.speed.rows import BUDGETS, SMALLER_IS_BETTER, Row
from kvcore_bench.speed.show import number

HERE = Path(__file__).resolve().parent
_BENCH = "import sys; from kvcore.cli import main; sys.exit(main(['bench', '--json', *sys.argv[1:]]))"


def main() -> None:
    parser = argparse.ArgumentParser(description="kvcore bench beside the peer, as files.")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter of the peer's environment (see README.md)")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="runs to merge (default: 1)")
    parser.add_argument("--name", default="latest", help="name of the JSON file (default: latest)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="GROUP")
    parser.add_argument("--path", metavar="DIR", help="where disk rows write")
    parser.add_argument("--out", type=Path, default=HERE / "results", metavar="DIR", help="where the files go")
    args = parser.parse_args()
    options = ["--peer-scripts", str(HERE / "peer")] if args.peer else []
    for flag, values in (("--peer", [args.peer]), ("--path", [args.path]), ("--only", args.only)):
        for value in filter(None, values):
            options += [flag, value]
    options += ["--quick"] if args.quick else []
    runs = [bench(options) for _ in range(args.runs)]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name}.json").write_text(json.dumps(runs, indent=1) + "\n")
    text = markdown(runs, args.runs)
    (args.out / "table.md").write_text(text)
    print(text)


def bench(options: list[str]) -> dict[str, Any]:
    """One run of `kvcore bench --json`."""
    command = [sys.executable, "-c", _BENCH, *options]
    print("kvcore bench --json", shlex.join(options), file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def markdown(runs: list[dict[str, Any]], count: int) -> str:
    """The table, with what it was measured on."""
    machine = runs[0]["machine"]
    peer = machine.get("peer") or "peer"
    facts = ", ".join(
        f"{key} {machine[key]}"
        for key in ("cpu", "cores", "memory_gib", "kernel", "file_system", "python", "torch", "fio")
        if machine.get(key) is not None
    )
    rows = [merge([run["rows"][i] for run in runs]) for i in range(len(runs[0]["rows"]))]
    lines = [
        f"Measured on: {facts}; kvcore {machine['kvcore']}"
        + (f", {peer}" if machine.get("peer") else "")
        + f"; {count} run{'s' if count > 1 else ''} of `python benchmarks/run.py`.",
        "",
        f"| row | kvcore | limit | kvcore / limit | {peer} | better by | budget | |",
        "|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for row in rows:
        budget = BUDGETS.get(row.name)
        met = budget.met(row) if budget else None
        cells = [
            f"`{row.name}`",
            f"{number(row.value)} {row.unit}",
            number(row.limit),
            number(row.ratio_to_limit),
            number(row.peer),
            better_by(row),
            str(budget or ""),
            "" if met is None else "met" if met else "**missed**",
        ]
        lines.append("| " + " | ".join("" if c == "-" else c for c in cells) + " |")
    notes = dict.fromkeys(f"`{row.name.rpartition('.')[0]}`: {row.note}" for row in rows if row.note)
    return "\n".join([*lines, "", *(f"{note}.\n" for note in notes)]).rstrip() + "\n"


def better_by(row: Row) -> str:
    """How many times as fast, small or fine ours is as the peer's."""
    if not row.ratio_to_peer:
        return ""
    return f"{number(1 / row.ratio_to_peer if row.unit in SMALLER_IS_BETTER else row.ratio_to_peer)} x"


def merge(rows: list[dict[str, Any]]) -> Row:
    """One row of several runs' rows of that name."""
    best = min if rows[0]["unit"] in SMALLER_IS_BETTER else max

    def over(field: str, pick: Any) -> float | None:
        values = [row[field] for row in rows if row[field] is not None]
        return pick(values) if values else None

    return Row(
        rows[0]["name"],
        over("value", best),
        rows[0]["unit"],
        over("limit", best),
        over("ratio_to_limit", statistics.median),
        over("peer", best),
        over("ratio_to_peer", statistics.median),
        rows[0].get("note", ""),
    )


if __name__ == "__main__":
    main()
