"""What the pictures are drawn with: boxes, arrows and words, as SVG. A word that does not fit its box is an error."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple, Self

from kvcore_bench.picture import opening

_STYLE = """
  .box { fill-opacity: .14; stroke-width: 1.3; }
  .plain { fill: currentColor; fill-opacity: .04; stroke: currentColor; stroke-opacity: .45; }
  .engine { fill: #3b82d6; stroke: #3b82d6; }
  .core { fill: #8b5cd6; stroke: #8b5cd6; }
  .store { fill: #2e9e5b; stroke: #2e9e5b; }
  .bytes { fill: #d9822b; stroke: #d9822b; }
  .gone { fill: #c8404f; stroke: #c8404f; }
  .frame { fill: none; stroke: currentColor; stroke-opacity: .4; stroke-dasharray: 5 4; }
  .line { fill: none; stroke: currentColor; stroke-width: 1.4; }
  .line.bytes { fill: none; stroke: #d9822b; stroke-width: 3; }
  .tip { fill: currentColor; }
  .tip.bytes { fill: #d9822b; stroke: none; }
  .bold { font-weight: 600; }
  .small { font-size: 11.5px; }
  .mono { font: 12px ui-monospace, 'DejaVu Sans Mono', monospace; }
"""
_WIDE = {"mono": 7.4, "small": 6.4, "bold": 7.6}
"""Pixels of an average letter, generously: fonts differ between machines."""
LINE = 17


class Box(NamedTuple):
    """A rectangle, by its left upper corner."""

    x: float
    y: float
    width: float
    height: float

    def at(self, where: str, share: float = 0.5) -> tuple[float, float]:
        """A point of an edge, `top`, `bottom`, `left` or `right`; `share` of the way along it."""
        across, down = self.x + self.width * share, self.y + self.height * share
        return {
            "top": (across, self.y),
            "bottom": (across, self.y + self.height),
            "left": (self.x, down),
            "right": (self.x + self.width, down),
        }[where]


class Drawing:
    """A picture of a size in pixels. Its title is what who cannot see it is told."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._parts = [*opening(width, height, _STYLE), f"<title>{escape(title)}</title>"]

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start", room: float = 0) -> Self:
        """One line whose baseline is `y`. `room`: the pixels that it may take, 0 for those to the picture's edge."""
        wide = max((_WIDE[s] for s in style.split() if s in _WIDE), default=7.0) * len(words)
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[anchor]
        if (room and wide > room) or left < 0 or left + wide > self._size[0]:
            raise ValueError(f"{words!r} does not fit: it takes {wide:.0f} pixels")
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}"{at}>{escape(words)}</text>')
        return self

    def box(self, box: Box, words: Sequence[str] = (), kind: str = "plain", top: bool = False) -> Box:
        """A box and its lines, the first in bold; in its middle, or at its top."""
        place = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
        self._parts.append(f'<rect class="box {kind}" {place} rx="5"/>')
        if len(words) * LINE > box.height:
            raise ValueError(f"{words!r} do not fit: they take {len(words) * LINE} pixels of {box.height}")
        y = box.y + 18 if top else box.y + box.height / 2 - len(words) * LINE / 2 + 13
        for i, line in enumerate(words):
            self.text(box.x + box.width / 2, y + i * LINE, line, "small" if i else "bold", "middle", box.width - 6)
        return box

    def arrow(
        self, *points: tuple[float, float], words: str = "", kind: str = "", both: bool = False, shift: float = -6
    ) -> Self:
        """A line through points with a tip at its end, or at both; words stand `shift` pixels below its middle."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="line {kind}" d="{path}"/>')
        self._tip(points[-2], points[-1], kind)
        if both:
            self._tip(points[1], points[0], kind)
        if words:
            (x, y), (u, v) = points[len(points) // 2 - 1 : len(points) // 2 + 1]
            self.text((x + u) / 2, (y + v) / 2 + shift, words, "small", "middle")
        return self

    def line(self, *points: tuple[float, float], style: str = "line") -> Self:
        """A line without a tip."""
        self._parts.append(f'<path class="{style}" d="M{"L".join(f"{x:g} {y:g}" for x, y in points)}"/>')
        return self

    def _tip(self, begin: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        (x, y), (u, v) = begin, end
        length = ((u - x) ** 2 + (v - y) ** 2) ** 0.5
        dx, dy = (u - x) / length, (v - y) / length
        size = 10 if kind == "bytes" else 7
        left = (u - size * dx - size / 2 * dy, v - size * dy + size / 2 * dx)
        right = (u - size * dx + size / 2 * dy, v - size * dy - size / 2 * dx)
        tip = " ".join(f"{a:.1f},{b:.1f}" for a, b in ((u, v), left, right))
        self._parts.append(f'<polygon class="tip {kind}" points="{tip}"/>')

    def svg(self) -> str:
        """The document."""
        return "\n".join([*self._parts, "</svg>", ""])
