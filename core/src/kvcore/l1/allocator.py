"""Slots of one arena: constant time for a size seen before, best fit otherwise, coalescing only when nothing fits."""

from bisect import bisect_left, insort

ALIGN = 4096


def round_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages, the size a slot really takes."""
    return -(-nbytes // ALIGN) * ALIGN


class Allocator:
    """Hands out page-aligned ranges of `[0, size)`. Not thread-safe: the L1 table's lock covers it.

    A freed slot goes to a stack of its size, where the next request of that size finds it. Other requests are cut from
    the smallest extent that fits. Only when neither helps are all free ranges sorted and merged, so that a request
    fails only if no fitting hole exists. Sizes are rounded up to `ALIGN`.
    """

    def __init__(self, size: int) -> None:
        self.size = size // ALIGN * ALIGN
        self.free_bytes = self.size
        self._stacks: dict[int, list[int]] = {}
        self._extents: list[tuple[int, int]] = [(self.size, 0)] if self.size else []  # (length, start), sorted
        self._unmerged = False

    def alloc(self, nbytes: int, count: int = 1) -> list[int]:
        """Offsets of up to `count` slots of `nbytes`; fewer (or none) when no hole is left for more."""
        nbytes = round_up(nbytes)
        if nbytes <= 0:
            raise ValueError(f"a slot needs at least one byte, not {nbytes}")
        if count <= 0:
            return []
        stack = self._stacks.get(nbytes)
        if stack:
            if len(stack) >= count:
                got = stack[-count:]
                del stack[-count:]
                self.free_bytes -= nbytes * count
                return got
            got = stack[:]
            stack.clear()
        else:
            got = []
        self._carve(nbytes, count - len(got), got)
        if len(got) < count and self._unmerged:
            self._merge()
            self._carve(nbytes, count - len(got), got)
        self.free_bytes -= nbytes * len(got)
        return got

    def free(self, nbytes: int, offsets: list[int]) -> None:
        """Give back slots that `alloc` handed out for the same `nbytes`."""
        nbytes = round_up(nbytes)
        stack = self._stacks.get(nbytes)
        if stack is None:
            stack = self._stacks[nbytes] = []
        stack += offsets
        self.free_bytes += nbytes * len(offsets)
        self._unmerged = True

    def _carve(self, nbytes: int, count: int, got: list[int]) -> None:
        extents = self._extents
        while count > 0:
            i = bisect_left(extents, (nbytes, -1))
            if i == len(extents):
                return
            length, start = extents.pop(i)
            n = min(count, length // nbytes)
            got.extend(range(start, start + n * nbytes, nbytes))
            count -= n
            if length > n * nbytes:
                insort(extents, (length - n * nbytes, start + n * nbytes))

    def _merge(self) -> None:
        if not self._unmerged:
            return
        ranges = [(start, length) for length, start in self._extents]
        for nbytes, stack in self._stacks.items():
            ranges += [(start, nbytes) for start in stack]
        self._stacks.clear()
        ranges.sort()
        merged: list[tuple[int, int]] = []
        at, end = -1, -1
        for start, length in ranges:
            if start == end:
                end += length
            else:
                if at >= 0:
                    merged.append((end - at, at))
                at, end = start, start + length
        if at >= 0:
            merged.append((end - at, at))
        merged.sort()
        self._extents = merged
        self._unmerged = False
