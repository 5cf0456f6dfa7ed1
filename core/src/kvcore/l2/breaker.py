"""A circuit breaker: a tier that keeps failing, or is too slow to be of use, is left alone, then tried with a probe."""

import time
from collections.abc import Callable

FAILURES = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Breaker:
    """Opens after `FAILURES` failed or slow calls; a good one forgives the bad ones of its own operation only. While it
    is open only probes go through, one per pause; each that fails doubles the pause, and so does opening again soon
    after a probe. Used from one event loop.

    Args:
        on_change: called with True when the tier is used again, with False when it no longer is, and the last cause.
    """

    def __init__(self, on_change: Callable[[bool, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_change = on_change
        self._clock = clock
        self._failures: dict[str, int] = {}
        self._pause_s = FIRST_PAUSE_S
        self._retry_at: float | None = None  # None: closed
        self._closed_at = -LONGEST_PAUSE_S
        self._probing = False
        self.cause = ""
        """Why it was opened last, or why the last probe failed."""
        self.opened_at = 0.0
        """When it was opened last, on the clock."""

    @property
    def closed(self) -> bool:
        """The tier is in use."""
        return self._retry_at is None

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe is due; 0 while closed."""
        return 0.0 if self._retry_at is None else max(0.0, self._retry_at - self._clock())

    def allow_probe(self) -> bool:
        """Is a probe due? Says yes once per pause."""
        if self._retry_at is None or self.pause_s > 0:
            return False
        self._retry_at = self._clock() + self._pause_s
        self._probing = True
        return True

    def probed(self, ok: bool, cause: str = "") -> None:
        """The probe's outcome."""
        if self._retry_at is None or not self._probing:
            return
        self._probing = False
        if ok:
            self._retry_at, self._closed_at = None, self._clock()
            self._failures.clear()
            self._on_change(True, cause)
        else:
            self.cause = cause or self.cause
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
            self._retry_at = self._clock() + self._pause_s

    def success(self, op: str) -> None:
        """A call was answered in time, be it with a miss. It says nothing about the other operations."""
        self._failures.pop(op, None)

    def failure(self, op: str, cause: str) -> None:
        """A call failed, overran its deadline or was too slow."""
        self._failures[op] = self._failures.get(op, 0) + 1
        if sum(self._failures.values()) >= FAILURES:
            self.open(cause)

    def open(self, cause: str) -> None:
        """Leave the tier alone from now on."""
        if self._retry_at is None:
            if self._clock() - self._closed_at >= LONGEST_PAUSE_S:
                self._pause_s = FIRST_PAUSE_S
            else:  # the probe works and the work does not: do not flap once a second
                self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
            self.opened_at, self.cause = self._clock(), cause
            self._retry_at = self.opened_at + self._pause_s
            self._on_change(False, cause)
