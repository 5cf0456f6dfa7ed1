"""A plot as SVG: hit rate against capacity. It follows the viewer's light or dark setting."""

from xml.sax.saxutils import escape

from kvcore_bench.picture import opening
from kvcore_bench.simulate.plot import nice_top, positions
from kvcore_bench.simulate.simulation import OPTIMUM, Simulation

WIDTH, HEIGHT = 760, 440
LEFT, TOP, RIGHT, BOTTOM = 56, 52, 150, 56
_COLOURS = ("#0b84c4", "#d9730d", "#b3479b", "#2e9e6b", "#c0392b", "#7d6bd0", "#8a7a1f", "#3aa6a6")
_STYLE = "  .optimum { stroke: currentColor; stroke-dasharray: 6 4; }\n"


def svg(result: Simulation) -> str:
    """The document. Points of a policy that failed are left out."""
    curves, capacities = result.hit_rates, result.capacities
    top = nice_top(max((r or 0) for rates in curves.values() for r in rates))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    xs = [LEFT + x / 1000 * (right - LEFT) for x in positions(capacities, 1000)]
    ends: list[tuple[float, str, str]] = []
    parts = [
        *opening(WIDTH, HEIGHT, _STYLE),
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">Hit rate against capacity</text>',
        f'<text x="{LEFT}" y="42" class="faint">{escape(result.trace.name)}: {len(result.trace.ends):,} requests, '
        f"{result.trace.input_tokens:,} tokens</text>",
    ]
    for step in range(4):
        y = bottom - step / 3 * (bottom - TOP)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{top * step / 3:.0%}", "end"))
    free = LEFT - 40.0
    for x, capacity in zip(xs, capacities, strict=True):
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        if x - free >= 60 or capacity is capacities[-1]:
            parts.append(_text(x, bottom + 20, capacity.label, "middle"))
            free = x
    unit = "tokens" if capacities[0].nbytes is None else "bytes"
    parts.append(_text((LEFT + right) / 2, bottom + 42, f"capacity in {unit}", "middle", "faint"))
    for i, (name, rates) in enumerate(curves.items()):
        points = [(x, bottom - r / top * (bottom - TOP)) for x, r in zip(xs, rates, strict=True) if r is not None]
        if not points:
            continue
        colour = "currentColor" if name == OPTIMUM else _COLOURS[i % len(_COLOURS)]
        kind = "curve optimum" if name == OPTIMUM else "curve"
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="{kind}" stroke="{colour}" points="{line}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        ends.append((sum(y for _, y in points) / len(points), colour, name))
    parts += _legend(sorted(ends), right + 16)
    return "\n".join([*parts, "</svg>\n"])


def _legend(ends: list[tuple[float, str, str]], x: float) -> list[str]:
    """Names in the order of the curves, the best first."""
    parts = []
    for i, (_, colour, name) in enumerate(ends):
        y = TOP + 8 + 22 * i
        dashed = ' stroke-dasharray="6 4"' if name == OPTIMUM else ""
        parts.append(f'<path d="M{x} {y}h22" stroke="{colour}" stroke-width="2"{dashed}/>')
        parts.append(_text(x + 30, y + 4, name if len(name) <= 16 else f"{name[:15]}…", "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
