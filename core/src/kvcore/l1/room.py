"""Room in the arena: slots for what comes, and who goes for it.

There is no fixed low watermark and nobody who looks once a second: when a call finds too little room, that call evicts,
and beside what it needs itself what its tenant has taken in the last `AHEAD_S` at the rate since room was last made. So
a cache that is filled slowly stays full, and a burst evicts in few, large batches.
"""

from collections.abc import Callable, Collection, Iterable

from kvcore.l1.aging import Aging
from kvcore.l1.allocator import Allocator
from kvcore.l1.arena import Arena
from kvcore.l1.pools import Pool
from kvcore.l1.spaces import L1Object, ObjectSpace
from kvcore.tenants import Shares

AHEAD_S = 0.1
"""Room is made for what is taken in so long."""
MOST_AHEAD = 32
"""At most one part in so many of the arena is freed ahead of need."""


class Room:
    """Slots and accounts. Under the table's lock.

    Args:
        shares: how the arena is divided; None: it is one pool.
        aging: told who leaves; None: nobody grows old.
        immovable: the slots that cannot be freed now, as (offset, bytes), in any order.
        clock: monotonic seconds.
        on_left: see `L1`.
    """

    def __init__(
        self,
        arena: Arena,
        shares: Shares[Pool] | None,
        aging: Aging | None,
        immovable: Callable[[], Iterable[tuple[int, int]]],
        clock: Callable[[], float],
        on_left: Callable[[str, str, Collection[L1Object]], None],
    ) -> None:
        self.watched = False
        """Somebody wants to hear what leaves: see `L1.take_gone`."""
        self.gone: list[tuple[str, Collection[L1Object]]] = []
        self._arena = arena
        self._allocator = Allocator(arena.size)
        self._shares = shares
        self._aging = aging
        self._immovable = immovable
        self._clock = clock
        self._on_left = on_left
        self._most_ahead: int = arena.size // MOST_AHEAD

    @property
    def free_bytes(self) -> int:
        """Bytes that hold nothing."""
        return self._allocator.free_bytes

    def take(self, space: ObjectSpace, count: int, evicted: list[L1Object]) -> list[int]:
        """Up to `count` slots for objects of `space`; what was evicted for them is added to `evicted`."""
        nbytes, pool, allocator = space.slot_bytes, space.pool, self._allocator
        if nbytes > allocator.size:
            return []  # no eviction could make this room
        slots = allocator.alloc(nbytes, count)
        pool.taken_bytes += nbytes * count
        if self._shares is not None:
            self._shares.add(pool, nbytes * len(slots))
            if len(slots) < count:
                self._make_room_among(self._shares, pool, nbytes, count, slots, evicted)
        elif len(slots) < count:
            self._make_room(pool, nbytes, count, slots, evicted)
        return slots

    def drop(self, objects: Collection[L1Object], reason: str) -> None:
        """Objects of one pool leave the table, and their slots are free."""
        if not objects:
            return
        pool = next(iter(objects)).space.pool
        self._tell(pool, objects, reason)
        for space, some in pool.by_space(objects):
            table = space.objects
            for obj in some:
                del table[obj.chunk_hash]
            self.free(space, some)

    def forget(self, space: ObjectSpace, objects: Collection[L1Object], reason: str) -> None:
        """The same for objects of one space, leased or not: nobody finds those that are read, and they go with their
        last readers. Their pool's policy does not know them any more."""
        self.drop([o for o in objects if not o.readers], reason)
        if read := [o for o in objects if o.readers]:
            self._tell(space.pool, read, reason)
            for obj in read:
                obj.temporary = True
                del space.objects[obj.chunk_hash]

    def _tell(self, pool: Pool, objects: Collection[L1Object], reason: str) -> None:
        """They leave: to all who keep account of objects."""
        self._on_left("evicted", reason, objects)
        if self.watched:
            self.gone.append((reason, objects))
        pool.dropped(objects)
        if self._aging is not None:
            self._aging.left(objects)

    def free(self, space: ObjectSpace, objects: Collection[L1Object]) -> None:
        """Free the slots of objects that stand in no table."""
        slots = [o.slot for o in objects]
        self._arena.bump(slots)
        self._allocator.free(space.slot_bytes, slots)
        if self._shares is not None:
            self._shares.add(space.pool, -space.slot_bytes * len(slots))

    def _make_room(self, pool: Pool, nbytes: int, count: int, slots: list[int], evicted: list[L1Object]) -> None:
        ahead = self._ahead(pool)
        while (missing := (count - len(slots)) * nbytes) > 0:
            victims = pool.victims(max(missing, ahead))
            if not victims:
                return
            self.drop(victims, "room")
            evicted += victims
            got = self._allocator.alloc(nbytes, count - len(slots))
            slots += got
            if not got and self._in_vain(nbytes):
                return

    def _make_room_among(
        self, shares: Shares[Pool], pool: Pool, nbytes: int, count: int, slots: list[int], evicted: list[L1Object]
    ) -> None:
        ahead = self._ahead(pool)
        helped = True
        while helped and len(slots) < count:
            helped = False
            for donor, most in shares.donors(pool, nbytes):
                victims = donor.victims(min(max((count - len(slots)) * nbytes, ahead), most))
                if not victims:
                    continue
                helped = True
                self.drop(victims, "room")
                evicted += victims
                got = self._allocator.alloc(nbytes, count - len(slots))
                shares.add(pool, nbytes * len(got))
                slots += got
                if len(slots) == count or (not got and self._in_vain(nbytes)):
                    return

    def _in_vain(self, nbytes: int) -> bool:
        """What is leased lies so that no eviction makes a hole of `nbytes`: then nobody goes for it."""
        if self.free_bytes < nbytes:
            return False  # there may be a hole, it is only not free yet
        end = 0
        for slot, length in sorted(self._immovable()):
            if slot - end >= nbytes:
                return False
            end = slot + length
        return self._allocator.size - end < nbytes

    def _ahead(self, pool: Pool) -> int:
        """Bytes worth freeing beside those that are needed now."""
        now = self._clock()
        passed = now - pool.made_room_s
        taken, pool.taken_bytes, pool.made_room_s = pool.taken_bytes, 0, now
        return min(self._most_ahead, int(taken * AHEAD_S / passed) if passed > 0 else self._most_ahead)
