"""Progress of long work, as one line on stderr. It has no thread, so that what is measured is not disturbed."""

import shutil
import sys
import time
from typing import Self

from kvcore.api.units import format_size
from kvcore.cli.kit.output import error

REDRAW_S = 0.1


class Progress:
    """Counts what is done; shows it when stderr is a terminal. A context manager: the line is gone afterwards.

    Args:
        what: what is being done, such as `verifying disk`.
        total: how many things there are, where that is known.
        unit: what is counted.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "objects") -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._shown = sys.stderr.isatty()
        self._done = 0
        self._nbytes = 0
        self._begun = time.monotonic()
        self._drawn_at = 0.0

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def add(self, count: int, nbytes: int = 0) -> None:
        """So many more are done."""
        self._done += count
        self._nbytes += nbytes
        if self._shown and time.monotonic() - self._drawn_at >= REDRAW_S:
            self._draw()

    def now(self, what: str) -> None:
        """What is being done from here on."""
        self._what = what
        self._draw()

    def say(self, text: str) -> None:
        """A line of the result, on stdout."""
        self._clear()
        print(text, flush=self._shown)

    def warn(self, text: str) -> None:
        """An error, on stderr."""
        self._clear()
        error(text)

    def _clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _draw(self) -> None:
        if not self._shown:
            return
        self._drawn_at = time.monotonic()
        text = f"{self._what} "
        if self._total:
            filled = min(20, 20 * self._done // self._total)
            text += f"[{'#' * filled}{'.' * (20 - filled)}] {self._done:,}/{self._total:,} {self._unit}"
        else:
            text += f"{self._done:,} {self._unit}"
        if self._nbytes:
            seconds = max(1e-3, self._drawn_at - self._begun)
            text += f", {format_size(self._nbytes)}, {format_size(self._nbytes / seconds)}/s"
        sys.stderr.write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        sys.stderr.flush()
