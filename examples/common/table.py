"""A table of answers, as aligned text."""

from collections.abc import Sequence
from typing import NamedTuple

from asking import Answer

HEADER = ("what", "first token", "whole answer", "tokens not computed", "answer")


class Line(NamedTuple):
    """One answer, and what vLLM alone said."""

    what: str
    answer: Answer
    expected: str

    @property
    def same(self) -> bool:
        """Is it the right answer?"""
        return self.answer.text == self.expected

    def cells(self) -> tuple[str, ...]:
        """As text."""
        a = self.answer
        same = "same" if self.same else "DIFFERENT"
        return self.what, f"{a.first_s:.2f} s", f"{a.whole_s:.2f} s", f"{a.cached} of {a.prompt}", same


def table(lines: Sequence[Line]) -> str:
    """The lines below their header."""
    rows = [HEADER, *(line.cells() for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
