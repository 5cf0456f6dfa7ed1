"""The table of L1 objects: their states, and the leases that guard them.

    absent  -> staging     reserve_write: a slot and a write lease
    staging -> resident    finish_write by the lease's holder
    staging -> absent      abandoned; or the lease ran out, and the slot waits in quarantine for its holder's answer
    staging -> discarded   another copy of the key was published first
    resident, read n times reserve_read, one lease per call
    resident -> absent     evicted or deleted, only with no reader; a temporary one when its last reader leaves

Only resident objects stand in `ObjectSpace.objects`, so a lookup is one dict access and an unpublished byte cannot be
found. The policy hears of uses in batches, when it is needed: a lookup only notes what it touched.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import islice, repeat
from operator import attrgetter
from typing import Any

import msgspec

from kvcore.api import EvictionPolicy, ObjectKey
from kvcore.l1.allocator import Allocator, round_up
from kvcore.l1.arena import Arena
from kvcore.observe import Throttle

LOW_WATERMARK = 0.02
"""When room is needed, this share of the arena is freed at once, so that eviction is rare."""
_MAX_NOTES = 512


class ObjectSpace:
    """The objects of one namespace and group, all `nbytes` long."""

    __slots__ = ("group", "namespace", "nbytes", "objects", "slot_bytes", "staging")

    def __init__(self, namespace: bytes, group: int, nbytes: int) -> None:
        self.namespace = namespace
        self.group = group
        self.nbytes = nbytes
        self.slot_bytes = round_up(nbytes)
        self.objects: dict[bytes, L1Object] = {}
        self.staging: dict[bytes, L1Object] = {}


class L1Object(msgspec.Struct, eq=False, gc=False):
    """One object and its slot. Fields change only under the table's lock; compared and hashed by identity.

    A msgspec struct, because making one costs a third of a class with slots.
    """

    space: ObjectSpace
    chunk_hash: bytes
    slot: int
    temporary: bool = False
    readers: int = 0

    @property
    def key(self) -> ObjectKey:
        """The object's name outside L1."""
        return ObjectKey(self.space.namespace, self.chunk_hash, self.space.group)


class ReadLease:
    """The right to read some resident objects until `deadline`. `objects` is empty once it has ended."""

    __slots__ = ("deadline", "ended", "objects")

    def __init__(self, objects: "list[L1Object]", deadline: float) -> None:
        self.objects = objects
        self.deadline = deadline
        self.ended = False


class WriteLease:
    """The right to fill some staging slots until `deadline`."""

    __slots__ = ("deadline", "ended", "expired", "objects")

    def __init__(self, objects: "list[L1Object]", deadline: float) -> None:
        self.objects = objects
        self.deadline = deadline
        self.ended = False
        self.expired = False


def _nothing(objects: Sequence[L1Object]) -> None:
    pass


_pinned: Callable[[Any], Any] = attrgetter("readers")  # in C: asked once for each victim


class L1:
    """Host memory with its objects. Thread-safe; every call is a batch under one lock and never waits for I/O.

    Args:
        arena: the memory.
        policy: which object goes first; its keys are `L1Object`s.
        lease_s: how long a lease lasts unless renewed.
        on_evict: called with the objects that made room, outside the lock.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        arena: Arena,
        policy: EvictionPolicy,
        *,
        lease_s: float = 60.0,
        on_evict: Callable[[Sequence[L1Object]], None] = _nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self.lease_s = lease_s
        self._allocator = Allocator(arena.size)
        self._policy = policy
        self._trusted = type(policy).__module__.startswith("kvcore.builtin.")  # proven by their tests; checks cost
        self._orphans: dict[L1Object, None] = {}  # what the policy may not know, because it has failed: oldest first
        self._on_evict = on_evict
        self._clock = clock
        self._lock = threading.Lock()
        self._spaces: dict[tuple[bytes, int], ObjectSpace] = {}
        self._notes: list[tuple[int, list[L1Object]]] = []  # (size of each if they are new, else 0; objects), in order
        self._leases: deque[ReadLease | WriteLease] = deque()
        self.quarantined_bytes = 0
        self.watched = False
        """Somebody wants to hear what leaves: see `take_gone`."""
        self._gone: list[tuple[str, Collection[L1Object]]] = []
        self._log = Throttle()

    # -- spaces ------------------------------------------------------------------------------------------------------

    def space(self, namespace: bytes, group: int, nbytes: int) -> ObjectSpace:
        """The space of this namespace and group, made at first use. One size per space."""
        with self._lock:
            space = self._spaces.setdefault((namespace, group), ObjectSpace(namespace, group, nbytes))
        if space.nbytes != nbytes:
            raise ValueError(f"objects of this namespace have {space.nbytes} bytes, not {nbytes}")
        return space

    def clear(self, namespace: bytes) -> int:
        """Delete what no one reads in all spaces of `namespace`; how many objects went. Leased ones stay."""
        with self._lock:
            self._settle()
            gone = [
                obj
                for (ns, _), space in self._spaces.items()
                if ns == namespace
                for obj in space.objects.values()
                if not obj.readers
            ]
            try:
                self._policy.remove(gone)
            except Exception as error:
                self._log.warning("policy", f"the eviction policy failed: {error!r}", exc_info=True)
                return 0  # it may still name them as victims
            self._drop(gone, "cleared")
        return len(gone)

    # -- reading -----------------------------------------------------------------------------------------------------

    def reserve_read(self, space: ObjectSpace, hashes: Sequence[bytes]) -> ReadLease:
        """Lease the resident objects at the front of `hashes`, up to the first that is absent."""
        get = space.objects.get
        found: list[L1Object] = []
        append = found.append
        with self._lock:
            for chunk_hash in hashes:
                obj = get(chunk_hash)
                if obj is None:
                    break
                obj.readers += 1
                append(obj)
            return self._read_lease(found)

    def reserve_each(self, space: ObjectSpace, hashes: Sequence[bytes]) -> tuple[ReadLease, list[L1Object | None]]:
        """Lease every resident object of `hashes`; the list says which, in order."""
        get = space.objects.get
        with self._lock:
            objects = [get(h) for h in hashes]
            found = [o for o in objects if o is not None]
            for obj in found:
                obj.readers += 1
            return self._read_lease(found), objects

    def renew(self, lease: ReadLease | WriteLease) -> bool:
        """Start the lease's time again. False when it has ended."""
        with self._lock:
            if lease.ended:
                return False
            lease.deadline = self._clock() + self.lease_s
            return True

    def keep(self, lease: ReadLease) -> None:
        """What was loaded for this reader only stays resident after all: it was used."""
        with self._lock:
            kept = [o for o in lease.objects if o.temporary]
            for obj in kept:
                obj.temporary = False
            if kept:
                self._note(kept[0].space.slot_bytes, kept)

    def end_read(self, lease: ReadLease) -> None:
        """Give the lease back. Idempotent; harmless after it ran out."""
        with self._lock:
            self._end_read(lease)

    def give_up(self, nbytes: int) -> list[ReadLease]:
        """Lease the policy's next victims, of at least `nbytes` where there are as many, a lease per space.

        They go when their last reader leaves, unless one of those says `keep`.
        """
        with self._lock:
            victims = self._victims(nbytes)
            for obj in victims:
                obj.temporary = True
                obj.readers += 1
            groups = [list(objects) for _, objects in self._by_space(victims)] if victims else []
            leases = [ReadLease(objects, self._clock() + self.lease_s) for objects in groups]
            self._leases += leases
        return leases

    # -- writing -----------------------------------------------------------------------------------------------------

    def reserve_write(
        self, space: ObjectSpace, hashes: Sequence[bytes], *, temporary: bool = False
    ) -> tuple[WriteLease, int, int]:
        """Slots for those of `hashes` that are neither resident nor being written.

        Returns the lease (its `objects` in order of `hashes`), how many were already there or on their way, and how
        many found no room. Evicts as needed. A hash that repeats gets one slot.
        """
        evicted: list[L1Object] = []
        with self._lock:
            objects, staging = space.objects, space.staging
            wanted = hashes if objects.keys().isdisjoint(hashes) else [h for h in hashes if h not in objects]
            if staging:
                wanted = [h for h in wanted if h not in staging]
            known = len(hashes) - len(wanted)
            slots = self._allocate(space.slot_bytes, len(wanted), evicted) if wanted else []
            # map stops at the last slot: without room for all, the front of the prefix is the useful part
            new = list(map(L1Object, repeat(space), wanted, slots, repeat(temporary)))
            lease = WriteLease(new, self._clock() + self.lease_s)
            if new:
                before = len(staging)
                staging.update(zip(wanted, new))  # noqa: B905
                if len(staging) - before < len(new):  # a hash came twice: one slot is enough
                    lease.objects = [o for o in new if staging[o.chunk_hash] is o]
                    self._free([o for o in new if staging[o.chunk_hash] is not o])
                    known += len(new) - len(lease.objects)
                self._leases.append(lease)
            else:
                lease.ended = True
        if evicted:
            self._on_evict(evicted)
        return lease, known, len(wanted) - len(new)

    def finish_write(
        self, lease: WriteLease, ok: bool = True, *, failed: Collection[L1Object] = (), read: bool = False
    ) -> tuple[list[L1Object], ReadLease]:
        """Publish what the lease's holder has filled, less `failed`, or abandon it all. Late and repeated calls are
        harmless.

        Returns the objects now resident through this call, and with `read` a read lease on them taken in the same
        moment, so that they cannot be evicted in between.
        """
        with self._lock:
            published: list[L1Object] = []
            if lease.expired:
                self._unquarantine(lease)
            elif not lease.ended:
                lease.ended = True
                published, lease.objects = lease.objects, []
                space = published[0].space  # a write lease never spans spaces
                objects, staging = space.objects, space.staging
                if len(staging) == len(published):  # the only writer
                    fresh, space.staging = staging, {}
                else:
                    fresh = {o.chunk_hash: staging.pop(o.chunk_hash) for o in published}
                if not ok or failed or not objects.keys().isdisjoint(fresh):
                    lost = {o: None for o in published if not ok or o in failed or o.chunk_hash in objects}
                    published = [o for o in published if o not in lost]
                    self._free(lost)
                    fresh = {o.chunk_hash: o for o in published}
                objects.update(fresh)
                if published:
                    if not read and published[0].temporary:  # no reader's leaving would ever drop it
                        for obj in published:
                            obj.temporary = False
                    if not published[0].temporary:
                        self._note(space.slot_bytes, published)
                    if read:
                        for obj in published:
                            obj.readers += 1
            return published, self._read_lease(published if read else [])

    def disown(self, lease: WriteLease) -> None:
        """The copy does not end in time: its keys are free again, its slots only with `finish_write`."""
        with self._lock:
            if not lease.ended:
                self._quarantine(lease)

    # -- housekeeping ------------------------------------------------------------------------------------------------

    def reap(self) -> tuple[int, int]:
        """End leases that ran out; how many read and write leases those were.

        The slots of an expired write stay in quarantine until `finish_write` says that no copy is in flight.
        """
        now = self._clock()
        reads = writes = 0
        with self._lock:
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
                    self._quarantine(lease)
        return reads, writes

    def take_gone(self) -> list[tuple[str, Collection[L1Object]]]:
        """While `watched`: why (`room`, `cleared`, `unused`) and which objects have left since the last call."""
        with self._lock:
            gone, self._gone = self._gone, []
        return gone

    @property
    def free_bytes(self) -> int:
        """Bytes of the arena that hold nothing."""
        return self._allocator.free_bytes

    def usage(self) -> dict[str, int]:
        """Bytes and counts for metrics: `size`, `free`, `quarantined`, `objects`, `staging`, `leases`."""
        with self._lock:
            return {
                "size": self.arena.size,
                "free": self._allocator.free_bytes,
                "quarantined": self.quarantined_bytes,
                "objects": sum(len(s.objects) for s in self._spaces.values()),
                "staging": sum(len(s.staging) for s in self._spaces.values()),
                "leases": sum(1 for lease in self._leases if not lease.ended),
            }

    def view(self, obj: L1Object) -> memoryview:
        """The bytes of an object its caller holds a lease on."""
        return self.arena.buffer[obj.slot : obj.slot + obj.space.nbytes]

    def forked(self) -> None:
        """In the child of a fork: a thread that is not here may have held the lock."""
        self._lock = threading.Lock()

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _read_lease(self, found: list[L1Object]) -> ReadLease:
        lease = ReadLease(found, self._clock() + self.lease_s)
        if found:
            self._leases.append(lease)
            self._note(0, found)
        else:
            lease.ended = True
        return lease

    def _end_read(self, lease: ReadLease) -> None:
        if lease.ended:
            return
        lease.ended = True
        for obj in lease.objects:
            obj.readers -= 1
        temporary = {o: None for o in lease.objects if o.temporary and not o.readers}  # a lease may hold one twice
        lease.objects = []
        if temporary:
            self._drop(temporary, "unused")

    def _note(self, new_bytes: int, objects: list[L1Object]) -> None:
        self._notes.append((new_bytes, objects[::-1]))  # tail first: the head of a prefix is the most recent
        if len(self._notes) >= _MAX_NOTES:
            self._settle()

    def _settle(self) -> None:
        """Tell the policy what happened since it was last needed. Comes before every drop of what it knows, so no
        note is of an object that has gone; temporary ones it never heard of, and ignores."""
        for new_bytes, objects in self._notes:
            try:
                if new_bytes:
                    self._policy.insert(objects, [new_bytes] * len(objects))
                else:
                    self._policy.touch(objects)
            except Exception as error:  # a plugin's fault may cost hits, never a request
                self._log.warning("policy", f"the eviction policy failed: {error!r}", exc_info=True)
                if new_bytes:
                    self._orphans.update(dict.fromkeys(objects))
        self._notes.clear()

    def _allocate(self, nbytes: int, count: int, evicted: list[L1Object]) -> list[int]:
        if nbytes > self._allocator.size:
            return []  # no eviction could make this room
        slots = self._allocator.alloc(nbytes, count)
        while len(slots) < count:
            victims = self._victims(max((count - len(slots)) * nbytes, int(self.arena.size * LOW_WATERMARK)))
            if not victims:
                break
            self._drop(victims, "room")
            evicted += victims
            slots += self._allocator.alloc(nbytes, count - len(slots))
        return slots

    def _victims(self, need: int) -> list[L1Object]:
        self._settle()
        if self._orphans and (orphans := self._take_orphans(need)):
            return orphans
        try:
            chosen: list[Any] = self._policy.evict(need, _pinned)
            if not self._trusted:
                chosen = self._checked(chosen)
        except Exception as error:
            self._log.warning("policy", f"the eviction policy failed: {error!r}", exc_info=True)
            # It may have forgotten any of them: those that are here now go in the order in which they came.
            self._orphans.update((o, None) for s in self._spaces.values() for o in s.objects.values())
            return self._take_orphans(need)
        if any(map(_pinned, chosen)):  # whatever a policy says, what is leased stays
            self._notes += [(o.space.slot_bytes, [o]) for o in chosen if o.readers]
            chosen = [o for o in chosen if not o.readers]
        return chosen

    def _take_orphans(self, need: int) -> list[L1Object]:
        chosen = []
        for obj in self._orphans:
            if need <= 0:
                break
            if not obj.readers:
                chosen.append(obj)
                need -= obj.space.slot_bytes
        for obj in chosen:
            del self._orphans[obj]
        with suppress(Exception):  # it may know them after all
            self._policy.remove(chosen)
        return chosen

    def _checked(self, chosen: Iterable[Any]) -> list[L1Object]:
        """What a policy from elsewhere named, less what is not, or no longer, a resident object. Raises `LookupError`
        when that is nothing."""
        most = sum(len(s.objects) for s in self._spaces.values())
        named = dict.fromkeys(islice(chosen, most))
        here = [o for o in named if isinstance(o, L1Object) and o.space.objects.get(o.chunk_hash) is o]
        if named and not here:
            raise LookupError("it names only what is not here")
        return here

    def _drop(self, objects: Collection[L1Object], reason: str = "room") -> None:
        if self.watched:
            self._gone.append((reason, objects))
        for space, some in self._by_space(objects):
            table = space.objects
            for obj in some:
                del table[obj.chunk_hash]
            self._free_in(space, some)
        for obj in objects if self._orphans else ():
            self._orphans.pop(obj, None)

    def _free(self, objects: Collection[L1Object]) -> None:
        for space, some in self._by_space(objects):
            self._free_in(space, some)

    def _free_in(self, space: ObjectSpace, objects: Collection[L1Object]) -> None:
        slots = [o.slot for o in objects]
        self.arena.bump(slots)
        self._allocator.free(space.slot_bytes, slots)

    def _by_space(self, objects: Collection[L1Object]) -> list[tuple[ObjectSpace, Collection[L1Object]]]:
        if len(self._spaces) == 1:  # the usual case, several times as fast
            return [(space, objects) for space in self._spaces.values()]
        spaces = dict.fromkeys(o.space for o in objects)  # not a set: where slots lie must not depend on addresses
        return [(space, [o for o in objects if o.space is space]) for space in spaces]

    def _quarantine(self, lease: WriteLease) -> None:
        lease.ended = lease.expired = True
        for obj in lease.objects:
            del obj.space.staging[obj.chunk_hash]
            self.quarantined_bytes += obj.space.slot_bytes
        self.arena.bump([o.slot for o in lease.objects])

    def _unquarantine(self, lease: WriteLease) -> None:
        self.quarantined_bytes -= sum(o.space.slot_bytes for o in lease.objects)
        self._free(lease.objects)
        lease.objects = []
        lease.expired = False
