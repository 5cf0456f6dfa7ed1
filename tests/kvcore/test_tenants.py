"""Tenants from outside: quotas in L1 and the tiers, turns, what is forgotten, and what one can do to another."""

import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from test_engine import FULL, contents, hashes, opened, put, spec

from kvcore.api import ConfigError, Entry, Failed, ObjectKey, Stored
from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.builtin.memory import MemoryStorage
from kvcore.builtin.memory_config import MemoryConfig
from kvcore.control.waiting import Waiting
from kvcore.engine import CacheEngine, Space
from kvcore.l2 import HEADER_BYTES, Capacity
from kvcore.l2.turns import Turns
from kvcore.service import open_store
from kvcore.tenants import Account, Division, Shares

OBJECT = 128 << 10
STORED = OBJECT + HEADER_BYTES
Make = Callable[[str], CacheEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def open_(text: str) -> CacheEngine:
            engine = opened(tmp_path, text)
            stack.callback(engine.close)
            return engine

        yield open_


def register(engine: CacheEngine, tenant: str) -> Space:
    return engine.register(spec(), tenant)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def held(engine: CacheEngine, space: Space, tier: int = 0) -> int:
    """Objects of `space` in a tier."""
    return sum(k.namespace == space.namespace for k in list(engine.manager.tiers[tier].storage._objects))


# -- L1 ----------------------------------------------------------------------------------------------------------------


def test_a_burst_evicts_its_own_and_nobody_sees_anothers(make: Make) -> None:
    engine = make("l2: []\ntenants: {alice: {l1: 2MiB}, bob: {l1: 2MiB}}\n")
    alice, bob, nobody = (register(engine, t) for t in ("alice", "bob", ""))
    assert len({alice.namespace, bob.namespace, nobody.namespace}) == 3
    put(engine, alice, hashes(12))
    for i in range(16):  # four times the size of L1
        put(engine, bob, hashes(16, str(i)))
    assert contents(engine, alice, hashes(12)) == list(range(1, 13))
    assert contents(engine, bob, hashes(12)) == contents(engine, nobody, hashes(12)) == []
    usage = engine.tenants()
    assert usage["alice"]["l1"]._replace(pinned=0) == (12 * OBJECT, 0, 2 << 20, 2 << 20)
    assert usage["bob"]["l1"].used + usage["alice"]["l1"].used <= 8 << 20
    put(engine, nobody, hashes(32, "n"))  # what bob has borrowed comes back to whose it is
    assert contents(engine, nobody, hashes(32, "n")) == list(range(1, 33))
    assert contents(engine, alice, hashes(12)) == list(range(1, 13))
    assert engine.tenants()["bob"]["l1"].used >= 2 << 20


def test_whose_a_namespace_is_is_known_as_long_as_one_of_its_groups_holds_something(make: Make) -> None:
    engine = make("l2: []\ntenants: {alice: {l1: 2MiB}}\n")
    space = engine.register(spec(FULL, FULL), "alice")
    tenancy, first, second = engine.manager.tenancy, *(engine.object_space(space, group) for group in (0, 1))
    for each in (first, second):
        lease, _, _ = engine.l1.reserve_write(each, hashes(2))
        engine.l1.finish_write(lease)
    tenancy.held = lambda namespace: False  # its engine has gone
    for emptied, known in ((first, "alice"), (second, "")):
        assert engine.l1.delete(emptied, hashes(2)) == 2
        engine.l1._few_spaces = 0
        tenancy.forget()
        assert tenancy.tenant(space.namespace) == known
    assert tenancy.bound() == {}


def test_who_reserves_without_end_starves_itself_only(make: Make) -> None:
    engine = make("l2: []\ntenants: {alice: {l1: 2MiB}, bob: {l1: 2MiB}}\n")
    alice, bob = register(engine, "alice"), register(engine, "bob")
    copies = [engine.reserve(bob, hashes(8, str(i)), 0, 8, [list(range(8))]).copies for i in range(20)]
    assert sum(map(len, copies)) == 16  # its share
    put(engine, alice, hashes(16))
    assert contents(engine, alice, hashes(16)) == list(range(1, 17))


def test_lookups_without_end_lease_a_share_and_no_more(make: Make) -> None:
    engine = make("l2: []\ntenants: {alice: {l1: 2MiB}, bob: {l1: 2MiB}}\n")
    alice, bob = register(engine, "alice"), register(engine, "bob")
    for i in range(6):
        put(engine, bob, hashes(8, str(i)))
    lookups = [engine.lookup(bob, hashes(8, str(i))) for i in range(6)]
    assert [lookup.poll() for lookup in lookups] == [8, 8, 0, 0, 0, 0]
    again = engine.lookup(bob, hashes(8, "0"))  # what is leased already costs nothing
    assert again.poll() == 8
    put(engine, alice, hashes(16))
    assert contents(engine, alice, hashes(16)) == list(range(1, 17))
    for lookup in [*lookups, again]:
        engine.release(lookup)
    assert engine.tenants()["bob"]["l1"].pinned == 0


def test_quotas_change_while_it_serves(make: Make) -> None:
    engine = make("l2: [{storage: memory, capacity: 4MiB}]\ntenants: {alice: {l1: 2MiB}, default: {memory: 1MiB}}\n")
    alice = register(engine, "alice")
    engine.set_quota("bob", "l1", 6 << 20)
    engine.set_quota("default", "memory", 2 << 20)
    engine.set_quota("alice", "memory", 3 << 20)
    until(lambda: "memory" in engine.tenants()["alice"])
    assert engine.tenants()["bob"]["l1"][2:] == (6 << 20, 6 << 20)
    assert engine.tenants()["alice"]["memory"].quota == 3 << 20
    engine.set_quota("alice", "l1", None)
    assert engine.tenants()["alice"]["l1"].quota == 2 << 20  # what bob leaves
    for tenant, place, nbytes, text in [
        ("alice", "l3", 1, "no place 'l3': the places are l1, memory"),
        ("alice", "l1", 9 << 20, "does not fit l1, which has 8 MiB"),
        ("alice", "memory", 5 << 20, "does not fit memory"),
        ("alice", "l1", -1, "does not fit"),
    ]:
        with pytest.raises(ConfigError, match=text):
            engine.set_quota(tenant, place, nbytes)
    assert engine.clear(alice) == 0


def test_without_quotas_there_is_nothing_to_set(make: Make) -> None:
    engine = make("l2: [{storage: memory}]\n")
    assert engine.tenants() == {}
    for place in ("l1", "memory"):
        with pytest.raises(ConfigError, match=f"{place} is not divided among tenants: give at least one"):
            engine.set_quota("alice", place, 1 << 20)


def test_a_quota_larger_than_an_automatic_l1_is_scaled(make: Make) -> None:
    engine = make("l2: []\ntenants: {alice: {l1: 8MiB}, bob: {l1: 8MiB}}\n")
    alice, bob = register(engine, "alice"), register(engine, "bob")
    for i in range(8):
        put(engine, alice, hashes(16, str(i)))
    put(engine, bob, hashes(32))
    assert contents(engine, bob, hashes(32)) == list(range(1, 33))
    assert engine.tenants()["alice"]["l1"].share == 4 << 20


def test_pins_keep_what_a_burst_would_evict(make: Make) -> None:
    engine = make("l2: []\n")
    space = register(engine, "")
    put(engine, space, hashes(8))
    assert engine.pin(space, hashes(9), 60) == 8
    for i in range(10):
        put(engine, space, hashes(16, str(i)))
    assert contents(engine, space, hashes(8)) == list(range(1, 9))
    assert engine.unpin(space, hashes(8)) == 8
    for i in range(10):
        put(engine, space, hashes(16, f"again {i}"))
    assert contents(engine, space, hashes(8)) == []


def test_invented_tenants_leave_nothing_behind_and_no_metrics(make: Make) -> None:
    engine = make(f"l2: [{{storage: memory, capacity: {8 << 20}B}}]\ntenants: {{alice: {{l1: 2MiB, memory: 2MiB}}}}\n")
    alice = register(engine, "alice")
    for n in (8, 16):
        put(engine, alice, hashes(n))
        engine.drain()

    def sizes() -> list[int]:
        l1, account = engine.l1, engine.manager.tiers[0].capacity
        assert l1._shares is not None
        assert account is not None
        assert account._shares is not None
        return [
            len(l1._spaces),
            len(l1._shares.accounts),
            len(engine._object_spaces),
            len(engine.manager.layouts),
            len(engine.registered),
            len(engine.manager.tenancy._tenants),
            len(account._held),
            len(account._shares.accounts),
        ]

    for i in range(4000):
        space = register(engine, f"salt {i}")
        if i % 8 == 0:
            put(engine, space, hashes(1, str(i)))
        else:
            engine.lookup(space, hashes(2)).poll()
    engine.drain()
    del space
    gc.collect()
    # what is in L1 or the tier (64 objects each) has a tenant; all else has gone, or goes with the next hundreds
    until(lambda: max(sizes()) <= 64 + 64 + 2 * 130)
    assert contents(engine, alice, hashes(16)) == list(range(1, 17))
    assert held(engine, alice) >= 15, "its share of two MiB holds 15 with their headers"
    until(lambda: 'kvcore_tenant_bytes{tenant="other",place="memory"}' in engine.stats())
    series = [name for name in engine.stats() if "tenant=" in name]
    assert {name.split('tenant="')[1].split('"')[0] for name in series} == {"alice", "other"}
    assert engine.stats()['kvcore_tenant_bytes{tenant="alice",place="l1"}'] == 2 << 20


def test_who_asks_may_grow_while_others_give() -> None:
    shares = Shares(1000, {}, None, Account)
    big, small = shares.account("big"), shares.account("small")
    shares.add(big, 600)
    shares.add(small, 300)
    given = []
    for donor, most in shares.donors(small):
        given.append((donor.tenant, most))
        if donor is big:
            shares.add(big, -most)
            shares.add(small, 250)
    assert given == [("big", 100), ("small", 550)]


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_a_burst_leaves_anothers_objects_in_the_tier(make: Make) -> None:
    engine = make("l2: [{storage: memory, capacity: 8MiB}]\ntenants: {alice: {memory: 4MiB}, bob: {memory: 3MiB}}\n")
    alice, bob = register(engine, "alice"), register(engine, "bob")
    for n in (12, 24):
        put(engine, alice, hashes(n))
        engine.drain()
    for i in range(20):
        put(engine, bob, hashes(16, str(i)))
        engine.drain()
    assert held(engine, alice) == 24
    assert held(engine, alice) + held(engine, bob) == (8 << 20) // STORED  # nobody else needs the rest
    engine.clear(alice)
    assert contents(engine, alice, hashes(24)) == list(range(1, 25))
    for n in (28, 31):  # and takes back what is its share
        put(engine, alice, hashes(n))
        engine.drain()
    assert held(engine, alice) == (4 << 20) // STORED


def test_a_quota_on_a_storage_with_a_capacity_of_its_own_is_the_most(make: Make) -> None:
    engine = make("l2: [{storage: {plugin: memory, capacity: 8MiB}}]\ntenants: {default: {memory: 2MiB}}\n")
    spaces = [register(engine, t) for t in ("", "a", "b")]
    for i in range(6):
        for space in spaces:
            put(engine, space, hashes(8, str(i)))
        engine.drain()
    assert [held(engine, space) for space in spaces] == [(2 << 20) // STORED] * 3
    assert {u["memory"].used for u in engine.tenants().values()} == {(2 << 20) // STORED * STORED}


def account(limit: int | None = 1000, **kwargs: Any) -> Capacity:
    return Capacity(limit, LruPolicy(None, None), **kwargs)


def divided(**quotas: int) -> Division:
    default = quotas.pop("default", None)
    return Division(quotas, default, lambda: LruPolicy(None, None))


def keys(namespace: str, count: int) -> list[ObjectKey]:
    return [ObjectKey(namespace.encode().ljust(16), bytes([i]) * 32, 0) for i in range(count)]


def namespace(name: str) -> bytes:
    return name.encode().ljust(16)


def test_after_a_restart_objects_wait_for_their_tenants() -> None:
    tier = account(division=divided(a=500, b=300))
    tier.add(Entry(k, 100) for name in "ab" for k in keys(name, 5))
    assert {u.used for u in tier.tenants().values()} == {0}
    tier.bind(namespace("a"), "a")
    assert tier.tenants()["a"].used == 500
    # a is within its share; b has not registered, and its objects are nobody's
    assert {k.namespace for k in tier.victims(namespace("c"), 200)} == {namespace("b")}
    tier.bind(namespace("b"), "b")
    assert tier.tenants()["b"].used == 500
    tier.bind(namespace("c"), "c")
    assert tier.victims(namespace("c"), 100) == keys("b", 1)  # over its share of 300
    tier.remove(keys("a", 5))
    tier.unbind(namespace("a"))
    tier.bind(namespace("a"), "a")
    assert tier.tenants()["a"].used == 0
    assert tier.used == 500


def test_no_sequence_takes_a_tiers_share_from_another() -> None:
    """Random stores of three tenants: who is within its share loses nothing, and is refused nothing it covers."""
    rng = random.Random(3)
    shares = {"a": 400, "b": 200, "c": 0}
    tier = account(division=divided(a=400, b=200, default=300))
    sizes: dict[ObjectKey, int] = {}
    for name in shares:
        tier.bind(namespace(name), name)
    for _ in range(4000):
        asking = rng.choice("abc")
        nbytes = rng.choice([20, 40, 60])
        used = {name: tier.tenants()[name].used for name in shares}
        gone: list[ObjectKey] = []
        refused = False
        while tier.missing(namespace(asking), nbytes) > 0:
            victims = tier.victims(namespace(asking), nbytes)
            if not victims:
                refused = True
                break
            tier.remove(victims)
            gone += victims
        assert not refused
        for loser in {k.namespace.decode().strip() for k in gone} - {asking}:
            assert used[loser] > shares[loser], "lost an object while within its share"
            assert tier.tenants()[loser].used > shares[loser] - 60
        key = ObjectKey(namespace(asking), rng.randbytes(32), 0)
        tier.expect(namespace(asking), nbytes)
        tier.add([Entry(key, nbytes)], stored=True)
        tier.expect(namespace(asking), -nbytes)
        sizes[key] = nbytes
        assert tier.used <= 1000
        assert tier.used == sum(u.used for u in tier.tenants().values())
        if rng.random() < 0.1:
            tier.remove(rng.sample(sorted(sizes), min(5, len(sizes))))
    assert tier.tenants()["a"].used >= 300


def test_ttl_in_a_tier(make: Make) -> None:
    engine = make("l2: [{storage: memory, ttl: 1h}]\n")
    tier = engine.manager.tiers[0]
    assert tier.capacity is not None
    space = register(engine, "")
    put(engine, space, hashes(8))
    engine.drain()
    engine.clear(space)
    assert contents(engine, space, hashes(8)) == list(range(1, 9))
    engine.clear(space)
    now = time.time()
    tier.capacity._clock = lambda: now + 3601
    lookup = engine.lookup(space, hashes(8))
    assert lookup.wait(10)
    assert lookup.poll() == 0
    until(lambda: held(engine, space) == 0)  # the reaper
    until(lambda: engine.stats().get('kvcore_expired_objects_total{place="memory"}') == 8)
    put(engine, space, hashes(8))
    engine.drain()
    engine.clear(space)
    assert contents(engine, space, hashes(8)) == list(range(1, 9))


def test_ttl_without_l1(tmp_path: Path) -> None:
    path = tmp_path / "kvcore.yaml"
    path.write_text("l2: [{storage: memory, ttl: 1s}]\n")
    store = open_store(str(path))
    space = store.register(spec(), "test/1")
    assert store.store(space, hashes(1), [[memoryview(bytearray(space.layouts[0].nbytes))]]) == [True]
    assert store.exists(space, hashes(1)) == [True]
    until(lambda: not store.manager.tiers[0].storage._objects)
    assert store.exists(space, hashes(1)) == [False]
    store.close()


def test_ages_in_a_tier_survive_a_listing() -> None:
    now = 1000.0
    tier = account(None, ttl_s=100.0, clock=lambda: now)
    old, fresh, unknown = keys("a", 3)
    tier.add([Entry(old, 10, 850.0), Entry(fresh, 10, 950.0), Entry(unknown, 10)])
    assert tier.due(10) == [old]
    assert [tier.expired(k) for k in (old, fresh, unknown)] == [True, False, False]
    now = 1060.0
    assert set(tier.due(10)) == {old, fresh}
    tier.add([Entry(fresh, 10)], stored=True)  # written anew
    assert tier.due(10) == [old]
    tier.remove([old])
    assert tier.due(10) == []
    now = 1200.0
    assert set(tier.due(1)) < {fresh, unknown}
    assert set(tier.due(10)) == {fresh, unknown}


def test_what_leaves_before_its_time_leaves_nothing_of_its_age() -> None:
    now = 1000.0
    tier = account(None, ttl_s=86400.0, clock=lambda: now)
    kept = keys("kept", 10)
    tier.add([Entry(k, 10) for k in kept], stored=True)
    for i in range(100):
        some = keys(str(i), 100)
        tier.add([Entry(k, 10) for k in some], stored=True)
        tier.remove(some)
    assert len(tier._ends) == 10
    assert len(tier._next_ends) < 2000
    now += 86400.0
    assert set(tier.due(100)) == set(kept)


def test_what_idle_tenants_give_up_is_written_first(make: Make) -> None:
    engine = make("l2: [{storage: memory, write: evicted}]\ntenants: {alice: {l1: 2MiB}, default: {l1: 1MiB}}\n")
    alice, idle, busy = (register(engine, t) for t in ("alice", "idle", "busy"))
    put(engine, alice, hashes(12))
    for n in (8, 16, 20):
        put(engine, idle, hashes(n))
    shares = engine.l1._shares
    assert shares is not None
    real = shares._clock
    shares._clock = lambda: real() + 100
    for i in range(10):
        put(engine, busy, hashes(6, str(i)))
        engine.drain()
        until(lambda: engine.manager.spill._short() <= 0)
    assert contents(engine, alice, hashes(12)) == list(range(1, 13))
    assert held(engine, alice) == 0
    assert held(engine, idle) == 20, "given up, and not lost"
    assert contents(engine, idle, hashes(20)) == list(range(1, 9))  # its share: what it can lease at once
    assert contents(engine, busy, hashes(6, "0")) == list(range(1, 7))


# -- turns -------------------------------------------------------------------------------------------------------------


def test_those_who_wait_come_in_turns() -> None:
    async def main() -> list[str]:
        turns, order = Turns(1), list[str]()

        async def call(who: str) -> None:
            async with turns.turn(who):
                order.append(who)
                await asyncio.sleep(0)

        calls = [asyncio.create_task(call("a")) for _ in range(100)]
        await asyncio.sleep(0)
        calls += [asyncio.create_task(call(who)) for who in "bbc"]
        await asyncio.gather(*calls)
        return order

    order = asyncio.run(main())
    assert len(order) == 103
    assert max(i for i, who in enumerate(order) if who != "a") <= 6


def test_a_turn_that_is_given_up_is_the_next_ones() -> None:
    async def main() -> None:
        turns = Turns(2)

        async def hold(seconds: float) -> None:
            async with turns.turn("x"):
                await asyncio.sleep(seconds)

        for round_ in range(50):
            tasks = [asyncio.create_task(hold(0.0 if i % 2 else 60)) for i in range(6)]
            for _ in range(round_ % 5):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(asyncio.gather(*(hold(0) for _ in range(4))), 5)
        assert turns._free == 2
        assert not turns._waiting

    asyncio.run(main())


def test_a_full_queue_has_room_for_the_next_tenant() -> None:
    queue: Waiting[str] = Waiting(1000, divided=True)
    taken = 0
    while queue.room("a", 10**9) >= 10:
        queue.put("a", f"a{taken}")
        queue.account("a", 10)
        taken += 1
    assert taken * 10 <= 500
    assert queue.room("b", 10**9) >= 200
    for i in range(3):
        queue.put("b", f"b{i}")
        queue.account("b", 10)
    assert [queue.take() for _ in range(6)] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert queue.room("a", 100) < 0  # no more than it may in all
    assert Waiting[str](1000, divided=False).room("a", 5) == 1000


def test_a_burst_of_stores_delays_no_other_tenant(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make("l2: [{storage: memory, queue_size: 4MiB}]\ntenants: {default: {l1: 4MiB}}\n")
    storage = engine.manager.tiers[0].storage
    real, order = storage.store, list[bytes]()
    noisy, quiet = register(engine, "noisy"), register(engine, "quiet")

    def store(items: Any) -> Any:
        time.sleep(0.02)
        order.extend(i.key.namespace for i in items)
        return real(items)

    monkeypatch.setattr(storage, "store", store)
    for i in range(20):
        put(engine, noisy, hashes(4, str(i)))
    put(engine, quiet, hashes(2))
    engine.drain()
    assert held(engine, quiet) == 2, "crowded out of the queue"
    assert held(engine, noisy) < 80
    behind = len(order) - 1 - order[::-1].index(quiet.namespace)
    assert behind < len(order) - 1, "came last"


def test_a_tenant_of_a_tier_replaces_its_own_and_is_refused_what_is_larger_than_its_quota() -> None:

    async def main() -> list[Any]:
        from kvcore.api import Context, Item
        from kvcore.l2.bounded import BoundedCalls

        storage = MemoryStorage(MemoryConfig(), Context(make_eviction=lambda spec: LruPolicy(None, None)))
        tier = account(1000, division=divided(a=100, default=900))
        for name in "ab":
            tier.bind(namespace(name), name)
        calls = BoundedCalls(storage, "t", 5.0, tier, lambda entries: None)
        await calls.open()

        async def store(key: ObjectKey, nbytes: int) -> Any:
            (outcome,) = await calls.store([Item(key, (memoryview(bytes(nbytes)),))])
            return outcome

        a, b = keys("a", 4), keys("b", 12)
        outcomes = [await store(k, 90) for k in b]
        outcomes += [await store(a[0], 90), await store(a[1], 90), await store(a[2], 150)]
        assert tier.tenants()["a"].used == 90
        await calls.close()
        return outcomes

    *stored, refused = asyncio.run(main())
    assert all(isinstance(o, Stored) for o in stored)
    assert isinstance(refused, Failed)
    assert refused.kind == "too_large"
