"""Loads for requests that wait for their turn, for as long as that is of use."""

import logging
from collections.abc import Callable

from kvcore.api import Brought

ENOUGH = 256
"""So many objects are brought and judged at a time."""
PAUSE_S = 60.0
"""How long it is let be when too few of them were used; twice as long each time after that."""
MOST_S = 3600.0


class Queued:
    """Whether to load for queued requests.

    Args:
        min_used: the share of what is brought that must be used.
        brought: what has become of it.
    """

    def __init__(self, min_used: float, brought: Callable[[], Brought], log: logging.Logger) -> None:
        self._min_used = min_used
        self._brought = brought
        self._log = log
        self._before = brought()
        self._until = 0.0
        self._pause_s = PAUSE_S

    def helps(self, now: float) -> bool:
        """Load for the next one?"""
        if now < self._until:
            return False
        used, wasted = (getattr(self._brought(), x) - getattr(self._before, x) for x in ("used", "wasted"))
        if used + wasted >= ENOUGH:
            self._before = self._brought()
            if used < self._min_used * (used + wasted):
                self._until = now + self._pause_s
                self._pause_s = min(MOST_S, 2 * self._pause_s)
                text = "prefetch: %d of %d objects brought for queued requests were used: none are for %.0f s"
                self._log.info(text, used, used + wasted, self._until - now)
                return False
            self._pause_s = PAUSE_S
        return True
