"""A terminal that is drawn over again and again, and given back as it was."""

import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from kvcore.cli.kit.output import paint
from kvcore.cli.top.show import Text

_BEGIN = "\x1b[?1049h\x1b[?25l"  # the other screen, no cursor
_END = "\x1b[?25h\x1b[?1049l"
_LEAVE = ("q", "Q", "\x1b", "\x03", "\x04", "")


class Terminal:
    """Standard output as a screen; a context manager. Keys are read where standard input is a terminal, too."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin is not None and sys.stdin.isatty():
            with suppress(termios.error):  # a job in the background may not
                self._before = termios.tcgetattr(sys.stdin)
                tty.setcbreak(sys.stdin)
        sys.stdout.write(_BEGIN)
        return self

    def __exit__(self, *error: object) -> None:
        sys.stdout.write(_END)
        sys.stdout.flush()
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows of now."""
        found = shutil.get_terminal_size()
        return found.columns, found.lines

    def draw(self, lines: Sequence[Text]) -> None:
        """Show these and nothing else."""
        shown = (paint(line.text, line.colour) if line.colour else line.text for line in lines)
        sys.stdout.write("\x1b[H" + "".join(f"{text}\x1b[K\n" for text in shown).removesuffix("\n") + "\x1b[J")
        sys.stdout.flush()

    def leave(self, time_s: float) -> bool:
        """Wait for so long; was it asked to end meanwhile?"""
        if self._before is None:
            time.sleep(time_s)
            return False
        give_up = time.monotonic() + time_s
        while (left := give_up - time.monotonic()) > 0:
            ready, _, _ = select.select([sys.stdin], [], [], left)
            if ready and sys.stdin.read(1) in _LEAVE:
                return True
        return False
