"""What a program of `plugins.run` says, line by line in the server's log, and bounded."""

import logging
import re
import time
from collections.abc import Callable

log = logging.getLogger("kvcore.run")
LINES_PER_S = 100
"""Lines of one program in the log. More are counted and left out."""
MAX_LINE = 2000
"""Bytes of a line. What follows is left out."""
MAX_READ = 64 << 10
READ_EVERY_S = 0.05
"""A program that says more than `MAX_READ` in this time is made to wait: reading must not cost the server its time."""
MAX_PAUSE_S = 60.0
"""How often at least a program that goes on saying too much is told of."""

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


class Output:
    """The lines of one program. `feed` and `close` by one thread."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._line = b""
        self._second = self._told = clock()
        self._said = 0
        self._dropped = 0
        self._held = False  # whether lines were left out in this second
        self._pause_s = 1.0

    def feed(self, data: bytes) -> None:
        """What it has said, cut anywhere."""
        while data:
            if not self._room():
                self._drop(data)
                return
            part, newline, data = data.partition(b"\n")
            self._line += part[: MAX_LINE + 1 - len(self._line)]
            if newline:
                self._say()

    def close(self) -> None:
        """It says no more: log what is left."""
        if self._line and self._room():
            self._say()
        self._tell_dropped()

    def _room(self) -> bool:
        now = self._clock()
        if now - self._second >= 1.0:
            if not self._held:
                self._pause_s = 1.0
            self._second, self._said, self._held = now, 0, False
            if now - self._told >= self._pause_s:
                self._tell_dropped()
        return self._said < LINES_PER_S

    def _drop(self, data: bytes) -> None:
        ends = data.count(b"\n")
        self._dropped += ends
        self._held = True
        if ends:
            self._line = b""
        self._line += data.rpartition(b"\n")[2][: MAX_LINE + 1 - len(self._line)]

    def _say(self) -> None:
        line, self._line = self._line, b""
        text = _UNPRINTABLE.sub("?", line[:MAX_LINE].rstrip().decode(errors="replace"))
        if text:
            self._said += 1
            log.info("[%s] %s%s", self._name, text, " ..." if len(line) > MAX_LINE else "")

    def _tell_dropped(self) -> None:
        """How many were left out since the last time; the next time twice as late, while it goes on."""
        if self._dropped:
            log.info("[%s] %d lines more, which are not shown", self._name, self._dropped)
            self._dropped, self._told = 0, self._clock()
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
