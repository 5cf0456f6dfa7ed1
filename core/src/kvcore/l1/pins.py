"""Pins: resident objects that somebody wants to keep for a time, within a bounded part of L1."""

from collections.abc import Iterable, Iterator, Sequence

from kvcore.l1.pools import Pool
from kvcore.l1.spaces import L1Object, ObjectSpace
from kvcore.tenants import Shares

PART = 2
"""The pins of a tenant hold at most one part in so many of its share; where L1 is not divided, of L1."""


class Pins:
    """Pinned objects with the times at which their pins end. A pin counts as a reader. Under the table's lock.

    Args:
        size: bytes of L1.
        shares: how it is divided; None: it is not.
    """

    def __init__(self, size: int, shares: Shares[Pool] | None) -> None:
        self._size = size
        self._shares = shares
        self._ends: dict[ObjectSpace, dict[L1Object, float]] = {}

    def add(self, space: ObjectSpace, hashes: Sequence[bytes], end: float) -> int:
        """See `L1.pin`. A pin that is there ends at `end` instead."""
        pool, nbytes, shares = space.pool, space.slot_bytes, self._shares
        size = self._size if shares is None else shares.share(pool)
        room = (size // PART - pool.kept_bytes) // nbytes
        may_pin = room if shares is None else shares.may_pin(pool) // nbytes
        ends = self._ends.setdefault(space, {})
        count = 0
        for obj in map(space.objects.get, hashes):
            if obj is None:
                break
            if obj not in ends:
                if room <= 0 or (not obj.readers and may_pin <= 0):
                    break
                room -= 1
                if shares is not None and not obj.readers:
                    may_pin -= 1
                    shares.pin(pool, nbytes)
                pool.kept_bytes += nbytes
                obj.readers += 1
            ends[obj] = end
            count += 1
        if not ends:
            del self._ends[space]
        return count

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __iter__(self) -> Iterator[L1Object]:
        return (obj for ends in self._ends.values() for obj in ends)

    def count(self, space: ObjectSpace) -> int:
        """Pinned objects of `space`."""
        return len(self._ends.get(space, ()))

    def remove(self, space: ObjectSpace, objects: Iterable[L1Object]) -> list[L1Object]:
        """End the pins of those of `objects` that have one. The caller takes a reader from each that is returned."""
        ends = self._ends.get(space)
        if ends is None:
            return []
        ended = [o for o in objects if ends.pop(o, None) is not None]
        space.pool.kept_bytes -= space.slot_bytes * len(ended)
        if not ends:
            del self._ends[space]
        return ended

    def due(self, now: float) -> list[tuple[ObjectSpace, list[L1Object]]]:
        """End the pins whose time is over, by space. The caller takes a reader from each."""
        over = [(space, [o for o, end in ends.items() if end <= now]) for space, ends in self._ends.items()]
        return [(space, self.remove(space, objects)) for space, objects in over if objects]
