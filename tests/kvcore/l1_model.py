"""A plain model of the L1 table, driven beside it by hypothesis. Run by test_l1.py.

A slot is filled with bytes that depend on its key and its writer, so that whatever a reader sees tells where it came
from. The model keeps its own books; after every step the books are compared.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from kvcore.builtin.eviction_fifo import FifoPolicy
from kvcore.builtin.eviction_lfu import LfuPolicy
from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.builtin.eviction_s3fifo import S3FifoPolicy
from kvcore.l1 import L1, Arena, L1Object, ObjectSpace, ReadLease, WriteLease
from kvcore.l1.allocator import ALIGN

PAGES = 12
LEASE_S = 10.0
SIZES = (ALIGN - 96, 3 * ALIGN)  # bytes of an object in each space
HASHES = [hashlib.sha256(bytes([i])).digest() for i in range(7)]


def content(space: int, chunk_hash: bytes, writer: int) -> bytes:
    """What writer number `writer` puts into the slot of this key."""
    seed = hashlib.sha256(b"%d/%d/" % (space, writer) + chunk_hash).digest()
    return (seed * (SIZES[space] // len(seed) + 1))[: SIZES[space]]


@dataclass(eq=False)
class Entry:
    """The model's idea of one resident object."""

    obj: L1Object
    data: bytes
    temporary: bool
    readers: int = 0
    generation: int = 0


@dataclass(eq=False)
class Read:
    """The model's idea of one read lease."""

    lease: ReadLease
    entries: list[Entry]
    deadline: float
    ended: bool = False


@dataclass(eq=False)
class Write:
    """The model's idea of one write lease."""

    lease: WriteLease
    space: int
    objects: list[L1Object]
    writer: int
    temporary: bool
    deadline: float
    state: str = "open"  # open, expired (in quarantine), over
    generations: list[int] = field(default_factory=list)


class L1Machine(RuleBasedStateMachine):
    """Every operation in any order, late and repeated ones too."""

    reads = Bundle("reads")
    writes = Bundle("writes")

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.evicted: list[L1Object] = []
        self.resident: dict[tuple[int, bytes], Entry] = {}
        self.unfindable: list[Entry] = []
        self.read_leases: list[Read] = []
        self.write_leases: list[Write] = []
        self.writers = 0

    @initialize(policy=st.sampled_from([LruPolicy, LfuPolicy, FifoPolicy, S3FifoPolicy]))
    def start(self, policy: Any) -> None:
        self.arena = Arena(PAGES * ALIGN)
        self.l1 = L1(
            self.arena, policy(None, None), lease_s=LEASE_S, on_evict=self.evicted.extend, clock=lambda: self.now
        )
        self.spaces: list[ObjectSpace] = [self.l1.space(bytes([i]) * 16, 0, size) for i, size in enumerate(SIZES)]

    def teardown(self) -> None:
        if not hasattr(self, "l1"):
            return
        for write in self.write_leases:
            self.l1.finish_write(write.lease, ok=False)
        for read in self.read_leases:
            self.l1.end_read(read.lease)
        # Nothing is lost: with every lease ended, all of the arena can be had at once.
        lease, _, no_room = self.l1.reserve_write(self.l1.space(b"z" * 16, 0, ALIGN), [b"%d" % i for i in range(PAGES)])
        assert (len(lease.objects), no_room) == (PAGES, 0)
        self.arena.close()

    # -- writing -----------------------------------------------------------------------------------------------------

    @rule(
        target=writes,
        s=st.integers(0, 1),
        hashes=st.lists(st.sampled_from(HASHES), max_size=5),
        temporary=st.booleans(),
    )
    def reserve_write(self, s: int, hashes: list[bytes], temporary: bool) -> Any:
        staged = {(w.space, o.chunk_hash) for w in self.write_leases if w.state == "open" for o in w.objects}
        there = {h for h in hashes if (s, h) in self.resident or (s, h) in staged}
        absent = [h for h in dict.fromkeys(hashes) if h not in there]
        taken = self.slots_in_use()

        lease, known, no_room = self.l1.reserve_write(self.spaces[s], hashes, temporary=temporary)

        taken -= self.forget_evicted()
        new = [o.chunk_hash for o in lease.objects]
        if len(set(hashes)) == len(hashes):
            assert new == absent[: len(new)], "the front of what was asked, in order"
            assert known == len(there)
            assert no_room == len(absent) - len(new)
        else:
            assert len(set(new)) == len(new), "two leases on one key"
            assert set(new) <= set(absent)
            assert len(new) + known + no_room == len(hashes)
        if len(new) < len(absent) and len(set(hashes)) == len(hashes):
            assert all(e.readers for e in self.resident.values()), "no room, though something could be evicted"
        for obj in lease.objects:
            pages = self.pages(obj)
            assert not pages & taken, "a slot in use was given away"
            taken |= pages
            self.l1.view(obj)[:] = b"\xee" * SIZES[s]
        self.writers += 1
        write = Write(lease, s, list(lease.objects), self.writers, temporary, self.now + LEASE_S)
        write.generations = [self.arena.generation(o.slot) for o in write.objects]
        write.state = "open" if write.objects else "over"
        self.write_leases.append(write)
        return write if write.objects else multiple()

    @rule(
        target=reads, write=writes, ok=st.booleans(), failed=st.sets(st.integers(0, 4), max_size=2), read=st.booleans()
    )
    def finish_write(self, write: Write, ok: bool, failed: set[int], read: bool) -> Any:
        lost = {o for i, o in enumerate(write.objects) if i in failed}
        if write.state in ("open", "expired"):
            for obj in write.objects:  # an expired slot is still its holder's: nobody else may be disturbed
                self.l1.view(obj)[:] = content(write.space, obj.chunk_hash, write.writer)

        published, lease = self.l1.finish_write(write.lease, ok, failed=lost, read=read)

        expected = [o for o in write.objects if o not in lost] if ok and write.state == "open" else []
        assert published == expected
        assert lease.objects == (expected if read else [])
        if write.state != "over":
            for obj, generation in zip(write.objects, write.generations, strict=True):
                assert (self.arena.generation(obj.slot) == generation) == (obj in expected)
        write.state = "over"
        entries = []
        for obj in published:
            data = content(write.space, obj.chunk_hash, write.writer)
            entry = Entry(obj, data, write.temporary and read, int(read), self.arena.generation(obj.slot))
            assert self.resident.setdefault((write.space, obj.chunk_hash), entry) is entry, "published over another"
            entries.append(entry)
        return self.new_read(lease, entries if read else [])

    # -- reading -----------------------------------------------------------------------------------------------------

    @rule(target=reads, s=st.integers(0, 1), hashes=st.lists(st.sampled_from(HASHES), min_size=1, max_size=6))
    def reserve_read(self, s: int, hashes: list[bytes]) -> Any:
        expected = []
        for h in hashes:
            if (s, h) not in self.resident:
                break
            expected.append(self.resident[s, h])
        lease = self.l1.reserve_read(self.spaces[s], hashes)
        assert lease.objects == [e.obj for e in expected]
        return self.lease_entries(lease, expected)

    @rule(target=reads, s=st.integers(0, 1), hashes=st.lists(st.sampled_from(HASHES), min_size=1, max_size=6))
    def reserve_each(self, s: int, hashes: list[bytes]) -> Any:
        expected = [self.resident.get((s, h)) for h in hashes]
        lease, objects = self.l1.reserve_each(self.spaces[s], hashes)
        assert objects == [e and e.obj for e in expected]
        return self.lease_entries(lease, [e for e in expected if e])

    @rule(read=reads)
    def keep(self, read: Read) -> None:
        self.l1.keep(read.lease)
        if not read.ended:
            for entry in read.entries:
                entry.temporary = False  # an unfindable one goes all the same

    @rule(read=reads)
    def end_read(self, read: Read) -> None:
        self.l1.end_read(read.lease)
        self.end(read)

    @rule(read=reads)
    def renew_read(self, read: Read) -> None:
        assert self.l1.renew(read.lease) is not read.ended
        read.deadline = self.now + LEASE_S

    @rule(write=writes)
    def renew_write(self, write: Write) -> None:
        assert self.l1.renew(write.lease) is (write.state == "open")
        write.deadline = self.now + LEASE_S

    # -- time, deletion ----------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reap(self) -> None:
        late_reads = [r for r in self.read_leases if not r.ended and r.deadline <= self.now]
        late_writes = [w for w in self.write_leases if w.state == "open" and w.deadline <= self.now]
        assert self.l1.reap() == (len(late_reads), len(late_writes))
        for read in late_reads:
            self.end(read)
        for write in late_writes:
            write.state = "expired"
            for i, obj in enumerate(write.objects):
                generation = self.arena.generation(obj.slot)
                assert generation != write.generations[i], "a late copy would be believed"
                write.generations[i] = generation

    @precondition(lambda self: len(self.resident) > 2)
    @rule(s=st.integers(0, 1))
    def clear(self, s: int) -> None:
        gone = [k for k in self.resident if k[0] == s]
        assert self.l1.clear(self.spaces[s].namespace) == len(gone)
        for key in gone:
            entry = self.resident.pop(key)
            if entry.readers:
                self.unfindable.append(entry)
            else:
                self.check_freed(entry)

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "l1"):
            return
        usage = self.l1.usage()
        staged = [o for w in self.write_leases if w.state == "open" for o in w.objects]
        quarantined = sum(o.space.slot_bytes for w in self.write_leases if w.state == "expired" for o in w.objects)
        here = [e.obj for e in (*self.resident.values(), *self.unfindable)]
        held = sum(o.space.slot_bytes for o in (*here, *staged))
        assert usage["quarantined"] == quarantined
        assert usage["free"] + held + quarantined == usage["size"] == PAGES * ALIGN, "a slot is lost or counted twice"
        assert (usage["objects"], usage["staging"]) == (len(self.resident), len(staged))
        open_leases = sum(not r.ended for r in self.read_leases) + sum(w.state == "open" for w in self.write_leases)
        assert usage["leases"] == open_leases
        found = {(s, h): o for s, space in enumerate(self.spaces) for h, o in space.objects.items()}
        assert found == {k: e.obj for k, e in self.resident.items()}
        for entry in self.resident.values():
            assert entry.obj.readers == entry.readers
            assert entry.obj.temporary == entry.temporary

    @invariant()
    def readers_see_what_was_published(self) -> None:
        for entry in (*self.resident.values(), *self.unfindable):
            assert self.l1.view(entry.obj) == entry.data
            assert self.arena.generation(entry.obj.slot) == entry.generation
        for read in self.read_leases:
            if not read.ended:
                assert all(self.l1.view(e.obj) == e.data for e in read.entries)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def pages(self, obj: L1Object) -> set[int]:
        return set(range(obj.slot // ALIGN, (obj.slot + obj.space.slot_bytes) // ALIGN))

    def slots_in_use(self) -> set[int]:
        objects = [e.obj for e in (*self.resident.values(), *self.unfindable)]
        objects += [o for w in self.write_leases if w.state in ("open", "expired") for o in w.objects]
        return {page for o in objects for page in self.pages(o)}

    def forget_evicted(self) -> set[int]:
        freed: set[int] = set()
        for obj in self.evicted:
            entry = self.resident.pop((self.spaces.index(obj.space), obj.chunk_hash))
            assert entry.obj is obj
            assert not entry.readers, "evicted while leased"
            self.check_freed(entry)
            freed |= self.pages(obj)
        self.evicted.clear()
        return freed

    def check_freed(self, entry: Entry) -> None:
        assert self.arena.generation(entry.obj.slot) != entry.generation, "freed, and a stale copy would be believed"

    def lease_entries(self, lease: ReadLease, entries: list[Entry]) -> Any:
        for entry in entries:
            entry.readers += 1
        return self.new_read(lease, entries)

    def new_read(self, lease: ReadLease, entries: list[Entry]) -> Any:
        read = Read(lease, entries, self.now + LEASE_S, ended=not entries)
        self.read_leases.append(read)
        return read if entries else multiple()

    def end(self, read: Read) -> None:
        if read.ended:
            return
        read.ended = True
        for entry in read.entries:
            entry.readers -= 1
        for entry in {id(e): e for e in read.entries}.values():
            if any(e is entry for e in self.unfindable):
                if not entry.readers:
                    self.unfindable = [e for e in self.unfindable if e is not entry]
                    self.check_freed(entry)
            elif entry.temporary and not entry.readers:
                del self.resident[self.spaces.index(entry.obj.space), entry.obj.chunk_hash]
                self.check_freed(entry)
