"""The base of L1: its state, spaces and tenants, pins, and what ends by itself. Neither reading nor writing."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice

from kvcore.api import EvictionPolicy
from kvcore.l1.aging import Aging
from kvcore.l1.arena import Arena
from kvcore.l1.leases import ReadLease, WriteLease
from kvcore.l1.pins import Pins
from kvcore.l1.pools import Pool, nowhere
from kvcore.l1.room import Room
from kvcore.l1.spaces import L1Object, ObjectSpace
from kvcore.observe import Throttle
from kvcore.tenants import Division, Shares, Usage

_FEW_SPACES = 64


def _nothing(objects: Sequence[L1Object]) -> None:
    pass


class Table:
    """The base of `L1` (objects.py), which says what the arguments are."""

    def __init__(
        self,
        arena: Arena,
        policy: EvictionPolicy,
        *,
        lease_s: float = 60.0,
        on_evict: Callable[[Sequence[L1Object]], None] = _nothing,
        on_left: Callable[[str, str, Collection[L1Object]], None] = lambda what, reason, objects: None,
        clock: Callable[[], float] = time.monotonic,
        division: Division | None = None,
        ttl_s: float | None = None,
    ) -> None:
        self.arena = arena
        self.lease_s = lease_s
        self._on_evict = on_evict
        self._on_left = on_left
        self._clock = clock
        self._lock = threading.Lock()
        self._log = Throttle()

        def pool(tenant: str) -> Pool:
            return Pool(tenant, policy if division is None or not tenant else division.make_policy(), self._log)

        self._pool = pool("")
        self._nowhere = nowhere(self._log)
        self._shares: Shares[Pool] | None = None
        if division is not None:
            self._shares = Shares(arena.size - division.spare, division.quotas, division.default, pool, clock)
        self._aging = None if ttl_s is None else Aging(ttl_s)
        self._room = Room(arena, self._shares, self._aging, self._immovable, clock, on_left)
        self._spaces: dict[tuple[bytes, int], ObjectSpace] = {}
        self._few_spaces = _FEW_SPACES
        self._leases: deque[ReadLease | WriteLease] = deque()
        self._expired: dict[WriteLease, None] = {}
        self._given_up: list[ReadLease] = []
        self._pins = Pins(arena.size, self._shares)
        self.quarantined_bytes = 0
        self._expired_objects = 0
        self._unused = False
        """No lease was begun or held between the last two calls of `reap`."""

    # -- spaces and tenants ------------------------------------------------------------------------------------------

    def space(self, namespace: bytes, group: int, nbytes: int, tenant: str = "") -> ObjectSpace:
        """The space of this namespace and group, made at first use. One size and one tenant per space."""
        with self._lock:
            space = self._spaces.get((namespace, group))
            if space is None:
                pool = self._pool if self._shares is None else self._shares.account(tenant)
                space = self._spaces[namespace, group] = ObjectSpace(namespace, group, nbytes, tenant, pool)
                pool.spaces.append(space)
        if space.nbytes != nbytes:
            raise ValueError(f"objects of this namespace have {space.nbytes} bytes, not {nbytes}")
        return space

    def clear(self, namespace: bytes, most: int | None = None) -> int:
        """Forget all objects in all spaces of `namespace`, pinned or not, but at most so many; how many. Those that are
        leased are found no more, and go with their last readers."""
        count = 0
        with self._lock:
            for (ns, _), space in self._spaces.items():
                if ns != namespace:
                    continue
                if self._pins.count(space):
                    self._unread(space, self._pins.remove(space, list(space.objects.values())))
                gone = list(islice(space.objects.values(), None if most is None else most - count))
                if space.pool.remove(gone):
                    self._room.forget(space, gone, "cleared")
                    count += len(gone)
        return count

    def delete(self, space: ObjectSpace, hashes: Iterable[bytes]) -> int:
        """Delete those of these objects that no one reads; how many went."""
        with self._lock:
            found = (space.objects.get(chunk_hash) for chunk_hash in dict.fromkeys(hashes))
            gone = [obj for obj in found if obj is not None and not obj.readers]
            if not gone or not space.pool.remove(gone):
                return 0
            self._room.drop(gone, "cleared")
            return len(gone)

    def forget(self, held: Callable[[ObjectSpace], bool]) -> list[ObjectSpace]:
        """Forget spaces that hold nothing and are not `held` by anyone who may use them again, and tenants that have
        no other. Returns the spaces.

        Looks only when there are twice as many as were left the last time, or fewer the longer ago that was."""
        with self._lock:
            if len(self._spaces) <= self._few_spaces:
                return []
            busy = {lease.objects[0].space for lease in (*self._leases, *self._expired) if lease.objects}
            gone = [
                s
                for s in self._spaces.values()
                if not s.objects and not s.staging and s not in busy and not self._pins.count(s) and not held(s)
            ]
            leaving = set(gone)
            for pool in {s.pool for s in gone}:
                pool.settle()
                pool.spaces = [s for s in pool.spaces if s not in leaving]
                if self._shares is not None and not pool.spaces and not pool.used:
                    self._shares.forget(pool)
            for s in gone:
                del self._spaces[s.namespace, s.group]
                s.objects, s.staging = {}, {}  # the record's objects lead here: an emptied dict keeps its room,
                s.pool = self._nowhere  # and a pool has a policy; what comes late finds no room
            self._few_spaces = max(_FEW_SPACES, 2 * len(self._spaces))
            return gone

    def tenants(self) -> dict[str, Usage]:
        """Each tenant's part of L1; empty when it is not divided."""
        with self._lock:
            return {} if self._shares is None else self._shares.usage()

    def others(self) -> Usage | None:
        """See `Shares.others`; None when L1 is not divided."""
        with self._lock:
            return None if self._shares is None else self._shares.others()

    @property
    def divided(self) -> bool:
        """Tenants have quotas."""
        return self._shares is not None

    def set_quota(self, tenant: str | None, nbytes: int | None) -> None:
        """See `Shares.set_quota`. Nothing when L1 is not divided."""
        if self._shares is not None:
            with self._lock:
                self._shares.set_quota(tenant, nbytes)

    def share(self, space: ObjectSpace) -> int:
        """Bytes that the tenant of this space can rely on; all when L1 is not divided."""
        if self._shares is None:
            return int(self.arena.size)
        with self._lock:
            return self._shares.share(space.pool)

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, space: ObjectSpace, hashes: Sequence[bytes], seconds: float) -> int:
        """Keep the resident objects at the front of `hashes` from eviction for so long from now; how many there are.

        Ends at the first that is absent, and where the tenant's pins would hold more than half of its share (of L1,
        where it is not divided). The end of an object's `ttl_s` ends its pin. For no time, or without end, nothing is
        kept.
        """
        if not 0 < seconds < math.inf:
            return 0
        with self._lock:
            if self._aging is not None:
                self._expire(self._aging)
            if self._shares is not None:
                self._shares.seen(space.pool)
            return self._pins.add(space, hashes, self._clock() + seconds)

    def unpin(self, space: ObjectSpace, hashes: Sequence[bytes]) -> int:
        """End the pins of those of `hashes` that have one; how many that were."""
        with self._lock:
            ended = self._pins.remove(space, [o for h in hashes if (o := space.objects.get(h)) is not None])
            self._unread(space, ended)
            return len(ended)

    # -- housekeeping ------------------------------------------------------------------------------------------------

    def reap(self) -> tuple[int, int]:
        """End leases and pins that ran out, and delete objects whose time is over; how many read and write leases
        those were.

        The slots of an expired write stay in quarantine until `finish_write` says that no copy is in flight.
        """
        now = self._clock()
        reads = writes = 0
        with self._lock:
            self._unused = not self._leases
            for _ in range(len(self._leases)):
                lease = self._leases.popleft()
                if lease.ended:
                    continue
                if lease.deadline > now:
                    self._leases.append(lease)
                elif isinstance(lease, ReadLease):
                    reads += 1
                    self._end_read(lease)
                else:
                    writes += 1
                    self._on_left("failed", "lease_expired", list(lease.objects))
                    self._quarantine(lease)
            self._few_spaces = max(_FEW_SPACES, self._few_spaces * 3 // 4)
            for space, objects in self._pins.due(now):
                self._unread(space, objects)
            if self._aging is not None:
                self._expire(self._aging)
        return reads, writes

    @property
    def at_rest(self) -> bool:
        """For as long as a lease lasts, `reap` has nothing to do unless somebody pins something."""
        few = len(self._spaces) <= _FEW_SPACES
        return self._unused and few and self._aging is None and not self._pins

    @property
    def watched(self) -> bool:
        """Somebody wants to hear what leaves: see `take_gone`."""
        return self._room.watched

    @watched.setter
    def watched(self, value: bool) -> None:
        self._room.watched = value

    def take_gone(self) -> list[tuple[str, Collection[L1Object]]]:
        """While `watched`: why (`room`, `cleared`, `expired`, `unused`) and which objects have left since the last
        call."""
        with self._lock:
            gone, self._room.gone = self._room.gone, []
        return gone

    def take_expired(self) -> int:
        """How many objects' time has ended since the last call."""
        with self._lock:
            count, self._expired_objects = self._expired_objects, 0
        return count

    @property
    def free_bytes(self) -> int:
        """Bytes of the arena that hold nothing."""
        return self._room.free_bytes

    def usage(self) -> dict[str, int]:
        """Bytes and counts: `size`, `free`, `quarantined`, `objects`, `staging`, `leases`, `pinned`."""
        with self._lock:
            return {
                "size": self.arena.size,
                "free": self._room.free_bytes,
                "quarantined": self.quarantined_bytes,
                "objects": sum(len(s.objects) for s in self._spaces.values()),
                "staging": sum(len(s.staging) for s in self._spaces.values()),
                "leases": sum(1 for lease in self._leases if not lease.ended),
                "pinned": sum(1 for _ in self._pins),
            }

    def view(self, obj: L1Object) -> memoryview:
        """The bytes of an object its caller holds a lease on."""
        return self.arena.buffer[obj.slot : obj.slot + obj.space.nbytes]

    def close(self) -> None:
        """Let go of all objects. They lead to their space and their pool, which lead back to them; and they are none of
        what the garbage collector knows. What is called late is harmless."""
        with self._lock:
            for lease in (*self._leases, *self._expired):
                lease.ended = True
                lease.objects = []
            for write in self._expired:
                write.expired = False
            self._leases.clear()
            self._expired.clear()
            for space in self._spaces.values():
                space.objects.clear()
                space.staging.clear()
                space.pool.close()

    def forked(self) -> None:
        """In the child of a fork: a thread that is not here may have held the lock."""
        self._lock = threading.Lock()

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _end_read(self, lease: ReadLease) -> None:
        if lease.ended:
            return
        lease.ended = True
        objects, lease.objects = lease.objects, []
        self._unread(objects[0].space, objects)  # a read lease never spans spaces

    def _unread(self, space: ObjectSpace, objects: list[L1Object]) -> None:
        """One reader fewer for each."""
        for obj in objects:
            obj.readers -= 1
        if self._shares is not None:  # a lease may hold one twice
            self._shares.pin(space.pool, -space.slot_bytes * len({o for o in objects if not o.readers}))
        temporary = {o: None for o in objects if o.temporary and not o.readers}
        if temporary:
            table = space.objects
            lost = [o for o in temporary if table.get(o.chunk_hash) is not o]  # their time was over
            if lost:
                self._room.free(space, lost)
                temporary = {o: None for o in temporary if table.get(o.chunk_hash) is o}
            self._room.drop(temporary, "unused")

    def _immovable(self) -> Iterator[tuple[int, int]]:
        for lease in (*self._leases, *self._expired):
            for obj in lease.objects:
                yield obj.slot, obj.space.slot_bytes
        for obj in self._pins:
            yield obj.slot, obj.space.slot_bytes

    def _expire(self, aging: Aging) -> None:
        """Whose time is over is found no more: it goes now, or with its last reader."""
        over = aging.due(self._clock())
        if not over:
            return
        self._expired_objects += len(over)
        for space in dict.fromkeys(o.space for o in over):
            some = [o for o in over if o.space is space]
            if not space.pool.remove(some):
                aging.came(some, self._clock())  # its policy may still name them; again later
                self._expired_objects -= len(some)
                continue
            self._room.forget(space, some, "expired")
            self._unread(space, self._pins.remove(space, some))

    def _quarantine(self, lease: WriteLease) -> None:
        lease.ended = lease.expired = True
        for obj in lease.objects:
            del obj.space.staging[obj.chunk_hash]
            self.quarantined_bytes += obj.space.slot_bytes
        self.arena.bump([o.slot for o in lease.objects])
        self._expired[lease] = None

    def _unquarantine(self, lease: WriteLease) -> None:
        space = lease.objects[0].space
        nbytes = space.slot_bytes * len(lease.objects)
        self.quarantined_bytes -= nbytes
        if self._shares is not None:
            self._shares.pin(space.pool, -nbytes)
        self._room.free(space, lease.objects)
        lease.objects = []
        lease.expired = False
        del self._expired[lease]
