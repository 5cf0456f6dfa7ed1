"""A plot for the terminal: hit rate against capacity, whose axis is logarithmic."""

import shutil
import sys
from itertools import pairwise
from math import log

from kvcore.cli.kit.output import coloured
from kvcore_bench.simulate.capacity import Capacity
from kvcore_bench.simulate.simulation import OPTIMUM, Curves

HEIGHT = 16
_MARKS = "●■▲◆▼○□△◇▽"
_PLAIN_MARKS = "ox+#%@&$~^"
_COLOURS = (36, 33, 35, 32, 34, 31)


def plot(curves: Curves, capacities: list[Capacity]) -> str:
    """Lines of text. Where curves meet, the first of them is on top."""
    width = min(100, shutil.get_terminal_size().columns) - 8
    plain, colour = not _shows(_MARKS + "·★│└─┬"), coloured(sys.stdout)
    marks, dot, star = (_PLAIN_MARKS, ".", "*") if plain else (_MARKS, "·", "★")
    top = nice_top(max((r or 0) for rates in curves.values() for r in rates))
    columns = positions(capacities, width - 1)
    grid = [[" "] * width for _ in range(HEIGHT)]
    legend = []
    for i, (name, rates) in reversed(list(enumerate(curves.items()))):
        mark = star if name == OPTIMUM else marks[i % len(marks)]
        code = f"\x1b[{'1' if name == OPTIMUM else _COLOURS[i % len(_COLOURS)]}m" if colour else ""
        end = "\x1b[0m" if colour else ""
        points = [
            (x, round((1 - r / top) * (HEIGHT - 1))) for x, r in zip(columns, rates, strict=True) if r is not None
        ]
        for (x0, y0), (x1, y1) in pairwise(points):
            for x in range(x0 + 1, x1):
                grid[round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))][x] = f"{code}{dot}{end}"
        for x, y in points:
            grid[y][x] = f"{code}{mark}{end}"
        legend.append(f"{code}{mark}{end} {name}")
    side, corner, line, tick = "|++-" if plain else "│└─┬"
    lines = [f"{top * (1 - y / (HEIGHT - 1)):6.1%} {side}" if y % 5 == 0 else f"       {side}" for y in range(HEIGHT)]
    lines = [f"{label}{''.join(row)}".rstrip() for label, row in zip(lines, grid, strict=True)]
    lines.append(f"       {corner}{''.join(tick if x in columns else line for x in range(width))}")
    lines.append(f"        {_labels(columns, [c.label for c in capacities], width)}")
    lines.append("")
    lines.append(f"        {'   '.join(reversed(legend))}")
    return "\n".join(lines)


def positions(capacities: list[Capacity], width: int) -> list[int]:
    """Where each capacity stands on a logarithmic axis from 0 to `width`; a single one in the middle."""
    least, most = log(capacities[0].blocks), log(capacities[-1].blocks)
    if least == most:
        return [width // 2 for _ in capacities]
    return [round((log(c.blocks) - least) / (most - least) * width) for c in capacities]


def nice_top(rate: float) -> float:
    """The upper end of an axis that shows `rate`: a multiple of 15 % (three intervals of whole percents), or less."""
    return next((top / 100 for top in (3, 6, 15, 30, 45, 60, 75, 90) if rate * 100 <= top), 1.05)


def _labels(columns: list[int], labels: list[str], width: int) -> str:
    """Each below its tick, from the last on, as far as there is room."""
    line, free = [" "] * width, width
    for x, label in reversed(list(zip(columns, labels, strict=True))):
        start = max(0, min(x - len(label) // 2, width - len(label)))
        if start + len(label) < free or free == width:
            line[start : start + len(label)] = label
            free = start
    return "".join(line).rstrip()


def _shows(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
