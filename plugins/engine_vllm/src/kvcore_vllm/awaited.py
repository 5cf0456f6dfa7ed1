"""How long a request waits for KV that another engine has promised."""

import time

FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.05


class Awaited:
    """A consumer's patience with one promise: lookups with growing pauses, until all is there or nothing comes.

    Args:
        space: the namespace in which it was given, as hex.
        chunks: how many were promised.
        timeout_s: how long to wait without any progress.
    """

    def __init__(self, space: str, chunks: int, timeout_s: float) -> None:
        self.space = space
        self.chunks = chunks
        self.began = time.monotonic()
        self._timeout_s = timeout_s
        self._until = self.began + timeout_s
        self._best = 0
        self._pause = FIRST_PAUSE_S
        self._next = self.began

    def again(self, found: int) -> bool:
        """A lookup has found this many chunks: is another one worth it, after a pause?"""
        now = time.monotonic()
        if found > self._best:
            self._best = found
            self._pause = FIRST_PAUSE_S
            self._until = now + self._timeout_s
        if found >= self.chunks or now >= self._until:
            return False
        self._next = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        return True

    @property
    def due_s(self) -> float:
        """Seconds until the next lookup; at most 0 when it is time."""
        return self._next - time.monotonic()
