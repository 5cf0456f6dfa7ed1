"""The result for people: a table with budgets. Rich draws it on a terminal where it is installed."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from kvcore.cli.kit.output import coloured, paint, table
from kvcore_bench.speed.rows import BUDGETS, Row

HEADERS = ("ROW", "VALUE", "LIMIT", "/LIMIT", "PEER", "/PEER", "BUDGET", "")


def show(machine: dict[str, Any], rows: Sequence[Row]) -> None:
    """Print everything on stdout."""
    print(", ".join(f"{key} {value}" for key, value in machine.items() if value is not None))
    cells = [_cells(row) for row in rows]
    if coloured(sys.stdout) and find_spec("rich"):
        _draw(cells)
    else:
        print()
        table(HEADERS, cells)
    for note in dict.fromkeys(f"{row.name.rpartition('.')[0]}: {row.note}" for row in rows if row.note):
        print(paint(note, "dim"))


def number(value: float | None) -> str:
    """Three significant digits; `-` for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cells(row: Row) -> tuple[str, ...]:
    budget = BUDGETS.get(row.name)
    met = budget.met(row) if budget else None
    verdict = "" if met is None else "ok" if met else "missed"
    value = "-" if row.value is None else f"{number(row.value)} {row.unit}"
    numbers = map(number, (row.limit, row.ratio_to_limit, row.peer, row.ratio_to_peer))
    return (row.name, value, *numbers, str(budget or ""), verdict)


def _draw(cells: Sequence[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, header in enumerate(HEADERS):
        drawn.add_column(header, no_wrap=True, justify="right" if 1 <= i <= 5 else "left")
    for row in cells:
        drawn.add_row(*row[:-1], Text(row[-1], style="green" if row[-1] == "ok" else "yellow"))
    Console().print(drawn)
