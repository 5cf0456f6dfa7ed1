"""Which bytes of an object I/O can move from and to the caller's memory, and copies for the others."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

PAGE = 4096
"""What O_DIRECT wants of offsets, lengths and addresses, on every device of today."""


class Span(NamedTuple):
    """Bytes `start` to `end` of an object. `address`: where they lie in the caller's memory; None: they need a copy,
    since their place there is not registered, not aligned, or is no whole page."""

    start: int
    end: int
    address: int | None


class Buffers:
    """The caller's memory for one object: the concatenation of its views."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._arrays = [np.frombuffer(view, np.uint8) for view in views if len(view)]
        self.places = [(int(a.__array_interface__["data"][0]), a.nbytes) for a in self._arrays]
        """Address and length of each piece that is not empty."""

    def copy_to(self, target: Any, start: int) -> None:
        """Fill the array `target` with the bytes from `start` on."""
        for mine, theirs in self._overlaps(start, len(target)):
            target[theirs] = mine

    def copy_from(self, source: Any, start: int) -> None:
        """Put the array `source` to the bytes from `start` on."""
        for mine, theirs in self._overlaps(start, len(source)):
            mine[:] = source[theirs]

    def _overlaps(self, start: int, nbytes: int) -> list[tuple[Any, slice]]:
        """Pieces of this memory that hold `nbytes` from `start` on, each with its place among those bytes."""
        found, at = [], 0
        for array in self._arrays:
            first, last = max(start, at), min(start + nbytes, at + array.nbytes)
            if first < last:
                found.append((array[first - at : last - at], slice(first - start, last - start)))
            at += array.nbytes
        return found


def spans(places: Sequence[tuple[int, int]], nbytes: int, page: int, usable: Callable[[int, int], bool]) -> list[Span]:
    """Cut an object of `nbytes` that lies in `places` (address, length) into spans without a gap.

    Each begins and ends at a multiple of `page`, the last one possibly behind the object's end.

    Args:
        page: the alignment that I/O wants; 1: none.
        usable: may I/O go to this address, for that many bytes?
    """
    found: list[Span] = []
    done = at = 0
    for address, length in places:
        start, at = at, at + length
        first, last = -(-start // page) * page, min(at, nbytes) // page * page
        here = address + first - start
        if first < last and here % page == 0 and usable(here, last - first):
            if done < first:
                found.append(Span(done, first, None))
            found.append(Span(first, last, here))
            done = last
    end = -(-nbytes // page) * page
    if done < end:
        found.append(Span(done, end, None))
    return found
