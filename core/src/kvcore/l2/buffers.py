"""Page-aligned buffers outside the arena: frame headers, and encoded payloads on their way."""

import mmap
import threading

from kvcore.l2.frame import HEADER_BYTES


def headers(count: int) -> list[memoryview]:
    """`count` header pages, page-aligned. They are freed with the last view."""
    pages = memoryview(mmap.mmap(-1, max(1, count) * HEADER_BYTES))
    return [pages[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(count)]


class StagingPool:
    """Reuses staging buffers: a fresh one costs ten times more, in page faults.

    A buffer that a hung call still holds is simply not given back.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> mmap.mmap:
        """A buffer of at least `nbytes`."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                if len(buffer) >= nbytes:
                    return self._free.pop(i)
        return mmap.mmap(-1, -(-nbytes // (1 << 20)) * (1 << 20))

    def give(self, buffer: mmap.mmap) -> None:
        """Return a buffer whose every view has been let go."""
        with self._lock:
            if len(self._free) < self._keep:
                self._free.append(buffer)
