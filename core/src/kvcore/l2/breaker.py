"""A circuit breaker: a tier that keeps failing is left alone for a while, then tried with one call."""

import time
from collections.abc import Callable

FAILURES = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Breaker:
    """Opens after `FAILURES` failed calls in a row; each failed try doubles the pause. Used from one event loop.

    Args:
        on_change: called with True when the tier is used again, with False when it no longer is.
    """

    def __init__(self, on_change: Callable[[bool], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_change = on_change
        self._clock = clock
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._retry_at: float | None = None  # None: closed
        self._probing = False

    @property
    def closed(self) -> bool:
        """The tier is in use."""
        return self._retry_at is None

    @property
    def resting(self) -> bool:
        """The tier is left alone: `allow` would say no."""
        return self._retry_at is not None and self._clock() < self._retry_at

    def allow(self) -> bool:
        """May a call be made now? While open, one call per pause is."""
        if self._retry_at is None:
            return True
        now = self._clock()
        if now < self._retry_at:
            return False
        self._retry_at = now + self._pause_s  # this caller is the probe; others wait for its outcome
        self._probing = True
        return True

    def success(self) -> None:
        """A call was answered, be it with a miss."""
        self._failures = 0
        if self._retry_at is not None:
            self._retry_at, self._pause_s, self._probing = None, FIRST_PAUSE_S, False
            self._on_change(True)

    def failure(self) -> None:
        """A call failed or overran its deadline."""
        self._failures += 1
        if self._retry_at is not None:
            if self._probing:  # others were under way when it opened, and say nothing new
                self._probing = False
                self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
                self._retry_at = self._clock() + self._pause_s
        elif self._failures >= FAILURES:
            self._retry_at = self._clock() + self._pause_s
            self._on_change(False)
