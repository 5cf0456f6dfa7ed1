"""The table of objects and the allocator: prompts of 128 chunks, policy `lru`, an arena of 4,096 slots."""

import random
from collections.abc import Callable
from contextlib import closing
from typing import Any

from kvcore.l1 import L1, Allocator, Arena, ReadLease
from kvcore.plugins import PluginSpec, Registry
from kvcore_bench.speed.measure import Case, measure, us_each
from kvcore_bench.speed.rows import Row
from kvcore_bench.speed.setting import Setting

CHUNKS, SLOTS, OBJECT_BYTES = 128, 4096, 256 << 10
_PROMPTS = 24
_LOOKUPS = 528  # more than the table notes before it tells the policy, so that this work is in the mean
_WRITES = 64


def run(setting: Setting) -> list[Row]:
    """The rows `l1.*`, in us per chunk or slot."""
    rng = random.Random(1)  # noqa: S311 - test data
    with setting.peer("l1", chunks=CHUNKS) as peer, closing(_Reads(rng)) as reads, closing(_Writes(rng)) as writes:
        plain = _PlainWrites(rng)
        looked_up, written = CHUNKS * _LOOKUPS, CHUNKS * _WRITES
        cases = [
            Case(
                "l1.lookup_hit",
                "us",
                us_each(reads.lookup, looked_up, repeats=3, after=reads.end),
                us_each(reads.plain, looked_up, repeats=3),
            ),
            Case("l1.end_read", "us", us_each(reads.end, looked_up, repeats=3, before=reads.lookup)),
            Case(
                "l1.reserve_publish",
                "us",
                us_each(writes.write, written, repeats=3, before=writes.make),
                us_each(plain.write, written, repeats=3, before=plain.make),
            ),
            Case("l1.alloc_free", "us", _one_size()),
            Case("l1.alloc_free_mixed", "us", _mixed(rng)),
        ]
        return measure([case._replace(peer=peer.sampler(case.name)) for case in cases], setting.rounds)


class _Table:
    """A real L1 with a real policy."""

    def __init__(self, rng: random.Random, prompts: int) -> None:
        self.arena = Arena(SLOTS * OBJECT_BYTES)  # never written to: only its generations take memory
        self.l1 = L1(self.arena, Registry().create("eviction", PluginSpec("lru", {}, "bench")))
        self.space = self.l1.space(b"n" * 16, 0, OBJECT_BYTES)
        self.prompts = _prompts(rng, prompts)
        self.put(self.prompts)

    def put(self, prompts: list[list[bytes]]) -> None:
        """Reserve and publish each prompt's chunks."""
        l1, space = self.l1, self.space
        for hashes in prompts:
            lease, _, no_room = l1.reserve_write(space, hashes)
            published, _ = l1.finish_write(lease)
            if no_room or len(published) != len(hashes):
                raise AssertionError("a chunk found no room")

    def close(self) -> None:
        self.arena.close()


class _Reads(_Table):
    """Prompts that are resident."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, _PROMPTS)
        self._leases: list[ReadLease] = []

    def lookup(self) -> None:
        reserve, space, prompts = self.l1.reserve_read, self.space, self.prompts
        self._leases = [reserve(space, prompts[i % _PROMPTS]) for i in range(_LOOKUPS)]
        if len(self._leases[-1].objects) != CHUNKS:
            raise AssertionError("a resident chunk was not found")

    def end(self) -> None:
        end_read = self.l1.end_read
        for lease in self._leases:
            end_read(lease)
        self._leases = []

    def plain(self) -> None:
        """The floor: a dict, a counter, a list, and no order of use."""
        get = self.space.objects.get
        for i in range(_LOOKUPS):
            found: list[Any] = []
            append = found.append
            for chunk_hash in self.prompts[i % _PROMPTS]:
                obj = get(chunk_hash)
                if obj is None:
                    break
                obj.readers += 0
                append(obj)


class _Writes(_Table):
    """New prompts into a full arena: as many objects are evicted as come."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, SLOTS // CHUNKS)
        self._rng = rng

    def make(self) -> None:
        self.prompts = _prompts(self._rng, _WRITES)

    def write(self) -> None:
        self.put(self.prompts)


class _PlainObject:
    __slots__ = ("chunk_hash", "readers", "slot")

    def __init__(self, chunk_hash: bytes, slot: int) -> None:
        self.chunk_hash, self.slot, self.readers = chunk_hash, slot, 0


class _PlainWrites:
    """The floor: a dict in order of use and a list of free slots; no leases, no states, no policy."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._objects = {h: _PlainObject(h, i) for i, h in enumerate(_prompts(rng, 1, SLOTS)[0])}
        self.make()

    def make(self) -> None:
        self._prompts = _prompts(self._rng, _WRITES)

    def write(self) -> None:
        objects = self._objects
        for hashes in self._prompts:
            old = [chunk_hash for chunk_hash, _ in zip(objects, hashes, strict=False)]
            slots = [objects.pop(chunk_hash).slot for chunk_hash in old]
            for chunk_hash, slot in zip(hashes, slots, strict=True):
                objects[chunk_hash] = _PlainObject(chunk_hash, slot)


def _prompts(rng: random.Random, count: int, chunks: int = CHUNKS) -> list[list[bytes]]:
    return [[rng.randbytes(32) for _ in range(chunks)] for _ in range(count)]


def _one_size() -> Callable[[], float]:
    """128 slots of one size in one call, and back."""
    allocator = Allocator(SLOTS * OBJECT_BYTES)

    def call() -> None:
        for _ in range(200):
            allocator.free(OBJECT_BYTES, allocator.alloc(OBJECT_BYTES, CHUNKS))

    return us_each(call, CHUNKS * 200)


def _mixed(rng: random.Random) -> Callable[[], float]:
    """Slots of five sizes in small batches, given back in another order, in an allocator that is nearly full."""
    pages = (64, 65, 96, 160, 257)
    batches = [(rng.choice(pages) * 4096, rng.randint(1, 16)) for _ in range(120)]
    order = list(range(len(batches)))
    rng.shuffle(order)
    slots = sum(count for _, count in batches)
    allocator = Allocator(sum(nbytes * count for nbytes, count in batches) * 11 // 10)

    def call() -> None:
        for _ in range(4):
            taken = [allocator.alloc(nbytes, count) for nbytes, count in batches]
            if sum(map(len, taken)) != slots:
                raise AssertionError("a slot was not found although there is room")
            for i in order:
                allocator.free(batches[i][0], taken[i])

    return us_each(call, slots * 4)
