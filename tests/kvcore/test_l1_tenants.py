"""Tenants in L1: a state machine beside plain books, and what each right means."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from l1_tenants_model import PAGES, MixedSizesMachine, TenantsMachine

from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.l1 import L1, Arena, ObjectSpace
from kvcore.l1.allocator import ALIGN
from kvcore.l1.pools import Pool
from kvcore.l1.spaces import L1Object
from kvcore.tenants import Division
from kvcore.tenants.shares import IDLE_S

TenantsMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, derandomize=True, deadline=None)
MixedSizesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, derandomize=True, deadline=None)
TestTenants = TenantsMachine.TestCase
TestMixedSizes = MixedSizesMachine.TestCase


def lru() -> LruPolicy:
    return LruPolicy(None, None)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(PAGES * ALIGN)
    yield arena
    arena.close()


def names(count: int, seed: int = 0) -> list[bytes]:
    return [b"%08d%08d" % (seed, i) for i in range(count)]


def put(l1: L1, space: ObjectSpace, hashes: list[bytes]) -> int:
    lease, _, no_room = l1.reserve_write(space, hashes)
    l1.finish_write(lease)
    return no_room


def test_what_is_given_up_ahead_of_need_is_borrowed(arena: Arena) -> None:
    """`write: evicted`: what is kept free is nobody's share, so there is always somebody who has borrowed it."""
    l1 = L1(arena, lru(), division=Division({"a": 16 * ALIGN, "b": 16 * ALIGN}, None, lru, spare=4 * ALIGN))
    a, b = (l1.space(t * 16, 0, ALIGN, t.decode()) for t in (b"a", b"b"))
    assert l1.tenants()["a"].share == 14 * ALIGN
    put(l1, a, names(8))
    for i in range(6):
        put(l1, b, names(4, i))
    assert l1.free_bytes == 0
    leases = l1.give_up(4 * ALIGN)
    assert [o.space for lease in leases for o in lease.objects] == [b] * 4
    for lease in leases:
        l1.end_read(lease)
    assert (len(a.objects), len(b.objects)) == (8, 20)
    leases = l1.give_up(PAGES * ALIGN, everything=True)
    for lease in leases:
        l1.end_read(lease)
    assert l1.free_bytes == PAGES * ALIGN
    assert {u.pinned for u in l1.tenants().values()} == {0}


def test_nobody_gives_up_more_than_was_borrowed_however_long_it_takes_to_be_written(arena: Arena) -> None:
    l1 = L1(arena, lru(), division=Division({"a": 8 * ALIGN, "b": 8 * ALIGN}, None, lru, spare=4 * ALIGN))
    a, b = (l1.space(t * 16, 0, ALIGN, t.decode()) for t in (b"a", b"b"))
    for i in range(4):
        put(l1, a, names(4, i))
        put(l1, b, names(4, i))
    leases = [lease for _ in range(6) for lease in l1.give_up(4 * ALIGN)]
    assert [sum(len(x.objects) for x in leases if x.objects[0].space is s) for s in (a, b)] == [8, 8]
    l1.keep(leases[0])  # somebody used it: it is still what was borrowed
    count = len(leases[0].objects)
    assert sum(len(lease.objects) for lease in l1.give_up(PAGES * ALIGN)) == count
    for lease in leases:
        l1.end_read(lease)


def test_the_idle_give_first_and_the_named_never(arena: Arena) -> None:
    now = [1000.0]
    l1 = L1(arena, lru(), division=Division({"a": 8 * ALIGN}, None, lru), clock=lambda: now[0])
    spaces = {t: l1.space(t.encode().ljust(16), 0, ALIGN, t) for t in ("a", "u", "v", "w")}
    for tenant in ("a", "u", "v"):
        put(l1, spaces[tenant], names(8))
    now[0] += IDLE_S / 2
    l1.end_read(l1.reserve_read(spaces["u"], names(1)))
    put(l1, spaces["w"], names(8))
    assert l1.free_bytes == 0
    now[0] += IDLE_S / 2 + 1  # v has not been seen for a minute
    assert put(l1, spaces["w"], names(4, 1)) == 0
    assert {t: len(s.objects) for t, s in spaces.items()} == {"a": 8, "u": 8, "v": 4, "w": 12}
    now[0] += 10 * IDLE_S
    for i in range(8):
        assert put(l1, spaces["w"], names(4, 2 + i)) == 0
    assert {t: len(s.objects) for t, s in spaces.items()} == {"a": 8, "u": 0, "v": 0, "w": 24}


def test_many_tenants_without_a_name_can_all_work(arena: Arena) -> None:
    """In the end the share of each is less than an object, and it still stores and reads one."""
    l1 = L1(arena, lru(), division=Division({"a": 8 * ALIGN}, None, lru))
    a = l1.space(b"a" * 16, 0, ALIGN, "a")
    put(l1, a, names(8))
    for i in range(1000):
        space = l1.space(b"%016d" % i, 0, ALIGN, f"salt {i}")
        assert put(l1, space, names(3, i)) <= (0 if i < 8 else 2)
        lease = l1.reserve_read(space, names(3, i))
        assert len(lease.objects) >= (3 if i < 8 else 1)
        l1.end_read(lease)
    assert len(a.objects) == 8


@pytest.mark.parametrize("division", [None, Division({"a": 8 * ALIGN}, None, lru)])
def test_spaces_that_nobody_holds_are_forgotten(arena: Arena, division: Division | None) -> None:
    l1 = L1(arena, lru(), division=division)
    kept = l1.space(b"k" * 16, 0, ALIGN, "k")
    dead = l1.space(b"d" * 16, 0, ALIGN, "d")
    late = l1.reserve_write(dead, names(1))[0]
    l1.disown(late)
    most = 0
    for i in range(5000):
        space = l1.space(b"%016d" % i, 0, ALIGN, f"salt {i}")
        if i % 10 == 0:
            put(l1, space, names(1))
        l1.forget(lambda s: s is kept)
        most = max(most, len(l1._spaces))
        assert (space.namespace, 0) in l1._spaces or not space.objects
    assert most <= 2 * (PAGES + 64 + 2)
    assert l1.space(b"k" * 16, 0, ALIGN, "k") is kept
    assert l1.space(b"d" * 16, 0, ALIGN, "d") is dead, "its slot is still being written"
    l1.finish_write(late)
    l1._few_spaces = 0
    for s in list(l1._spaces.values()):
        l1.clear(s.namespace)
    l1.forget(lambda s: s is kept)
    assert list(l1._spaces.values()) == [kept]
    assert put(l1, space, names(1)) == 1, "who comes late finds no room"
    assert l1.free_bytes == PAGES * ALIGN
    if division is not None:
        assert set(l1.tenants()) == {"a", "k"}


def test_what_is_on_record_of_a_tenant_that_is_forgotten_keeps_nothing_else_of_it(arena: Arena) -> None:
    """The record of what became of objects has them as they are, long after all else of their tenants has gone."""
    record: list[L1Object] = []
    l1 = L1(arena, lru(), division=Division({}, None, lru), on_left=lambda what, reason, left: record.extend(left))
    before = of_type(LruPolicy), of_type(Pool)  # held, so that those of other tests do not go meanwhile
    for i in range(1000):
        space = l1.space(b"%016d" % i, 0, ALIGN, f"salt {i}")
        put(l1, space, names(1, i))
        l1.clear(space.namespace)
    l1._few_spaces = 0
    assert len(l1.forget(lambda s: False)) == 1000
    assert [o.key.namespace for o in record] == [b"%016d" % i for i in range(1000)]
    assert (len(of_type(LruPolicy)), len(of_type(Pool))) == (len(before[0]), len(before[1]))
    assert put(l1, space, names(1)) == 1, "who comes late finds no room"
    assert l1.reserve_each(space, names(1))[1] == [None]
    assert l1.tenants() == {}
    assert l1.others().pinned == 0
    assert l1.free_bytes == PAGES * ALIGN


def of_type(kind: type) -> list[Any]:
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is kind]
