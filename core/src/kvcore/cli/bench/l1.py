"""The table of objects and the allocator: prompts of 128 chunks, policy `lru`, an arena of 4,096 slots."""

import random
from collections.abc import Callable
from contextlib import closing
from typing import Any

from kvcore.cli.bench.measure import Case, measure, us_each
from kvcore.cli.bench.rows import Row
from kvcore.cli.bench.setting import Setting
from kvcore.l1 import L1, Allocator, Arena, ObjectSpace, ReadLease
from kvcore.plugins import PluginSpec, Registry

CHUNKS, SLOTS, OBJECT_BYTES = 128, 4096, 256 << 10
_PROMPTS = 24
_LOOKUPS = 528  # more than the table notes before it tells the policy, so that this work is in the mean
_WRITES = 64


def run(setting: Setting) -> list[Row]:
    """The rows `l1.*`, in us per chunk or slot."""
    rng = random.Random(1)  # noqa: S311 - test data
    with setting.peer("l1", chunks=CHUNKS) as peer:
        cases = []
        with closing(_Table(rng)) as hits, closing(_Table(rng)) as writes:
            hits.fill(_PROMPTS)
            writes.fill(SLOTS // CHUNKS)
            each = CHUNKS * _LOOKUPS
            for name, ours, limit, after in (
                ("l1.lookup_hit", hits.lookups, hits.plain_lookups, hits.end),
                ("l1.end_read", hits.end_timed, None, None),
            ):
                prepare = hits.lookups if name == "l1.end_read" else None
                cases.append(
                    Case(
                        name,
                        "us",
                        _prepared(prepare, ours, each, after),
                        us_each(limit, each, repeats=3) if limit else None,
                        peer.sampler(name),
                    )
                )
            cases += [
                Case(
                    "l1.reserve_publish",
                    "us",
                    us_each(writes.write_all, CHUNKS * _WRITES, repeats=3, after=writes.l1.reap),
                    us_each(_PlainTable(rng).write_all, CHUNKS * _WRITES, repeats=3),
                    peer.sampler("l1.reserve_publish"),
                ),
                Case("l1.alloc_free", "us", us_each(*_one_size()), None, peer.sampler("l1.alloc_free")),
                Case("l1.alloc_free_mixed", "us", us_each(*_mixed(rng)), None, peer.sampler("l1.alloc_free_mixed")),
            ]
            return measure(cases, setting.rounds)


def _prepared(
    prepare: Callable[[], object] | None, call: Callable[[], object], each: int, after: Callable[[], object] | None
) -> Callable[[], float]:
    if prepare is None:
        return us_each(call, each, repeats=3, after=after)
    once = us_each(call, each, repeats=1, after=after)

    def sample() -> float:
        prepare()
        return once()

    return sample


class _Table:
    """A real L1 with a real policy."""

    def __init__(self, rng: random.Random) -> None:
        self.arena = Arena(SLOTS * OBJECT_BYTES)
        self.l1 = L1(self.arena, Registry().create("eviction", PluginSpec("lru", {}, "bench")))
        self.space: ObjectSpace = self.l1.space(b"n" * 16, 0, OBJECT_BYTES)
        self._rng = rng
        self._prompts: list[list[bytes]] = []
        self._leases: list[ReadLease] = []
        self._fresh: list[list[bytes]] = []

    def fill(self, prompts: int) -> None:
        for _ in range(prompts):
            hashes = [self._rng.randbytes(32) for _ in range(CHUNKS)]
            self._write(hashes)
            self._prompts.append(hashes)

    def lookups(self) -> None:
        reserve, space, prompts = self.l1.reserve_read, self.space, self._prompts
        self._leases = [reserve(space, prompts[i % _PROMPTS]) for i in range(_LOOKUPS)]
        if len(self._leases[-1].objects) != CHUNKS:
            raise AssertionError("a resident chunk was not found")

    def end(self) -> None:
        self.end_timed()
        self.l1.reap()

    def end_timed(self) -> None:
        end_read = self.l1.end_read
        for lease in self._leases:
            end_read(lease)
        self._leases = []

    def plain_lookups(self) -> None:
        """The floor: a dict, a counter, a list."""
        get = self.space.objects.get
        for i in range(_LOOKUPS):
            found: list[Any] = []
            append = found.append
            for chunk_hash in self._prompts[i % _PROMPTS]:
                obj = get(chunk_hash)
                if obj is None:
                    break
                obj.readers += 0
                append(obj)

    def write_all(self) -> None:
        """New prompts into a full arena: as many objects go as come."""
        fresh, self._fresh = self._fresh, []
        for hashes in fresh or _prompts(self._rng):
            self._write(hashes)
        self._fresh = []

    def _write(self, hashes: list[bytes]) -> None:
        lease, _, no_room = self.l1.reserve_write(self.space, hashes)
        published, _ = self.l1.finish_write(lease)
        if no_room or len(published) != len(hashes):
            raise AssertionError("a chunk found no room")

    def close(self) -> None:
        self.l1.reap()
        self.arena.close()
