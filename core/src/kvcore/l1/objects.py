"""L1: the states of its objects, and the leases that guard them. What is neither reading nor writing is in table.py.

    absent  -> staging     reserve_write: a slot and a write lease
    staging -> resident    finish_write by the lease's holder
    staging -> absent      abandoned; or the lease ran out, and the slot waits in quarantine for its holder's answer
    staging -> discarded   another copy of the key was published first
    resident, read n times reserve_read, one lease per call
    resident -> absent     evicted or deleted, only with no reader; a temporary one when its last reader leaves
    resident -> unfindable its time (`ttl_s`) is over while it is read: it goes with its last reader

Only resident objects stand in `ObjectSpace.objects`, so a lookup is one dict access and an unpublished byte cannot be
found.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat

from kvcore.l1.leases import ReadLease, WriteLease
from kvcore.l1.pools import Pool
from kvcore.l1.spaces import L1Object, ObjectSpace
from kvcore.l1.table import Table
from kvcore.tenants import Shares


class L1(Table):
    """Host memory with its objects. Thread-safe; every call is a batch under one lock and never waits for I/O.

    Args:
        arena: the memory.
        policy: which object goes first; its keys are `L1Object`s. With `division`, that of the tenant "".
        lease_s: how long a lease lasts unless renewed.
        on_evict: called with the objects that made room, outside the lock.
        on_left: called under the lock with what leaves: `evicted` and why, see `take_gone`, or `failed` where a write
            lease ran out.
        clock: monotonic seconds.
        division: how the arena is divided among tenants; None: it is one pool, whatever tenants there are.
        ttl_s: how long an object may be resident; None: as long as it finds room.
    """

    # -- reading -----------------------------------------------------------------------------------------------------

    def reserve_read(self, space: ObjectSpace, hashes: Sequence[bytes]) -> ReadLease:
        """Lease the resident objects at the front of `hashes`, up to the first that is absent (or, for a tenant that
        has leased its whole share, that nobody has leased yet)."""
        get = space.objects.get
        found: list[L1Object] = []
        append = found.append
        with self._lock:
            if self._aging is not None:
                self._expire(self._aging)
            if self._shares is not None:
                front = self._within_share(self._shares, space, map(get, hashes), front=True)
                return self._read_lease(space, [o for o in front if o is not None])
            for chunk_hash in hashes:
                obj = get(chunk_hash)
                if obj is None:
                    break
                obj.readers += 1
                append(obj)
            return self._read_lease(space, found)

    def reserve_each(self, space: ObjectSpace, hashes: Sequence[bytes]) -> tuple[ReadLease, list[L1Object | None]]:
        """Lease every resident object of `hashes`, as far as its tenant's share goes; the list says which, in order."""
        get = space.objects.get
        with self._lock:
            if self._aging is not None:
                self._expire(self._aging)
            objects = [get(h) for h in hashes]
            if self._shares is not None:
                objects = self._within_share(self._shares, space, objects)
                return self._read_lease(space, [o for o in objects if o is not None]), objects
            found = [o for o in objects if o is not None]
            for obj in found:
                obj.readers += 1
            return self._read_lease(space, found), objects

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
            if kept:
                table = kept[0].space.objects
                kept = [o for o in kept if table.get(o.chunk_hash) is o]  # else its time is over
                for obj in kept:
                    obj.temporary = False
                self._publish(kept)

    def end_read(self, lease: ReadLease) -> None:
        """Give the lease back. Idempotent; harmless after it ran out."""
        with self._lock:
            self._end_read(lease)

    def give_up(self, nbytes: int, everything: bool = False) -> list[ReadLease]:
        """Lease the policy's next victims, of at least `nbytes` where there are as many, a lease per space.

        They go when their last reader leaves, unless one of those says `keep`. In an arena that is divided, those of
        tenants over their shares, or with `everything`, of all.
        """
        with self._lock:
            if self._shares is None:
                victims = [(self._pool, self._pool.victims(nbytes))]
            else:
                victims, leaving = [], self._leaving()
                pools = [(p, p.used) for p in self._shares.accounts.values()] if everything else None
                for pool, most in pools or self._shares.donors(None):
                    if nbytes <= 0:
                        break
                    if most > leaving[pool]:
                        some = pool.victims(min(nbytes, most - leaving[pool]))
                        nbytes -= sum(o.space.slot_bytes for o in some)
                        victims.append((pool, some))
            leases = []
            for pool, some in victims:
                for space, objects in pool.by_space(some) if some else ():
                    for obj in objects:
                        obj.temporary = True
                        obj.readers += 1
                    if self._shares is not None:
                        self._shares.pin(pool, len(objects) * space.slot_bytes)
                    leases.append(ReadLease(list(objects), self._clock() + self.lease_s))
            self._leases += leases
            if self._shares is not None:
                self._given_up += leases
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
            if self._aging is not None:
                self._expire(self._aging)
            objects, staging = space.objects, space.staging
            wanted = hashes if objects.keys().isdisjoint(hashes) else [h for h in hashes if h not in objects]
            if staging:
                wanted = [h for h in wanted if h not in staging]
            known = len(hashes) - len(wanted)
            count = 0 if space.pool is self._nowhere else len(wanted)
            if self._shares is not None:
                self._shares.seen(space.pool)
                count = max(0, min(count, self._shares.may_pin(space.pool) // space.slot_bytes))
            slots = self._room.take(space, count, evicted) if count else []
            # map stops at the last slot: without room for all, the front of the prefix is the useful part
            new = list(map(L1Object, repeat(space), wanted, slots, repeat(temporary)))
            lease = WriteLease(new, self._clock() + self.lease_s)
            if new:
                before = len(staging)
                staging.update(zip(wanted, new))  # noqa: B905
                if len(staging) - before < len(new):  # a hash came twice: one slot is enough
                    lease.objects = [o for o in new if staging[o.chunk_hash] is o]
                    self._room.free(space, [o for o in new if staging[o.chunk_hash] is not o])
                    known += len(new) - len(lease.objects)
                if self._shares is not None:
                    self._shares.pin(space.pool, len(lease.objects) * space.slot_bytes)
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
                leased = len(published)
                if not ok or failed:
                    lost = {o: None for o in published if not ok or o in failed}
                    published = [o for o in published if o not in lost]
                    self._room.free(space, lost)
                    fresh = {o.chunk_hash: o for o in published}
                objects.update(fresh)  # none of them is there: what stands in `staging` is reserved for nobody else
                if self._shares is not None:
                    self._shares.pin(space.pool, -space.slot_bytes * (leased - len(published) * read))
                if published:
                    if not read and published[0].temporary:  # no reader's leaving would ever drop it
                        for obj in published:
                            obj.temporary = False
                    if not published[0].temporary:
                        self._publish(published)
                    if read:
                        for obj in published:
                            obj.readers += 1
            if not read or not published:
                return published, self._no_lease()
            return published, self._read_lease(published[0].space, published)

    def disown(self, lease: WriteLease) -> None:
        """The copy does not end in time: its keys are free again, its slots only with `finish_write`."""
        with self._lock:
            if not lease.ended:
                self._quarantine(lease)

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _leaving(self) -> Counter[Pool]:
        """Bytes that each pool has given up and still holds."""
        self._given_up = [lease for lease in self._given_up if not lease.ended]
        leaving: Counter[Pool] = Counter()
        for lease in self._given_up:
            space = lease.objects[0].space
            leaving[space.pool] += space.slot_bytes * sum(o.temporary for o in lease.objects)
        return leaving

    def _read_lease(self, space: ObjectSpace, found: list[L1Object]) -> ReadLease:
        if not found:
            return self._no_lease()
        lease = ReadLease(found, self._clock() + self.lease_s)
        self._leases.append(lease)
        space.pool.note(0, found)
        return lease

    def _no_lease(self) -> ReadLease:
        lease = ReadLease([], self._clock())
        lease.ended = True
        return lease

    def _within_share(
        self, shares: Shares[Pool], space: ObjectSpace, objects: Iterable[L1Object | None], *, front: bool = False
    ) -> list[L1Object | None]:
        """One more reader for each of `objects`, as long as its tenant may lease more; None for the others. `front`: it
        ends at the first of these."""
        pool = space.pool
        shares.seen(pool)
        left = most = max(0, shares.may_pin(pool) // space.slot_bytes)
        leased: list[L1Object | None] = []
        for obj in objects:
            if obj is None or not (obj.readers or left):
                if front:
                    break
                leased.append(None)
                continue
            if not obj.readers:
                left -= 1
            obj.readers += 1
            leased.append(obj)
        shares.pin(pool, (most - left) * space.slot_bytes)
        return leased

    def _publish(self, objects: list[L1Object]) -> None:
        if objects:
            space = objects[0].space
            space.pool.note(space.slot_bytes, objects)
            if self._aging is not None:
                self._aging.came(objects, self._clock())
