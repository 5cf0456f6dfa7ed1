"""Eviction in L1: bursts, fragments, the rate that room is made for, pins and times to live."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.l1 import L1, Arena, L1Object, ObjectSpace, ReadLease
from kvcore.l1.allocator import ALIGN
from kvcore.l1.room import AHEAD_S, MOST_AHEAD
from kvcore.tenants import Division

PAGES = 256
Make = Callable[..., L1]


def lru() -> LruPolicy:
    return LruPolicy(None, None)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Iterator[Make]:
    arenas: list[Arena] = []

    def make(pages: int = PAGES, **options: Any) -> L1:
        arenas.append(Arena(pages * ALIGN))
        return L1(arenas[-1], lru(), clock=clock, **options)

    yield make
    for arena in arenas:
        arena.close()


def names(count: int, seed: int = 0) -> list[bytes]:
    return [b"%08d%08d" % (seed, i) for i in range(count)]


def put(l1: L1, space: ObjectSpace, hashes: list[bytes]) -> int:
    """Store chunks; how many found no room."""
    lease, _, no_room = l1.reserve_write(space, hashes)
    l1.finish_write(lease)
    return no_room


def read(l1: L1, space: ObjectSpace, hashes: list[bytes]) -> ReadLease:
    lease = l1.reserve_read(space, hashes)
    assert len(lease.objects) == len(hashes)
    return lease


# -- bursts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_a_burst_of_four_times_l1_keeps_the_newest_and_refuses_nothing(make: Make, clock: Clock, batch: int) -> None:
    gone: list[L1Object] = []
    l1 = make(on_evict=gone.extend)
    space = l1.space(b"s" * 16, 0, ALIGN)
    keys = names(4 * PAGES)
    for at in range(0, len(keys), batch):
        assert put(l1, space, keys[at : at + batch]) == 0
        clock.now += 1e-4
    kept = [k for k in keys if k in space.objects]
    # the newest, whole prompts of them from their heads on, and nearly as many as there is room for
    assert len(kept) >= PAGES - batch - PAGES // MOST_AHEAD
    oldest = len(keys) - PAGES
    assert all(k in space.objects for k in keys[oldest + batch + PAGES // MOST_AHEAD :])
    assert len(gone) + len(kept) == len(keys), "what is not resident was evicted, nothing was lost otherwise"


def test_what_is_used_outlives_a_burst(make: Make, clock: Clock) -> None:
    l1 = make()
    space = l1.space(b"s" * 16, 0, ALIGN)
    used, keys = names(PAGES // 4, 1), names(4 * PAGES)
    assert put(l1, space, used) == 0
    for at in range(0, len(keys), 16):
        assert put(l1, space, keys[at : at + 16]) == 0
        l1.end_read(read(l1, space, used))
    assert all(k in space.objects for k in used)


def test_a_burst_is_refused_nothing_while_anything_is_not_leased(make: Make, clock: Clock) -> None:
    l1 = make()
    space = l1.space(b"s" * 16, 0, ALIGN)
    held = names(PAGES - 3, 1)
    put(l1, space, held)
    lease = read(l1, space, held)
    for key in names(4 * PAGES):
        assert put(l1, space, [key]) == 0
    assert put(l1, space, names(4, 2)) == 1  # three pages are not leased
    l1.end_read(lease)
    assert put(l1, space, names(64, 3)) == 0


def test_mixed_sizes_are_refused_only_where_no_hole_can_be_made(make: Make, clock: Clock) -> None:
    """Fragments: leased objects of one page lie about; as long as what is not leased makes a hole, it is made."""
    rng = random.Random(5)
    refused = made = 0
    for _ in range(40):
        l1 = make(64)
        spaces = {n: l1.space(bytes([n]) * 16, 0, n * ALIGN) for n in (1, 2, 5)}
        leases: list[ReadLease] = []
        for i in range(200):
            n = rng.choice([1, 1, 2, 5])
            leased = [o for lease in leases for o in lease.objects]
            taken = {p for o in leased for p in range(o.slot // ALIGN, o.slot // ALIGN + o.space.nbytes // ALIGN)}
            hole = any(not taken & set(range(at, at + n)) for at in range(64 - n + 1))
            before = sum(len(s.objects) for s in spaces.values())
            no_room = put(l1, spaces[n], names(1, i))
            assert no_room == (not hole)
            refused, made = refused + no_room, made + 1 - no_room
            if no_room:
                after = sum(len(s.objects) for s in spaces.values())
                assert before - after <= 5, "evicted all the others for a hole that cannot be"
            elif rng.random() < 0.3:
                leases.append(read(l1, spaces[n], names(1, i)))
            if leases and rng.random() < 0.15:
                l1.end_read(leases.pop(rng.randrange(len(leases))))
    assert refused > 50
    assert made > 1000


def test_mixed_sizes_leave_little_room_unused(make: Make, clock: Clock) -> None:
    rng = random.Random(6)
    l1 = make()
    spaces = [l1.space(bytes([n]) * 16, 0, n * ALIGN) for n in (1, 3, 8)]
    free = []
    for i in range(2000):
        assert put(l1, rng.choice(spaces), names(rng.randint(1, 6), i)) == 0
        if i > 200:
            free.append(l1.free_bytes / l1.arena.size)
    assert sum(free) / len(free) < 0.25


# -- how much is freed at once -----------------------------------------------------------------------------------------


def test_room_is_made_for_what_the_rate_asks_for(make: Make, clock: Clock) -> None:
    l1 = make(4096)
    space = l1.space(b"s" * 16, 0, ALIGN)
    put(l1, space, names(4096))
    put(l1, space, names(8, 1))

    def free_after(seconds_between: float, seed: int) -> list[int]:
        free = []
        for i in range(40):
            clock.now += seconds_between
            assert put(l1, space, names(1, seed + i)) == 0
            free.append(l1.free_bytes // ALIGN)
        return free

    assert max(free_after(1.0, 1000)) == 0  # slow: one goes for each that comes, all the rest stays
    fast = free_after(0.001, 2000)  # 1,000 pages a second: a tenth of a second's worth at a time
    assert 0.5 * 1000 * AHEAD_S <= max(fast) <= 1000 * AHEAD_S
    assert sum(b > a for a, b in pairwise(fast)) <= 2, "evicted in few batches"
    burst = free_after(1e-6, 3000)
    assert max(burst) <= 4096 // MOST_AHEAD
    assert max(free_after(1.0, 4000)[-5:]) == 0  # and back, at the first call that needs room


# -- pins --------------------------------------------------------------------------------------------------------------


def test_a_pin_keeps_until_its_time_is_over(make: Make, clock: Clock) -> None:
    l1 = make()
    space = l1.space(b"s" * 16, 0, ALIGN)
    keys = names(8, 1)
    put(l1, space, keys)
    assert [l1.pin(space, keys, s) for s in (0.0, -5.0, float("nan"), float("inf"))] == [0] * 4
    assert l1.pin(space, [*keys, *names(1, 9)], 10) == l1.usage()["pinned"] == 8
    for i in range(4):
        assert put(l1, space, names(PAGES - 8, i + 10)) == 0
    assert all(k in space.objects for k in keys)
    clock.now += 9
    l1.reap()
    assert l1.pin(space, keys[:4], 10) == 4  # longer
    clock.now += 2
    l1.reap()
    put(l1, space, names(PAGES, 20))
    assert [k in space.objects for k in keys] == [True] * 4 + [False] * 4
    assert l1.pin(space, keys[:1], 1) == 1  # shorter
    clock.now += 2
    l1.reap()
    assert l1.usage()["pinned"] == 3
    assert l1.unpin(space, keys) == 3
    assert l1.unpin(space, keys) == l1.usage()["pinned"] == 0
    put(l1, space, names(PAGES, 21))
    assert not any(k in space.objects for k in keys)


def test_pins_hold_at_most_half_and_clear_ends_them(make: Make, clock: Clock) -> None:
    l1 = make()
    space = l1.space(b"s" * 16, 0, ALIGN)
    put(l1, space, names(PAGES))
    assert l1.pin(space, names(PAGES), 1e6) == PAGES // 2
    assert l1.pin(space, names(PAGES)[PAGES // 2 :], 1e6) == 0
    lease = read(l1, space, names(3))
    assert l1.clear(space.namespace) == PAGES
    assert (l1.usage()["objects"], l1.free_bytes) == (0, (PAGES - 3) * ALIGN)
    l1.end_read(lease)
    assert l1.free_bytes == PAGES * ALIGN


def test_pins_of_a_tenant_hold_at_most_half_of_its_share(make: Make, clock: Clock) -> None:
    l1 = make(division=Division({"a": 64 * ALIGN}, None, lru))
    space = l1.space(b"s" * 16, 0, ALIGN, "a")
    put(l1, space, names(60))
    assert l1.pin(space, names(60), 10) == 32
    assert l1.tenants()["a"].pinned == 32 * ALIGN
    clock.now += 11
    l1.reap()
    assert l1.tenants()["a"].pinned == 0


# -- time to live ------------------------------------------------------------------------------------------------------


def test_what_is_older_than_its_ttl_is_a_miss_at_once(make: Make, clock: Clock) -> None:
    l1 = make(ttl_s=30)
    space = l1.space(b"s" * 16, 0, ALIGN)
    put(l1, space, names(4))
    clock.now += 20
    put(l1, space, names(4, 1))
    l1.end_read(read(l1, space, names(4)))  # use does not make it younger
    clock.now += 11
    assert l1.reserve_read(space, names(4)).objects == []
    assert l1.reserve_each(space, names(4))[1] == [None] * 4
    l1.end_read(read(l1, space, names(4, 1)))
    assert l1.free_bytes == (PAGES - 4) * ALIGN
    assert put(l1, space, names(4)) == 0  # and can be stored anew
    l1.end_read(read(l1, space, names(4)))
    assert l1.take_expired() == 4


def test_the_reaper_deletes_what_nobody_asks_for(make: Make, clock: Clock) -> None:
    l1 = make(ttl_s=30)
    space = l1.space(b"s" * 16, 0, ALIGN)
    put(l1, space, names(100))
    clock.now += 31
    l1.reap()
    assert l1.free_bytes == PAGES * ALIGN
    assert l1._aging is not None
    assert not l1._aging._ends


def test_a_reader_keeps_the_slot_of_what_nobody_finds_any_more(make: Make, clock: Clock) -> None:
    l1 = make(ttl_s=30)
    l1.watched = True
    space = l1.space(b"s" * 16, 0, ALIGN)
    put(l1, space, names(2))
    lease = read(l1, space, names(2))
    old = list(lease.objects)
    l1.view(old[0])[:] = b"o" * ALIGN
    clock.now += 31
    l1.reap()
    assert l1.reserve_read(space, names(2)).objects == []
    assert put(l1, space, names(2)) == 0  # another copy, in other slots
    l1.view(space.objects[names(2)[0]])[:] = b"n" * ALIGN
    assert l1.view(old[0]) == b"o" * ALIGN
    l1.keep(lease)  # too late: it does not come back
    l1.end_read(lease)
    assert l1.free_bytes == (PAGES - 2) * ALIGN
    l1.end_read(read(l1, space, names(2)))
    assert l1.view(space.objects[names(2)[0]]) == b"n" * ALIGN
    assert [(reason, len(objects)) for reason, objects in l1.take_gone()] == [("expired", 2)]


def test_a_pin_ends_with_its_objects_time(make: Make, clock: Clock) -> None:
    l1 = make(ttl_s=30)
    space = l1.space(b"s" * 16, 0, ALIGN)
    put(l1, space, names(PAGES))
    assert l1.pin(space, names(PAGES), 1e6) == PAGES // 2
    lease = read(l1, space, names(3))
    clock.now += 31
    l1.reap()
    assert (l1.free_bytes, l1.usage()["pinned"]) == ((PAGES - 3) * ALIGN, 0)
    l1.end_read(lease)
    assert l1.free_bytes == PAGES * ALIGN
    put(l1, space, names(8))
    assert l1.pin(space, names(8), 1e6) == 8


def test_what_is_given_up_and_used_after_all_grows_no_younger(make: Make, clock: Clock) -> None:
    l1 = make(ttl_s=30)
    space = l1.space(b"s" * 16, 0, ALIGN)
    put(l1, space, names(4))
    clock.now += 10
    put(l1, space, names(4, 1))
    for lease in l1.give_up(4 * ALIGN):
        assert [o.chunk_hash for o in lease.objects[::-1]] == names(4)
        l1.keep(lease)
        l1.end_read(lease)
    clock.now += 21
    assert l1.reserve_read(space, names(4)).objects == []
    l1.end_read(read(l1, space, names(4, 1)))
    clock.now += 10
    assert l1.reserve_read(space, names(4, 1)).objects == []


def test_ages_are_forgotten_with_their_objects(make: Make, clock: Clock) -> None:
    l1 = make(ttl_s=1e6)
    space = l1.space(b"s" * 16, 0, ALIGN)
    for i in range(20):
        put(l1, space, names(PAGES, i))
    assert l1._aging is not None
    assert len(l1._aging._ends) == len(space.objects)
