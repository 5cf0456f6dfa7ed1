"""The L1 table: a state machine beside a plain model, threads in real time, and policies that misbehave."""

import logging
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from l1_model import HASHES, L1Machine

from kvcore.api import EvictionPolicy
from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.l1 import L1, Arena
from kvcore.l1.allocator import ALIGN

L1Machine.TestCase.settings = settings(max_examples=200, stateful_step_count=60)
TestL1Machine = L1Machine.TestCase


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(16 * ALIGN)
    yield arena
    arena.close()


def lru() -> LruPolicy:
    return LruPolicy(None, None)


def test_one_size_per_space(arena: Arena) -> None:
    l1 = L1(arena, lru())
    assert l1.space(b"n" * 16, 0, 100) is l1.space(b"n" * 16, 0, 100)
    with pytest.raises(ValueError, match="have 100 bytes, not 101"):
        l1.space(b"n" * 16, 0, 101)
    assert l1.space(b"n" * 16, 1, 101).nbytes == 101


def test_an_object_larger_than_the_arena_evicts_nothing(arena: Arena) -> None:
    l1 = L1(arena, lru())
    small, huge = l1.space(b"s" * 16, 0, ALIGN), l1.space(b"h" * 16, 0, 17 * ALIGN)
    l1.finish_write(l1.reserve_write(small, HASHES)[0])
    lease, known, no_room = l1.reserve_write(huge, HASHES[:2])
    assert (lease.objects, known, no_room) == ([], 0, 2)
    assert len(small.objects) == len(HASHES)


def test_eviction_takes_no_more_than_it_must(arena: Arena) -> None:
    l1 = L1(arena, lru())
    space = l1.space(b"s" * 16, 0, ALIGN)
    keys = [b"%016d" % i for i in range(40)]
    l1.finish_write(l1.reserve_write(space, keys[:16])[0])
    l1.finish_write(l1.reserve_write(space, keys[16:20])[0])
    assert len(space.objects) == 16
    assert set(keys[16:20]) <= set(space.objects)


def test_the_head_of_a_prefix_outlives_its_tail(arena: Arena) -> None:
    l1 = L1(arena, lru())
    space = l1.space(b"s" * 16, 0, ALIGN)
    keys = [b"%016d" % i for i in range(40)]
    l1.finish_write(l1.reserve_write(space, keys[:16])[0])
    l1.finish_write(l1.reserve_write(space, keys[20:26])[0])
    assert set(space.objects) == {*keys[:10], *keys[20:26]}


def test_a_dead_writer_keeps_its_slot_until_it_answers(arena: Arena) -> None:
    now = [0.0]
    l1 = L1(arena, lru(), lease_s=1, clock=lambda: now[0])
    space = l1.space(b"s" * 16, 0, 8 * ALIGN)
    dead, _, _ = l1.reserve_write(space, HASHES[:1])
    slot = dead.objects[0].slot
    now[0] = 2.0
    assert l1.reap() == (0, 1)
    heir, _, no_room = l1.reserve_write(space, HASHES[:2])  # the same key, and one more than there is room for
    assert no_room == 1
    assert heir.objects[0].slot != slot
    assert l1.finish_write(dead)[0] == []  # too late: freed, not published
    assert [o.chunk_hash for o in l1.finish_write(heir)[0]] == [HASHES[0]]
    assert l1.finish_write(dead)[0] == []
    assert l1.reserve_write(space, HASHES[1:2])[0].objects[0].slot == slot


class Broken(LruPolicy):
    """An LRU that raises from one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__(None, None)
        self.method = method

    def _maybe(self, method: str) -> None:
        if method == self.method:
            raise RuntimeError("a bug of the policy")

    def insert(self, *args: Any) -> None:
        self._maybe("insert")
        super().insert(*args)

    def touch(self, *args: Any) -> None:
        self._maybe("touch")
        super().touch(*args)

    def remove(self, *args: Any) -> None:
        self._maybe("remove")
        super().remove(*args)

    def evict(self, *args: Any) -> list[Any]:
        self._maybe("evict")
        return super().evict(*args)


@pytest.mark.parametrize("method", ["insert", "touch", "remove", "evict"])
def test_a_policy_that_raises_costs_hits_and_no_request(
    arena: Arena, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    l1 = L1(arena, Broken(method))
    space = l1.space(b"s" * 16, 0, ALIGN)
    for i in range(600):
        lease, known, no_room = l1.reserve_write(space, [b"%016d" % i])
        assert (len(lease.objects), known, no_room) == (1, 0, 0)
        l1.finish_write(lease)
        l1.end_read(l1.reserve_read(space, [b"%016d" % i]))
        usage = l1.usage()
        assert usage["free"] + usage["objects"] * ALIGN == usage["size"]
    l1.clear(b"s" * 16)
    usage = l1.usage()
    assert usage["free"] + usage["objects"] * ALIGN == usage["size"]
    told = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == 1  # once, not six hundred times
    assert "the eviction policy failed" in told[0].message


class Once(LruPolicy):
    """An LRU that raises once, in the middle of its work or after it."""

    def __init__(self, method: str, done: int) -> None:
        super().__init__(None, None)
        self.method = method
        self.done = done

    def _now(self, method: str) -> bool:
        if method == self.method:
            self.method = ""
            return True
        return False

    def insert(self, keys: Any, sizes: Any) -> None:
        if self._now("insert"):
            super().insert(keys[: self.done], sizes[: self.done])
            raise RuntimeError("half of it is done")
        super().insert(keys, sizes)

    def evict(self, nbytes: int, pinned: Any) -> list[Any]:
        victims = super().evict(nbytes, pinned)
        if self._now("evict"):
            raise RuntimeError("they are forgotten, and nobody was told of them")
        return victims


@pytest.mark.parametrize("method", ["insert", "evict"])
@pytest.mark.parametrize("done", [0, 3, 7])
def test_what_a_policy_has_lost_by_raising_once_can_still_be_evicted(arena: Arena, method: str, done: int) -> None:
    l1 = L1(arena, Once(method, done))
    space = l1.space(b"s" * 16, 0, ALIGN)
    keys = [b"%016d" % i for i in range(200)]
    l1.finish_write(l1.reserve_write(space, keys[:8])[0])
    l1.finish_write(l1.reserve_write(space, keys[8:16])[0])
    held = l1.reserve_read(space, keys[:4])
    assert len(l1.reserve_write(space, keys[16:28])[0].objects) == 12, "all but what is leased makes room"
    assert set(space.objects) == set(keys[:4])
    l1.end_read(held)
    l1.reap()
    lease = l1.reserve_write(space, keys[28:32])[0]
    assert len(lease.objects) == 4
    l1.finish_write(lease)
    for i in range(32, 200, 4):
        lease = l1.reserve_write(space, keys[i : i + 4])[0]
        assert len(lease.objects) == 4
        l1.finish_write(lease)
        l1.end_read(l1.reserve_read(space, keys[i : i + 4]))
    assert l1._pool._orphans == {}
    assert l1.clear(space.namespace) == 4
    assert l1.usage()["objects"] == 0


class Ruthless(EvictionPolicy):
    """Chooses whatever came first, leased or not."""

    def __init__(self) -> None:
        self.keys: list[Any] = []

    def insert(self, keys: Any, sizes: Any) -> None:
        self.keys += keys

    def touch(self, keys: Any) -> None:
        pass

    def remove(self, keys: Any) -> None:
        self.keys = [k for k in self.keys if k not in keys]

    def evict(self, nbytes: int, pinned: Any) -> list[Any]:
        victims, self.keys = self.keys[:4], self.keys[4:]
        return victims

    def __len__(self) -> int:
        return len(self.keys)


def test_no_policy_can_evict_what_is_leased(arena: Arena) -> None:
    l1 = L1(arena, Ruthless())
    space = l1.space(b"s" * 16, 0, ALIGN)
    keys = [b"%016d" % i for i in range(32)]
    l1.finish_write(l1.reserve_write(space, keys[:16])[0])
    lease = l1.reserve_read(space, keys[:16])
    assert l1.reserve_write(space, keys[16:])[2] == 16
    assert [o.chunk_hash for o in lease.objects] == keys[:16]
    assert set(space.objects) == set(keys[:16])


@pytest.mark.parametrize("keep", [False, True])
def test_a_temporary_object_goes_with_its_last_reader_unless_it_was_used(arena: Arena, keep: bool) -> None:
    l1 = L1(arena, lru())
    space = l1.space(b"s" * 16, 0, ALIGN)
    _, loaded = l1.finish_write(l1.reserve_write(space, HASHES[:2], temporary=True)[0], read=True)
    other = l1.reserve_read(space, HASHES[:1])
    if keep:
        l1.keep(loaded)
    l1.end_read(loaded)
    assert set(space.objects) == ({*HASHES[:2]} if keep else {HASHES[0]})
    l1.end_read(other)
    assert set(space.objects) == ({*HASHES[:2]} if keep else set())
    assert len(l1.reserve_write(space, [b"%016d" % i for i in range(16)])[0].objects) == 16  # evictable, or gone


def test_what_is_published_for_no_reader_can_be_evicted(arena: Arena) -> None:
    l1 = L1(arena, lru())
    space = l1.space(b"s" * 16, 0, ALIGN)
    keys = [b"%016d" % i for i in range(32)]
    l1.finish_write(l1.reserve_write(space, keys[:16], temporary=True)[0])
    assert len(l1.reserve_write(space, keys[16:])[0].objects) == 16


def test_threads_in_real_time() -> None:
    """Writers, readers, a reaper and a deleter at once; every reader checks bytes and generation."""
    arena = Arena(64 * ALIGN)
    l1 = L1(arena, lru(), lease_s=0.02)
    spaces = [l1.space(b"a" * 16, 0, ALIGN), l1.space(b"b" * 16, 0, 3 * ALIGN - 17)]
    keys = [b"%016d" % i for i in range(60)]
    faults: list[str] = []
    counts = {"read": 0, "stale": 0, "published": 0, "late": 0}
    lock = threading.Lock()
    stop = threading.Event()
    writers = iter(range(1, 1 << 30))

    def count(what: str, n: int = 1) -> None:
        with lock:
            counts[what] += n

    def write(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            space = rng.choice(spaces)
            first = rng.randrange(len(keys) - 4)
            lease, _, _ = l1.reserve_write(space, keys[first : first + 4], temporary=rng.random() < 0.3)
            objects = list(lease.objects)
            with lock:
                writer = next(writers)
            for obj in objects:
                stamp = obj.chunk_hash + writer.to_bytes(8, "little")
                whole = (stamp * (space.nbytes // len(stamp) + 1))[: space.nbytes]
                view = l1.view(obj)
                view[:] = b"\xee" * space.nbytes
                view[: space.nbytes // 2] = whole[: space.nbytes // 2]
                if rng.random() < 0.02:
                    time.sleep(0.05)  # beyond the lease
                view[space.nbytes // 2 :] = whole[space.nbytes // 2 :]
            if rng.random() < 0.3:
                time.sleep(0)
            expired = lease.ended and bool(objects)
            published, read = l1.finish_write(lease, rng.random() < 0.9, read=rng.random() < 0.5)
            if expired:
                count("late")
                if published:
                    faults.append("published after the lease ran out")
            count("published", len(published))
            l1.finish_write(lease)
            l1.end_read(read)
            l1.end_read(read)

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            space = rng.choice(spaces)
            first = rng.randrange(len(keys) - 4)
            wanted = keys[first : first + 4]
            lease = l1.reserve_each(space, wanted)[0] if rng.random() < 0.5 else l1.reserve_read(space, wanted)
            objects = list(lease.objects)
            generations = [arena.generation(o.slot) for o in objects]
            if lease.ended:
                continue  # this thread slept so long that the generations say nothing
            if rng.random() < 0.1:
                time.sleep(rng.choice([0.0, 0.03]))
            copies = [bytes(l1.view(o)) for o in objects]
            after = [arena.generation(o.slot) for o in objects]
            held = not lease.ended
            for obj, copied, g0, g1 in zip(objects, copies, generations, after, strict=True):
                if g0 != g1:
                    count("stale")
                    if held:
                        faults.append("the generation changed under a lease")
                    continue
                count("read")
                stamp = copied[:24]
                if stamp[:16] != obj.chunk_hash or copied != (stamp * (len(copied) // 24 + 1))[: len(copied)]:
                    faults.append(f"{obj.chunk_hash!r} read as {copied[:24]!r}")
            if rng.random() < 0.2:
                l1.keep(lease)
            l1.end_read(lease)

    def housekeeping() -> None:
        rng = random.Random(0)
        while not stop.is_set():
            l1.reap()
            if rng.random() < 0.05:
                l1.clear(rng.choice(spaces).namespace)
            usage = l1.usage()
            if not 0 <= usage["free"] <= usage["size"]:
                faults.append(f"books: {usage}")
            time.sleep(0.005)

    def guarded(function: Any, *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(write, i)) for i in range(3)]
    threads += [threading.Thread(target=guarded, args=(read, 10 + i)) for i in range(3)]
    threads.append(threading.Thread(target=guarded, args=(housekeeping,)))
    for thread in threads:
        thread.start()
    time.sleep(2)
    stop.set()
    for thread in threads:
        thread.join()

    assert not faults, faults[:5]
    assert min(counts["read"], counts["published"], counts["late"]) > 0, counts  # the test has tested something
    time.sleep(0.03)
    l1.reap()
    usage = l1.usage()
    assert usage["staging"] == usage["quarantined"] == usage["leases"] == 0
    lease, _, _ = l1.reserve_write(l1.space(b"z" * 16, 0, ALIGN), [b"%d" % i for i in range(64)])
    assert len(lease.objects) == 64, "a slot is lost"
    arena.close()
