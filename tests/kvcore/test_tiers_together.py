"""Several tiers behind one L1: who is asked, who serves, who is written, and what a bad one costs the others."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from test_engine import FULL, contents, free, hashes, opened, put, spec

from kvcore.api import MISSING, ConfigError, Entry, Failed, ObjectKey, PluginError, StorageUnavailable
from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.builtin.eviction_s3fifo import S3FifoPolicy
from kvcore.builtin.memory import MemoryStorage
from kvcore.engine import CacheEngine, Space
from kvcore.l2 import HEADER_BYTES, Capacity, loading

OBJECT = 2 * (64 << 10)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], tuple[CacheEngine, Space]]]:
    with ExitStack() as stack:

        def open_(text: str) -> tuple[CacheEngine, Space]:
            engine = opened(tmp_path, text)
            stack.callback(engine.close)
            return engine, engine.register(spec())

        yield open_


TWO = "lookup_timeout: 20s\nl2: [{name: near, storage: memory}, {name: far, storage: memory}]\n"


def held(engine: CacheEngine, tier: int) -> dict[ObjectKey, bytes]:
    objects: dict[ObjectKey, bytes] = engine.manager.tiers[tier].storage._objects
    return objects


def count(engine: CacheEngine, name: str) -> float:
    return engine.metrics.values().get(f"kvcore_{name}", 0.0)


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def asked(engine: CacheEngine, space: Space, keys: list[bytes]) -> tuple[int, float, dict[str, int]]:
    """The answer of a lookup, its seconds, and where the objects were."""
    begun = time.monotonic()
    lookup = engine.lookup(space, keys)
    assert lookup.wait(10)
    took = time.monotonic() - begun
    answer = lookup.poll()
    engine.release(lookup)
    assert answer is not None
    return answer, took, dict(lookup.sources)


# -- a tier that hangs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hung", [0, 1])
def test_a_hung_tier_delays_nobody_whom_another_can_serve(make: Any, hung: int) -> None:
    engine, space = make(TWO)
    keys = hashes(6)
    put(engine, space, keys)
    assert engine.drain() == 0
    engine.clear(space)
    let_go = threading.Event()
    engine.manager.tiers[hung].storage.exists = lambda ks: [let_go.wait(20)] * len(ks)
    try:
        answer, took, sources = asked(engine, space, keys)
        assert answer == 6
        assert took < 5  # not the ten seconds that the hung one may take
        assert sources == {"far" if hung == 0 else "near": 6}
    finally:
        let_go.set()


def test_what_a_healthy_tier_has_of_a_prefix_is_served_though_another_hangs(make: Any) -> None:
    engine, space = make(TWO.replace("20s", "8s"))  # of which the tier that hangs is waited for half
    keys = hashes(6)
    put(engine, space, keys)
    assert engine.drain() == 0
    engine.clear(space)
    for key in [k for k in held(engine, 0) if k.chunk_hash in keys[4:]]:
        del held(engine, 0)[key]
    let_go = threading.Event()
    engine.manager.tiers[1].storage.exists = lambda ks: [let_go.wait(20)] * len(ks)
    try:
        answer, took, _ = asked(engine, space, keys)
        assert answer == 4
        assert took < 7.6
    finally:
        let_go.set()


def test_a_tier_that_hung_is_no_longer_asked_and_comes_back(make: Any) -> None:
    engine, space = make("lookup_timeout: 200ms\nl2: [{name: near, storage: memory, timeout: 200ms}]\n")
    keys = hashes(4)
    put(engine, space, keys)
    engine.drain()
    engine.clear(space)
    tier = engine.manager.tiers[0]
    real, let_go = tier.storage.exists, threading.Event()
    questions: list[ObjectKey] = []
    tier.storage.exists = lambda ks: (questions.extend(ks), [let_go.wait(20)] * len(ks))[1]
    until(lambda: (asked(engine, space, keys), not tier.breaker.closed)[1], "it was never left alone")
    before = sum(key.chunk_hash in keys for key in questions)  # the others are probes
    asked(engine, space, keys)
    assert sum(key.chunk_hash in keys for key in questions) == before > 0
    let_go.set()
    tier.storage.exists = real
    until(lambda: tier.breaker.closed, "it did not come back by itself")
    assert contents(engine, space, keys) == [1, 2, 3, 4]


# -- exists is a hint --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [MISSING, Failed("broken"), Failed("torn", "corrupt")])
def test_what_the_first_tier_does_not_deliver_comes_from_the_next(make: Any, answer: Any) -> None:
    engine, space = make(TWO)
    keys = hashes(6)
    put(engine, space, keys)
    assert engine.drain() == 0
    engine.clear(space)
    storage = engine.manager.tiers[0].storage
    real = storage.load
    gone = set(keys[2:4])
    storage.load = lambda items: [
        answer if i.key.chunk_hash in gone else o for i, o in zip(items, real(items), strict=True)
    ]
    before = free(engine)
    assert contents(engine, space, keys) == [1, 2, 3, 4, 5, 6]
    assert engine.drain() == 0
    engine.clear(space)
    assert free(engine) == before
    assert engine.metrics.values().get('kvcore_miss_chunks_total{reason="io"}', 0) == 0  # nothing was missed


# -- who is written ----------------------------------------------------------------------------------------------------


def test_a_read_only_tier_is_read_and_never_written(make: Any) -> None:
    engine, space = make("l2: [{name: near, storage: memory, write: none}, {name: far, storage: memory}]\n")
    keys = hashes(4)
    put(engine, space, keys)
    engine.drain()
    assert not held(engine, 0)
    assert len(held(engine, 1)) == 4
    held(engine, 0).update(held(engine, 1))
    held(engine, 1).clear()
    engine.clear(space)
    assert contents(engine, space, keys) == [1, 2, 3, 4]


def test_found_far_is_written_near_unless_told_not_to(make: Any, tmp_path: Path) -> None:
    for promote, expected in (("true", 4), ("false", 0)):
        engine, space = make(f"l2: [{{name: near, storage: memory, promote: {promote}}}, {{storage: memory}}]\n")
        keys = hashes(4)
        put(engine, space, keys)
        engine.drain()
        held(engine, 0).clear()
        engine.clear(space)
        assert contents(engine, space, keys) == [1, 2, 3, 4]
        engine.drain()
        assert len(held(engine, 0)) == expected
        assert count(engine, 'tier_promoted_total{tier="near"}') == expected
        assert engine.l1.usage()["leases"] == 0
        engine.close()


def test_a_tier_for_what_l1_gives_up_gets_it_before_it_goes(make: Any) -> None:
    engine, space = make("l2: [{name: under, storage: memory, write: evicted}]\n")
    room = engine.manager.arena.size // OBJECT
    few = hashes(room // 4, "few")
    put(engine, space, few)
    engine.drain()
    assert not held(engine, 0)  # there is room: nothing has been given up
    many = [hashes(4, f"p{i}") for i in range(room)]
    for keys in many:
        put(engine, space, keys)
        engine.drain()
    lost = count(engine, 'tier_dropped_total{tier="under",reason="evicted_first"}')
    kept = {k.chunk_hash for k in held(engine, 0)}
    resident = set(engine.object_space(space, 0).objects)
    everything = set(few).union(*many)
    assert len(everything - kept - resident) == lost
    assert lost < len(everything) / 4
    assert contents(engine, space, many[2]) == [1, 2, 3, 4]  # long gone from L1
    assert engine.l1.usage()["leases"] == 0


def test_what_is_used_while_it_is_given_up_stays(make: Any) -> None:
    engine, space = make("l2: [{name: under, storage: memory, write: evicted}]\n")
    keys = hashes(4)
    put(engine, space, keys)
    (lease,) = engine.l1.give_up(1 << 30)
    assert len(lease.objects) == 4
    assert contents(engine, space, keys[:2]) == [1, 2]  # used: they stay
    engine.l1.end_read(lease)
    assert set(engine.object_space(space, 0).objects) == set(keys[:2])
    (lease,) = engine.l1.give_up(1 << 30)  # and can be given up again
    assert {o.chunk_hash for o in lease.objects} == set(keys[:2])
    engine.l1.end_read(lease)
    assert not engine.object_space(space, 0).objects


def test_at_the_end_what_is_in_l1_is_written(make: Any) -> None:
    engine, space = make("l2: [{name: under, storage: memory, write: evicted}]\n")
    objects = held(engine, 0)
    kept: dict[ObjectKey, bytes] = {}
    close = engine.manager.tiers[0].storage.close
    engine.manager.tiers[0].storage.close = lambda: (kept.update(objects), close())
    put(engine, space, hashes(5))
    engine.close()
    assert len(kept) == 5


def test_a_spill_tier_that_is_down_keeps_l1_whole(make: Any) -> None:
    engine, space = make("l2: [{name: under, storage: memory, write: evicted}]\n")
    tier = engine.manager.tiers[0]
    tier.storage.store = lambda items: [Failed("down")] * len(items)
    tier.storage.ping = lambda: 1 / 0
    room = engine.manager.arena.size // OBJECT
    for i in range(room):
        put(engine, space, hashes(4, f"p{i}"))
    until(lambda: not tier.breaker.closed, "it was never left alone")
    engine.drain()
    for i in range(room):
        put(engine, space, hashes(4, f"q{i}"))
    assert len(engine.object_space(space, 0).objects) > room * 0.9
    assert engine.l1.usage()["leases"] == 0


# -- a capacity for storages that have none ----------------------------------------------------------------------------


def test_a_tier_keeps_to_its_capacity(make: Any) -> None:
    engine, space = make("l2: [{name: t, storage: memory, capacity: 1MiB}]\n")
    fits = (1 << 20) // (OBJECT + HEADER_BYTES)
    for i in range(12):
        put(engine, space, hashes(2, f"p{i}"))
        engine.drain()
        assert len(held(engine, 0)) <= fits
    assert len(held(engine, 0)) == fits
    assert {k.chunk_hash for k in held(engine, 0)} >= set(hashes(2, "p11"))
    assert count(engine, 'tier_evicted_total{tier="t"}') == 24 - fits
    engine.clear(space)
    assert contents(engine, space, hashes(2, "p11")) == [1, 2]
    usage = engine.manager.loop.submit(engine.manager.tiers[0].usage()).result()
    assert (usage.objects, usage.capacity_bytes) == (fits, 1 << 20)
    assert usage.nbytes == fits * (OBJECT + HEADER_BYTES)


@pytest.mark.parametrize("tier", ["{storage: {plugin: memory, capacity: 1MiB}, capacity: 1MiB}"])
def test_a_capacity_twice_is_refused(make: Any, tier: str) -> None:
    with pytest.raises((PluginError, ConfigError), match=r"capacity of its own: set `storage\.capacity`"):
        make(f"l2: [{tier}]\n")


def test_the_account_counts_each_object_once_and_survives_what_it_does_not_know() -> None:
    account = Capacity(1000, LruPolicy(None, None))
    names = [ObjectKey(bytes(16), bytes([i]) * 32, 0) for i in range(8)]
    account.add([Entry(k, 100) for k in names])
    account.add([Entry(names[0], 100)])
    assert (account.used, len(account)) == (800, 8)
    account.touch([names[1], ObjectKey(bytes(16), b"x" * 32, 0)])
    account.remove([names[0], names[0], ObjectKey(bytes(16), b"x" * 32, 0)])
    assert (account.used, len(account)) == (700, 7)
    assert account.victims(bytes(16), 300) == []
    assert account.victims(bytes(16), 500) == [names[2], names[3]]
    assert account.used == 700  # until they are gone
    assert account.victims(bytes(16), 500) == [names[4], names[5]]
    account.kept([names[i] for i in (2, 3, 4, 5, 0)])  # deleting failed: others are tried, and those again later
    assert account.victims(bytes(16), 500) == [names[6], names[7]]
    assert account.victims(bytes(16), 5000) == [names[i] for i in (1, 2, 3, 4, 5)]


def test_the_policy_of_a_capacity_remembers_what_went() -> None:
    """What comes again soon after it went is s3fifo's best hint: such a key goes to its main queue at once."""
    policy = S3FifoPolicy(None, None)
    account = Capacity(1000, policy)
    names = [ObjectKey(bytes(16), bytes([i]) * 32, 0) for i in range(11)]
    account.add([Entry(k, 100) for k in names])
    (gone,) = account.victims(bytes(16), 0)
    account.remove([gone])
    account.add([Entry(gone, 100)])
    assert list(policy._main) == [gone]


def test_the_account_follows_what_others_store_anew() -> None:
    account = Capacity(1000, LruPolicy(None, None))
    names = [ObjectKey(bytes(16), bytes([i]) * 32, 0) for i in range(4)]
    account.add([Entry(k, 100) for k in names])
    account.add([Entry(names[0], 400), Entry(names[1], 40), Entry(names[1], 40), Entry(names[2], 100)])
    assert (account.used, len(account)) == (640, 4)
    account.remove([names[0]])
    assert account.used == 240


def test_the_account_survives_a_restart(tmp_path: Path) -> None:
    engine = opened(tmp_path, "l2: [{name: t, storage: memory}]\n")
    space = engine.register(spec(FULL))
    put(engine, space, hashes(6))
    engine.drain()
    left = dict(held(engine, 0))
    engine.close()
    again = opened(tmp_path, "l2: [{name: t, storage: memory, capacity: 1MiB}]\n")
    tier = again.manager.tiers[0]
    try:
        tier.storage._objects.update(left)
        again.manager.loop.submit(_recount(tier)).result()
        usage = again.manager.loop.submit(tier.usage()).result()
        assert (usage.objects, usage.nbytes) == (6, 6 * (OBJECT + HEADER_BYTES))
    finally:
        again.close()


async def _recount(tier: Any) -> None:
    tier._calls.opened()
    await tier._calls._counting


# -- a store that is not there at the start ----------------------------------------------------------------------------


def test_a_store_that_is_not_there_at_the_start_is_used_once_it_is(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there, opens = threading.Event(), []

    def open_(self: MemoryStorage) -> None:
        opens.append(self)
        if not there.is_set():
            raise StorageUnavailable("nobody listens on port 1234")

    monkeypatch.setattr(MemoryStorage, "open", open_)
    engine, space = make("l2: [{name: late, storage: memory, capacity: 4MiB}]\n")
    assert "nobody listens on port 1234" in caplog.text
    keys = hashes(4)
    put(engine, space, keys)
    assert contents(engine, space, keys) == [1, 2, 3, 4]
    assert not held(engine, 0)
    there.set()
    until(lambda: engine.manager.tiers[0].breaker.closed, "it was not opened again")
    assert len(opens) >= 2
    put(engine, space, hashes(4, "later"))
    engine.drain()
    assert len(held(engine, 0)) == 4


@pytest.mark.parametrize("late", [False, True])
def test_a_store_that_takes_long_to_open_delays_the_start_for_a_while_only(
    make: Any, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setattr("kvcore.l2.tier.START_S", 0.1)
    if late:  # later than an open may take at all: the same call goes on, and is no second one
        monkeypatch.setattr("kvcore.l2.calls.OPEN_S", 0.2)
    there, opens = threading.Event(), []
    monkeypatch.setattr(MemoryStorage, "open", lambda self: (opens.append(self), there.wait(20)))
    begun = time.monotonic()
    engine, space = make("l2: [{name: late, storage: memory, timeout: 200ms, ttl: 1h}]\n")
    held(engine, 0)[there_before := ObjectKey(bytes(16), bytes(32), 0)] = b"before"
    assert time.monotonic() - begun < 5
    put(engine, space, hashes(4))
    time.sleep(1.5)
    assert not engine.manager.tiers[0].breaker.closed
    there.set()
    until(lambda: engine.manager.tiers[0].breaker.closed, "it never opened")
    until(lambda: there_before in engine.manager.tiers[0].capacity.known(), "it was not counted")
    assert len(opens) == 1


def test_tiers_are_opened_side_by_side_and_the_first_fault_in_their_order_is_told(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2)
    monkeypatch.setattr(MemoryStorage, "open", lambda self: together.wait(5))
    make(TWO)
    failed: list[int] = []

    def fail(self: MemoryStorage) -> None:
        number = together.wait(5)
        failed.append(number)
        raise OSError(f"fault {number}")

    monkeypatch.setattr(MemoryStorage, "open", fail)
    with pytest.raises(PluginError, match=r"l2\[0\]"):
        make(TWO)
    assert sorted(failed) == [0, 1]


# -- what one bad plugin costs the others ------------------------------------------------------------------------------


def test_tiers_are_closed_side_by_side(make: Any) -> None:
    engine, _ = make(TWO)
    together, met = threading.Barrier(2), list[int]()
    for tier in engine.manager.tiers:
        tier.storage.close = lambda: met.append(together.wait(5))
    engine.close()
    assert sorted(met) == [0, 1]


def test_a_tier_whose_loads_are_slow_is_left_alone_though_it_answers(make: Any) -> None:
    engine, space = make("lookup_timeout: 100ms\nl2: [{name: near, storage: memory}]\n")
    keys = hashes(1)
    put(engine, space, keys)
    engine.drain()
    tier = engine.manager.tiers[0]
    real = tier.storage.load
    tier.storage.load = lambda items: (time.sleep(0.3), real(items))[1]
    for _ in range(4):
        engine.clear(space)
        asked(engine, space, keys)
        time.sleep(0.3)
    assert count(engine, 'tier_opened_total{tier="near"}') > 0


def test_a_hung_serde_stops_its_own_tier_only(make: Any) -> None:
    engine, space = make(TWO.replace("{name: near,", "{name: near, timeout: 200ms, serde: [raw],"))
    near, far = engine.manager.tiers
    let_go = threading.Event()
    near._encode = lambda *args: let_go.wait(20)
    try:
        for i in range(12):
            put(engine, space, hashes(2, f"p{i}"))
        until(lambda: len(held(engine, 1)) == 24, "the other tier was not written")
        assert far.breaker.closed
    finally:
        let_go.set()


def test_what_a_hung_load_holds_comes_from_the_next_tier(make: Any) -> None:
    engine, space = make("lookup_timeout: 2s\nl2: [{name: near, storage: memory, timeout: 200ms}, {storage: memory}]\n")
    keys = hashes(4)
    put(engine, space, keys)
    assert engine.drain() == 0
    engine.clear(space)
    let_go = threading.Event()
    engine.manager.tiers[0].storage.load = lambda items: [Failed("late")] * (let_go.wait(20) * len(items))
    try:
        assert contents(engine, space, keys) == [1, 2, 3, 4]
        assert engine.l1.usage()["staging"] == 0
        assert engine.l1.usage()["quarantined"] > 0
    finally:
        let_go.set()
    until(lambda: engine.l1.usage()["quarantined"] == 0, "slots were lost")


def test_an_answer_without_a_truth_value_costs_its_own_tier_only(make: Any) -> None:
    class Undecided:
        def __bool__(self) -> bool:
            raise TypeError("undecided")

    engine, space = make(TWO)
    put(engine, space, hashes(4))
    assert engine.drain() == 0
    engine.clear(space)
    engine.manager.tiers[0].storage.exists = lambda keys: [Undecided()] * len(keys)
    assert asked(engine, space, hashes(4))[0] == 4


def test_a_serde_that_cannot_say_how_long_it_encodes_costs_its_own_tier_only(make: Any) -> None:
    engine, space = make(TWO)
    put(engine, space, hashes(4))
    assert engine.drain() == 0
    engine.clear(space)
    engine.manager.tiers[0].codec.max_encoded_bytes = lambda nbytes: 1 // 0
    assert asked(engine, space, hashes(4))[0] == 4


def test_what_there_is_no_memory_to_load_comes_from_the_next_tier(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, space = make(TWO)
    keys = hashes(4)
    put(engine, space, keys)
    assert engine.drain() == 0
    engine.clear(space)
    before = free(engine)
    asked_for: list[int] = []
    real = loading.headers

    def headers(count: int) -> list[memoryview]:
        asked_for.append(count)
        if len(asked_for) == 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(count)

    monkeypatch.setattr(loading, "headers", headers)
    assert contents(engine, space, keys) == [1, 2, 3, 4]
    assert len(asked_for) > 1
    engine.clear(space)
    assert free(engine) == before
    assert engine.l1.usage()["leases"] == 0


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_a_store_that_takes_long_holds_up_none_that_there_is_a_turn_for(make: Any) -> None:
    engine, space = make("l2: [{storage: memory, timeout: 1min}]\n")
    storage = engine.manager.tiers[0].storage
    real, let_go = storage.store, threading.Event()
    slow, other = hashes(1, "slow"), hashes(1, "other")
    storage.store = lambda items: (items[0].key.chunk_hash in slow and let_go.wait(20), real(items))[1]
    try:
        put(engine, space, slow)
        until(lambda: engine.manager.stores._queues[0].writing, "nothing is written")
        put(engine, space, other)
        until(lambda: [k.chunk_hash for k in held(engine, 0)] == other, "it waits for the slow one")
    finally:
        let_go.set()


def test_a_small_queue_still_takes_all_that_is_left_at_the_end(make: Any) -> None:
    engine, space = make("l2: [{name: under, storage: memory, write: evicted, queue_size: 256KiB}]\n")
    objects, kept = held(engine, 0), dict[ObjectKey, bytes]()
    close = engine.manager.tiers[0].storage.close
    engine.manager.tiers[0].storage.close = lambda: (kept.update(objects), close())
    for i in range(10):
        put(engine, space, hashes(4, f"p{i}"))
    engine.close()
    assert len(kept) == 40
    assert count(engine, 'tier_dropped_total{tier="under",reason="queue_full"}') == 0


@pytest.mark.parametrize("late", ["soon", "when they had to go"])
def test_stores_that_overrun_their_deadline_count(make: Any, late: str) -> None:
    engine, space = make("l2: [{name: t, storage: memory, capacity: 1MiB, timeout: 100ms}]\n")
    tier = engine.manager.tiers[0]
    real, let_go = tier.storage.store, threading.Event()
    begun: list[int] = []
    over: list[int] = []

    def store(items: Any) -> Any:
        begun.append(1)
        let_go.wait(20)
        outcomes = real(items)
        over.append(1)
        return outcomes

    def end() -> None:
        let_go.set()
        until(lambda: len(over) == len(begun) and tier.stuck_s is None, "they hang")

    tier.storage.store = store
    tier.breaker.failure = lambda op, cause: None
    for i in range(6):
        let_go.clear()
        put(engine, space, hashes(2, f"p{i}"))
        engine.drain()  # it was given up
        if late == "soon":
            end()
    end()
    for i in range(8):
        put(engine, space, hashes(2, f"q{i}"))
        engine.drain()
    assert sum(map(len, held(engine, 0).values())) <= 1 << 20


def test_a_lowered_capacity_is_reached_in_small_steps(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first: dict[ObjectKey, bytes] = {}
    engine, space = make("l2: [{name: t, storage: memory}]\n")
    for i in range(25):
        put(engine, space, hashes(2, f"p{i}"))
        engine.drain()
    first.update(held(engine, 0))
    engine.close()
    monkeypatch.setattr("kvcore.l2.bounded.DELETED_AT_ONCE", 4)
    monkeypatch.setattr(MemoryStorage, "open", lambda self: self._objects.update(first))
    batches: list[list[ObjectKey]] = []
    real = MemoryStorage.delete
    monkeypatch.setattr(MemoryStorage, "delete", lambda self, keys: (batches.append(list(keys)), real(self, keys)))
    again, _ = make("l2: [{name: t, storage: memory, capacity: 1MiB}]\n")
    until(lambda: sum(map(len, held(again, 0).values())) <= 1 << 20, "it stayed too full")
    assert max(map(len, batches)) == 4
    gone = [key for batch in batches for key in batch]
    assert gone == list(first)[: len(gone)]  # the policy's order, as if it were one step


def test_concurrent_batches_and_one_larger_than_the_capacity_stay_within_it(make: Any) -> None:
    engine, space = make("l2: [{name: t, storage: memory, capacity: 512KiB}]\n")
    storage = engine.manager.tiers[0].storage
    real, peak = storage.store, 0

    def store(items: Any) -> Any:
        nonlocal peak
        outcomes = real(items)
        peak = max(peak, sum(map(len, list(storage._objects.values()))))
        return outcomes

    storage.store = store
    for i in range(6):
        put(engine, space, hashes(8, f"p{i}"))
    engine.drain()
    assert 0 < peak <= 512 << 10


@pytest.mark.parametrize("listing", ["slow", "raises"])
def test_a_listing_that_takes_long_or_fails_does_not_stop_the_start(
    make: Any, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    let_go, listed = threading.Event(), threading.Event()

    def entries(self: MemoryStorage) -> Iterator[Entry]:
        if listing == "raises":
            raise OSError("no listing today")
        let_go.wait(20)
        yield from (Entry(ObjectKey(bytes(16), bytes([i]) * 32, 0), -1 if i == 3 else 100) for i in range(10))
        listed.set()

    monkeypatch.setattr(MemoryStorage, "list", entries)
    engine, space = make("l2: [{name: t, storage: memory, capacity: 1MiB, timeout: 1min}]\n")
    put(engine, space, hashes(4))
    engine.drain()
    assert len(held(engine, 0)) == 4
    assert not listed.is_set()
    let_go.set()
    if listing == "slow":
        until(lambda: len(engine.manager.tiers[0].capacity) == 4 + 9, "it was never counted")
