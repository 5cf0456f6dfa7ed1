"""The logger, and a throttle that keeps a fault from flooding it."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("kvcore")
EVERY_S = 60.0
"""Between two lines of one kind."""


class Throttle:
    """Logs the first of a kind at once, then at most one a minute with the count of those held back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}

    def warning(self, kind: str, text: str, *, exc_info: bool = False) -> None:
        """Log `text` unless one of the same `kind` was logged less than `EVERY_S` ago."""
        now = self._clock()
        with self._lock:
            last, held = self._seen.get(kind, (-1e9, 0))
            if now - last < EVERY_S:
                self._seen[kind] = (last, held + 1)
                return
            self._seen[kind] = (now, 0)
        logger.warning(
            "%s%s", text, f" ({held} more like it since the last such line)" if held else "", exc_info=exc_info
        )
