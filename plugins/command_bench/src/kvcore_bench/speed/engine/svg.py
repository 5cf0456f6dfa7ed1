"""How TTFT and ITL are spread, as SVG: the share of requests, and of gaps, that took no longer. It follows the viewer's
light or dark setting."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from kvcore_bench.picture import opening
from kvcore_bench.speed.engine.measuring import Outcome
from kvcore_bench.speed.engine.summary import Result

WIDTH, HEIGHT = 900, 420
TOP, BOTTOM = 74, 54
PANELS = ((56, 400), (476, 820))
"""Left and right edge of each."""
_COLOURS = ("#6b7280", "#0b84c4", "#d9730d", "#b3479b", "#2e9e6b", "#c0392b", "#7d6bd0", "#8a7a1f")
_STYLE = "  .first { stroke-dasharray: 5 4; stroke-opacity: .6; }\n"
_MOST_POINTS = 200

Curve = tuple[str, str, Sequence[float]]
"""Its colour, its class, and its values."""


def svg(outcome: Outcome) -> str:
    """The document."""
    ttft, itl = _curves(outcome.results)
    workload = ", ".join(f"{k} {v}" for k, v in outcome.workload.described().items() if k != "name")
    parts = [
        *opening(WIDTH, HEIGHT, _STYLE),
        f'<text x="{PANELS[0][0]}" y="22" font-size="15" font-weight="600">{escape(outcome.workload.name)}</text>',
        f'<text x="{PANELS[0][0]}" y="40" class="faint">{escape(workload)}</text>',
        *_panel(PANELS[0], "time to the first token (dashed: asked for the first time)", ttft),
        *_panel(PANELS[1], "time between tokens", itl),
        *_legend([result.name for result in outcome.results]),
    ]
    return "\n".join([*parts, "</svg>\n"])


def _curves(results: Sequence[Result]) -> tuple[list[Curve], list[Curve]]:
    ttft: list[Curve] = []
    itl: list[Curve] = []
    for i, result in enumerate(results):
        colour = _COLOURS[i % len(_COLOURS)]
        good = [d for r in result.rounds for d in r.done if not d.answer.error]
        for phase, kind in (("first", "curve first"), ("again", "curve")):
            times = [d.answer.first_s for d in good if d.ask.phase == phase and d.answer.first_s is not None]
            ttft.append((colour, kind, sorted(times)))
        itl.append((colour, "curve", sorted(gap for d in good for gap in d.answer.gaps_s)))
    return [c for c in ttft if c[2]], [c for c in itl if c[2]]


def _panel(edges: tuple[int, int], title: str, curves: Sequence[Curve]) -> list[str]:
    left, right = edges
    bottom = HEIGHT - BOTTOM
    parts = [_text(left, TOP - 12, title, "start", "faint")]
    for step in range(5):
        y = bottom - step / 4 * (bottom - TOP)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
        parts.append(_text(left - 8, y + 4, f"{step / 4:.0%}", "end"))
    if not curves:
        return parts
    ticks = _ticks(max(min(c[2][0] for c in curves), 1e-5), max(1e-5, *(c[2][-1] for c in curves)))
    least, most = math.log(ticks[0]), math.log(ticks[-1])

    def at(value: float) -> float:
        place = (math.log(max(value, ticks[0])) - least) / (most - least)
        return left + min(place, 1.0) * (right - left)

    free = left - 60.0
    for tick in ticks:
        x = at(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        if x - free >= 48:
            parts.append(_text(x, bottom + 20, f"{tick:g} s" if tick >= 1 else f"{tick * 1000:g} ms", "middle"))
            free = x
    for colour, kind, values in curves:
        shares = [((i + 1) / len(values), value) for i, value in enumerate(values)]
        shown = [(0.0, values[0]), *shares[:: max(1, len(shares) // _MOST_POINTS)], shares[-1]]
        line = " ".join(f"{at(v):.1f},{bottom - s * (bottom - TOP):.1f}" for s, v in shown)
        parts.append(f'<polyline class="{kind}" stroke="{colour}" points="{line}"/>')
    return parts


def _ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 times powers of ten, the first not above `least` and the last not below `most`."""
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    start = max(i for i, tick in enumerate(ticks) if tick <= least)
    end = next(i for i, tick in enumerate(ticks) if tick >= most)
    return ticks[start : max(end, start + 1) + 1]


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    x = float(PANELS[0][0])
    for i, name in enumerate(names):
        shown = name if len(name) <= 24 else f"{name[:23]}…"
        parts.append(f'<path d="M{x:.1f} {HEIGHT - 14}h22" stroke="{_COLOURS[i % len(_COLOURS)]}" stroke-width="2"/>')
        parts.append(_text(x + 28, HEIGHT - 10, shown, "start"))
        x += 52 + 8 * len(shown)
    return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
