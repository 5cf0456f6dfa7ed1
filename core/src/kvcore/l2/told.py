"""What a tier deletes to make room is told after it was told that it was stored, although storages work in threads."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from kvcore.api import Entry, ObjectKey


class Told:
    """The order in which observers are told of one tier, as `Residents` keeps that of L1. Thread-safe.

    Args:
        tell: told why something was deleted, and what, from any thread.
        listens: is there anybody to tell?
    """

    def __init__(
        self,
        tell: Callable[[str, Sequence[Entry]], None] = lambda reason, gone: None,
        listens: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tell = tell
        self._listens = listens
        self._lock = threading.Lock()
        self._storing: Counter[ObjectKey] = Counter()
        self._early: dict[ObjectKey, tuple[str, Entry]] = {}

    def evicted(self, reason: str, gone: Sequence[Entry]) -> None:
        """These were deleted: `room` was needed, or they had `expired`. What is just being stored is told when that is
        over."""
        if not self._listens():
            return
        with self._lock:
            now = [entry for entry in gone if entry.key not in self._storing]
            self._early.update((entry.key, (reason, entry)) for entry in gone if entry.key in self._storing)
        if now:
            self._tell(reason, now)

    def storing(self, keys: Sequence[ObjectKey]) -> AbstractContextManager[None]:
        """Store objects and tell of it inside."""
        return self._stored(keys) if self._listens() else nullcontext()

    @contextmanager
    def _stored(self, keys: Sequence[ObjectKey]) -> Iterator[None]:
        with self._lock:
            self._storing.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._storing -= Counter(keys)  # drops what comes to 0
                early = [self._early.pop(k) for k in keys if k in self._early and k not in self._storing]
            for reason in dict.fromkeys(why for why, _ in early):
                self._tell(reason, [entry for why, entry in early if why == reason])
