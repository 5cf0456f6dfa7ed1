"""The demo's report as text, picture and page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = {"vLLM alone": "#8a8f98", "kvcore, cold": "#c98a2b"}
HOT = "#2a7de1"


@dataclass(frozen=True, slots=True)
class Row:
    """One answered question. Times in seconds, `rate` in GB/s."""

    phase: str
    question: int
    ttft_s: float
    speedup: float
    reused: int
    prompt: int
    nbytes: float
    rate: float | None
    identical: bool

    def cells(self) -> tuple[str, ...]:
        return (
            self.phase,
            str(self.question),
            f"{self.ttft_s:.3f} s",
            f"{self.speedup:.1f} x",
            f"{self.reused} of {self.prompt}",
            f"{self.nbytes / 1e6:.0f} MB" if self.nbytes else "-",
            f"{self.rate:.1f} GB/s" if self.rate else "-",
            "same" if self.identical else "DIFFERENT",
        )


HEADER = ("what", "question", "first token", "speed-up", "tokens reused", "KV moved", "rate", "answer")


def table(rows: Sequence[Row]) -> str:
    """Aligned plain text."""
    lines = [HEADER, *(r.cells() for r in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def svg(rows: Sequence[Row]) -> str:
    """Bars of the time to first token."""
    left, width, step = 290, 460, 26
    longest = max(r.ttft_s for r in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 90} {len(rows) * step + 50}" '
        'role="img" aria-label="Time to first token" font-family="system-ui, sans-serif" font-size="13">',
        f'<text x="8" y="20" font-size="15" font-weight="600" fill="currentColor">Time to first token, '
        f"prompt of {rows[0].prompt} tokens</text>",
    ]
    for i, row in enumerate(rows):
        y = 36 + i * step
        bar = max(2.0, width * row.ttft_s / longest)
        parts.append(
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end" fill="currentColor">'
            f"{escape(row.phase)}, question {row.question}</text>"
            f'<rect x="{left}" y="{y}" width="{bar:.1f}" height="18" rx="3" fill="{COLOURS.get(row.phase, HOT)}"/>'
            f'<text x="{left + bar + 6:.1f}" y="{y + 14}" fill="currentColor">{row.ttft_s:.3f} s</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def html(rows: Sequence[Row], notes: Sequence[str], questions: Sequence[str], answers: Sequence[str]) -> str:
    """A page that needs nothing else."""
    head = "".join(f"<th>{escape(c)}</th>" for c in HEADER)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in r.cells()) + "</tr>" for r in rows)
    said = "".join(f"<dt>{escape(q)}</dt><dd>{escape(a)}</dd>" for q, a in zip(questions, answers, strict=True))
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>kvcore demo</title>
<style>
:root {{ color-scheme: light dark; font-family: system-ui, sans-serif; line-height: 1.5; }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884; }}
dt {{ font-weight: 600; margin-top: .6rem; }}
svg {{ width: 100%; height: auto; }}
</style>
<h1>A prompt that is computed once and never again</h1>
{svg(rows)}
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table>
<ul>{"".join(f"<li>{escape(n)}</li>" for n in notes)}</ul>
<h2>The questions and vLLM's own answers</h2>
<dl>{said}</dl>
</html>
"""
