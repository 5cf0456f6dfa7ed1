"""The cache engine from outside: what is promised can be retrieved, whatever the tiers do."""

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcore.api import ConfigError, Failed, KeySource, LayoutError, LeaseError, ObjectKey
from kvcore.engine import CacheEngine, GroupSpec, ModelSpec, Space, attach_arena, cache_engine
from kvcore.observe import exposition
from kvcore.service import open_store

BLOCK = 64 << 10
FULL = GroupSpec(("a", "b"), (BLOCK, BLOCK))
WINDOW = GroupSpec(("c",), (2 * BLOCK,), window_tokens=64)


def spec(*groups: GroupSpec, block_tokens: int = 32) -> ModelSpec:
    return ModelSpec("test", "m", "w", "bfloat16", 2, "LBHNC", "CPU", "vec", block_tokens, 1, groups or (FULL,))


def hashes(count: int, seed: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(count)]


def opened(tmp_path: Path, text: str = "") -> CacheEngine:
    path = tmp_path / "kvcore.yaml"
    path.write_text("l1: {size: 8MiB}\nmin_object_size: 128KiB\n" + (text or "l2: [{storage: memory}]\n"))
    return CacheEngine.open(str(path))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CacheEngine]:
    engine = opened(tmp_path)
    yield engine
    engine.close()


def put(engine: CacheEngine, space: Space, keys: list[bytes], first: int = 0, groups: int = 1) -> None:
    """Store chunks whose every byte is their index + 1."""
    ids = [list(range(len(keys) * space.chunk_blocks))] * groups
    plan = engine.reserve(space, keys, first, len(keys), ids)
    view = attach_arena(space.descriptor())
    for copy in plan.copies:
        size = space.groups[copy.group].nbytes
        view.buffer[copy.slot : copy.slot + size] = bytes([copy.blocks[0] // space.chunk_blocks % 255 + 1]) * size
    view.close()
    engine.publish(plan.id)


def contents(engine: CacheEngine, space: Space, keys: list[bytes], first: int = 0) -> list[int]:
    """First byte of each chunk that a lookup promises, read through the plan. Checks that all bytes are equal."""
    lookup = engine.lookup(space, keys, first)
    assert lookup.wait(10)
    copies = engine.retrieve(lookup, first * space.chunk_blocks, [list(range(1000))] * len(space.groups))
    found = []
    for copy in copies:
        data = bytes(engine.manager.arena.buffer[copy.slot : copy.slot + space.groups[copy.group].nbytes])
        assert data == data[:1] * len(data)
        assert engine.manager.arena.generation(copy.slot) == copy.generation
        found.append(data[0])
    engine.release(lookup)
    return found


def free(engine: CacheEngine) -> int:
    return engine.l1.usage()["free"]


def test_stored_chunks_are_found_and_the_prefix_ends_at_the_first_absent_one(engine: CacheEngine) -> None:
    space = engine.register(spec())
    keys = hashes(10)
    put(engine, space, keys[:6])
    assert contents(engine, space, keys) == [1, 2, 3, 4, 5, 6]
    assert contents(engine, space, keys, first=4) == [5, 6]
    assert contents(engine, space, hashes(10, "other")) == []
    assert contents(engine, space, [keys[0], *hashes(2, "other"), keys[1]]) == [1]


def test_draining_ends_in_time_whatever_blocks_the_tiers(engine: CacheEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_engine, "SLACK_S", 0.0)
    blocked = threading.Event()
    engine.manager.loop.post(blocked.wait)
    drained = ThreadPoolExecutor(1).submit(engine.drain, 0.01)
    try:
        assert drained.result(20) == 0
    finally:
        blocked.set()


def test_what_left_l1_comes_back_from_the_tier(engine: CacheEngine) -> None:
    space = engine.register(spec())
    keys = hashes(10)
    put(engine, space, keys)
    assert engine.drain() == 0
    engine.clear(space)
    assert contents(engine, space, keys) == list(range(1, 11))
    assert engine.stats()['kvcore_hit_chunks_total{source="memory"}'] == 10
    assert contents(engine, space, keys) == list(range(1, 11))
    assert engine.stats()['kvcore_hit_chunks_total{source="l1"}'] == 10


def test_a_gap_in_l1_is_filled_from_the_tier(engine: CacheEngine) -> None:
    space = engine.register(spec())
    keys = hashes(9)
    put(engine, space, keys)
    engine.drain()
    engine.clear(space)
    assert contents(engine, space, keys[:3]) == [1, 2, 3]  # now resident
    put(engine, space, keys, first=6)
    assert contents(engine, space, keys) == list(range(1, 10))


def test_prefetched_and_not_used_is_freed_and_used_stays(engine: CacheEngine) -> None:
    space = engine.register(spec())
    keys = hashes(8)
    put(engine, space, keys)
    engine.drain()
    engine.clear(space)
    before = free(engine)
    lookup = engine.lookup(space, keys)
    assert lookup.wait(10)
    assert lookup.poll() == 8
    assert free(engine) < before
    engine.release(lookup)
    engine.release(lookup)
    assert free(engine) == before
    contents(engine, space, keys)
    assert free(engine) < before


def test_abort_before_the_answer_leaves_no_lease(engine: CacheEngine) -> None:
    space = engine.register(spec())
    keys = hashes(8)
    put(engine, space, keys)
    engine.drain()
    engine.clear(space)
    for _ in range(20):
        engine.release(engine.lookup(space, keys))
    deadline = time.monotonic() + 5
    while engine.l1.usage()["leases"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.l1.usage()["leases"] == 0
    assert engine.l1.usage()["staging"] == 0


def test_many_requests_for_one_prefix_load_it_once(engine: CacheEngine) -> None:
    space = engine.register(spec())
    keys = hashes(16)
    put(engine, space, keys)
    engine.drain()
    engine.clear(space)
    lookups = [engine.lookup(space, keys) for _ in range(8)]
    assert all(lookup.wait(10) for lookup in lookups)
    assert [lookup.poll() for lookup in lookups] == [16] * 8
    assert engine.stats()['kvcore_tier_operations_total{tier="memory",op="load",outcome="ok"}'] == 16
    for lookup in lookups:
        engine.release(lookup)


def test_a_failed_rank_abandons_the_plan_and_late_answers_are_harmless(engine: CacheEngine) -> None:
    space = engine.register(spec())
    keys = hashes(4)
    before = free(engine)
    plan = engine.reserve(space, keys, 0, 4, [list(range(4))])
    assert contents(engine, space, keys) == []  # staging is not readable
    engine.publish(plan.id, ok=False)
    engine.publish(plan.id, ok=True)
    engine.publish(12345)
    assert contents(engine, space, keys) == []
    assert free(engine) == before


def test_reserve_skips_what_is_known_lost_or_has_no_room(engine: CacheEngine) -> None:
    space = engine.register(spec())
    keys = hashes(100)
    put(engine, space, keys[:2])
    ids = [[*range(3), -1, *range(4, 100)]]
    plan = engine.reserve(space, keys, 0, 100, ids)
    assert plan.skipped["known"] == 2
    assert plan.skipped["no_block"] == 1
    assert plan.skipped["l1_full"] == 97 - len(plan.copies)
    again = engine.reserve(space, keys, 0, 5, ids)
    assert again.id == 0
    assert again.copies == []
    engine.publish(plan.id)
    assert engine.reserve(space, hashes(1, "x"), 0, 1, [[]]).copies == []


def test_a_lease_that_ran_out_is_an_error_for_the_holder_and_room_for_others(tmp_path: Path) -> None:
    engine = opened(tmp_path, "l2: []\n")
    engine.l1.lease_s = 0.05
    space = engine.register(spec())
    keys = hashes(4)
    put(engine, space, keys)
    lookup = engine.lookup(space, keys)
    assert lookup.poll() == 4
    time.sleep(0.1)
    engine.l1.reap()
    with pytest.raises(LeaseError):
        engine.retrieve(lookup, 0, [list(range(4))])
    assert lookup.poll() == 0
    assert engine.stats()['kvcore_miss_chunks_total{reason="lease_expired"}'] == 4
    assert not engine.renew(lookup)
    engine.release(lookup)
    plan = engine.reserve(space, hashes(2, "y"), 0, 2, [[0, 1]])
    time.sleep(0.1)
    engine.l1.reap()
    assert engine.l1.usage()["quarantined"] == 2 * space.groups[0].nbytes
    engine.publish(plan.id)  # too late: the slots come back, nothing is published
    assert engine.l1.usage()["quarantined"] == 0
    assert contents(engine, space, hashes(2, "y")) == []
    engine.close()


def test_a_slow_tier_delays_no_longer_than_the_lookup_timeout(tmp_path: Path) -> None:
    engine = opened(tmp_path, "lookup_timeout: 200ms\nl2: [{storage: memory}]\n")
    space = engine.register(spec())
    keys = hashes(12)
    put(engine, space, keys)
    engine.drain()
    engine.clear(space)
    contents(engine, space, keys[:4])
    storage = engine.manager.tiers[0].storage
    real, slow = storage.load, threading.Event()

    def load(items: object) -> object:
        slow.wait(1.0)
        return real(items)

    storage.load = load
    began = time.monotonic()
    lookup = engine.lookup(space, keys)
    assert lookup.poll() is None
    assert lookup.wait(5)
    assert 0.15 < time.monotonic() - began < 0.9
    assert lookup.poll() == 4  # what was resident is used
    assert lookup.misses["lookup_timeout"] > 0
    engine.release(lookup)
    slow.set()
    deadline = time.monotonic() + 5
    while engine.l1.usage()["objects"] < 12 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert contents(engine, space, keys) == list(range(1, 13))  # what came late was kept
    engine.close()


def test_a_hung_tier_never_gets_its_slots_reused_and_the_engine_closes(tmp_path: Path) -> None:
    engine = opened(tmp_path, "lookup_timeout: 300ms\nl2: [{storage: memory, timeout: 100ms}]\n")
    space = engine.register(spec())
    keys = hashes(4)
    put(engine, space, keys)
    engine.drain()
    engine.clear(space)
    let_go = threading.Event()

    def load(items: object) -> object:
        let_go.wait(20)
        return [Failed("too late")] * len(items)  # type: ignore[arg-type]

    engine.manager.tiers[0].storage.load = load
    before = free(engine)
    lookup = engine.lookup(space, keys)
    assert lookup.wait(5)
    assert lookup.poll() == 0
    engine.release(lookup)
    held = before - free(engine)
    assert held == 4 * space.groups[0].nbytes  # the hung call may still write there
    let_go.set()
    deadline = time.monotonic() + 5
    while free(engine) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert free(engine) == before
    engine.close()


@pytest.mark.parametrize("method", ["exists", "load", "store", "delete"])
def test_a_storage_that_raises_is_a_miss(tmp_path: Path, method: str) -> None:
    engine = opened(tmp_path)
    space = engine.register(spec())
    keys = hashes(4)

    def broken(*_: object) -> object:
        raise RuntimeError("broken")

    storage = engine.manager.tiers[0].storage
    if method != "store":
        put(engine, space, keys)
        engine.drain()
        engine.clear(space)
    setattr(storage, method, broken)
    if method == "store":
        put(engine, space, keys)
        engine.drain()
        engine.clear(space)
    expected = list(range(1, 5)) if method == "delete" else []
    assert contents(engine, space, keys) == expected
    put(engine, space, keys)
    assert contents(engine, space, keys) == list(range(1, 5))
    engine.close()


def test_corrupt_objects_are_misses_deleted_and_counted(engine: CacheEngine) -> None:
    space = engine.register(spec())
    keys = hashes(6)
    put(engine, space, keys)
    engine.drain()
    engine.clear(space)
    objects = engine.manager.tiers[0].storage._objects
    bad = ObjectKey(space.namespace, keys[3], 0)
    objects[bad] = objects[bad][:5000] + b"\xff" + objects[bad][5001:]
    assert contents(engine, space, keys) == [1, 2, 3]
    assert bad not in objects
    assert engine.stats()['kvcore_miss_chunks_total{reason="corrupt"}'] == 1


def test_windowed_groups_need_only_the_window_before_the_end(engine: CacheEngine) -> None:
    space = engine.register(spec(FULL, WINDOW))
    assert space.chunk_tokens == 32
    keys = hashes(12)
    put(engine, space, keys, groups=2)
    engine.drain()
    windowed = engine.object_space(space, 1)
    with engine.l1._lock:  # the window's objects of the front are gone, as after eviction
        gone = [windowed.objects[k] for k in keys[:8]]
        windowed.pool.remove(gone)
        engine.l1._room.drop(gone, "room")
    engine.manager.tiers[0].storage._objects.clear()
    lookup = engine.lookup(space, keys)
    assert lookup.wait(5)
    assert lookup.poll() == 12
    copies = engine.retrieve(lookup, 0, [list(range(12)), [-1] * 9 + [9, 10, 11]])
    assert [c.blocks[0] for c in copies if c.group == 0] == list(range(12))
    assert [c.blocks[0] for c in copies if c.group == 1] == [9, 10, 11]
    engine.release(lookup)
    lookup = engine.lookup(space, keys[:9])
    assert lookup.wait(5)
    assert lookup.poll() == 0  # the window before chunk 9 is not complete
    engine.release(lookup)


def test_what_no_window_needs_is_no_miss(engine: CacheEngine) -> None:
    space = engine.register(spec(FULL, WINDOW))
    keys = hashes(12)
    put(engine, space, keys, groups=2)
    engine.drain()
    engine.clear(space)
    lookup = engine.lookup(space, keys)
    assert lookup.wait(5)
    assert (lookup.poll(), lookup.sources, lookup.misses) == (12, {"memory": 12 + 3}, {})
    engine.release(lookup)


def test_a_windowed_group_alone_promises_no_gap(tmp_path: Path) -> None:
    """Chunks behind a gap are not counted as if they were the prefix."""
    engine = opened(tmp_path, "l2: []\n")
    space = engine.register(spec(WINDOW))
    keys = hashes(12)
    put(engine, space, keys[:2])
    put(engine, space, keys, first=9)
    lookup = engine.lookup(space, keys)
    assert lookup.poll() == 12  # the window before it is there
    engine.release(lookup)
    lookup = engine.lookup(space, keys[:11])
    assert lookup.poll() == 2  # two of the window's three are there: not enough
    engine.release(lookup)
    engine.close()


def test_partial_chunks_load_only_the_blocks_that_the_engine_lacks(tmp_path: Path) -> None:
    engine = opened(tmp_path, "chunk_tokens: 128\nl2: []\n")
    space = engine.register(spec())
    assert space.chunk_blocks == 4
    keys = hashes(3)
    put(engine, space, keys)
    lookup = engine.lookup(space, keys, first=1)
    copies = engine.retrieve(lookup, 6, [list(range(12))])
    assert [(c.first, c.blocks) for c in copies] == [(2, (6, 7)), (0, (8, 9, 10, 11))]
    engine.release(lookup)
    engine.close()


def test_spaces_of_other_models_and_salts_share_nothing(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    a = engine.register(spec())
    b = engine.register(ModelSpec("test", "m", "other", "bfloat16", 2, "LBHNC", "CPU", "vec", 32, 1, (FULL,)))
    assert engine.register(spec()).namespace == a.namespace != b.namespace
    put(engine, a, hashes(3))
    assert contents(engine, a, hashes(3)) == [1, 2, 3]
    assert contents(engine, b, hashes(3)) == []
    engine.close()
    salted = opened(tmp_path, "salt: tenant-7\nl2: []\n")
    assert salted.register(spec()).namespace != a.namespace
    salted.close()


def test_a_chunk_size_that_does_not_fit_the_blocks_names_both(tmp_path: Path) -> None:
    engine = opened(tmp_path, "chunk_tokens: 100\nl2: []\n")
    with pytest.raises(ConfigError, match=r"chunk_tokens is 100.*block size is 32"):
        engine.register(spec())
    with pytest.raises(LayoutError):
        engine.register(spec(GroupSpec(("a",), ())))
    engine.close()


def test_auto_chunks_reach_the_object_size_within_256_tokens(tmp_path: Path) -> None:
    engine = opened(tmp_path, "l2: []\n")
    assert engine.register(spec()).chunk_tokens == 32
    assert engine.register(spec(GroupSpec(("a",), (30 << 10,)))).chunk_tokens == 32 * 5
    assert engine.register(spec(GroupSpec(("a",), (64,)))).chunk_tokens == 256
    assert engine.register(spec(GroupSpec(("a",), (64,)), block_tokens=512)).chunk_tokens == 512
    engine.close()


def test_hashes_come_from_the_configured_generator(tmp_path: Path) -> None:
    engine = opened(tmp_path, "keys: tokens\nl2: []\n")
    space = engine.register(spec())
    tokens = list(range(100))
    found = space.hashes(KeySource(space.chunk_tokens, 32, tokens=tokens))
    assert len(found) == 3
    assert space.hashes(KeySource(space.chunk_tokens, 32, tokens=tokens), found[:1]) == found[1:]
    engine.close()


def test_traffic_from_many_threads_keeps_every_byte_right(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    space = engine.register(spec())
    faults: list[BaseException] = []
    stop = time.monotonic() + 3

    def work(seed: int) -> None:
        try:
            n = 0
            while time.monotonic() < stop:
                n += 1
                keys = hashes(6 + (seed + n) % 7, f"{(seed + n) % 12}")
                found = contents(engine, space, keys)
                assert found == list(range(1, len(found) + 1))
                put(engine, space, keys)
                if n % 20 == 0:
                    engine.clear(space)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    engine.drain()
    engine.l1.reap()
    usage = engine.l1.usage()
    assert usage["leases"] == usage["staging"] == usage["quarantined"] == 0
    assert usage["free"] + usage["objects"] * space.groups[0].nbytes == usage["size"]
    engine.close()


def test_a_plugin_that_blocks_the_tiers_loop_delays_no_request_for_ever(tmp_path: Path) -> None:
    engine = opened(tmp_path, "lookup_timeout: 100ms\nl2: [{storage: memory}]\n")
    space = engine.register(spec())
    put(engine, space, hashes(2))
    engine.drain()
    engine.clear(space)
    blocked = threading.Event()
    engine.manager.loop.post(lambda: blocked.wait(8))
    lookup = engine.lookup(space, hashes(2))
    began = time.monotonic()
    while lookup.poll() is None:
        assert time.monotonic() - began < 5
        time.sleep(0.01)
    assert lookup.poll() == 0
    stats = engine.stats()
    assert stats["kvcore_lookups_total"] == 1
    assert stats["kvcore_lookup_seconds_count"] == 1
    assert stats['kvcore_miss_chunks_total{reason="stalled"}'] == stats["kvcore_lookup_chunks_total"] == 2
    blocked.set()
    while engine.l1.usage()["objects"] < 2:  # the tier's answer arrives after all
        assert time.monotonic() - began < 20
        time.sleep(0.01)
    assert engine.stats()["kvcore_lookups_total"] == 1, "counted once"
    assert lookup.poll() == 0
    engine.release(lookup)
    engine.close()


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_an_exception_that_ends_processes_does_not_end_the_tiers(tmp_path: Path, end: type[BaseException]) -> None:
    engine = opened(tmp_path)
    space = engine.register(spec())

    async def leave() -> None:
        raise end

    engine.manager.loop.post(lambda: engine.manager.loop.spawn(leave()))
    put(engine, space, hashes(3))
    engine.drain()
    engine.clear(space)
    assert contents(engine, space, hashes(3)) == [1, 2, 3]
    engine.close()


def test_after_close_nothing_raises_but_what_must(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    space = engine.register(spec())
    keys = hashes(3)
    put(engine, space, keys)
    lookup = engine.lookup(space, keys)
    plan = engine.reserve(space, hashes(1, "x"), 0, 1, [[0]])
    engine.close()
    assert engine.reserve(space, hashes(1, "y"), 0, 1, [[0]]).copies == []
    engine.publish(plan.id)
    with pytest.raises(LeaseError):
        engine.retrieve(lookup, 0, [[0, 1, 2]])
    engine.release(lookup)
    assert engine.drain() == 0
    late = engine.lookup(space, hashes(3, "z"))
    assert late.poll() == 0
    engine.release(late)


def test_plans_with_odd_bounds_are_clamped(engine: CacheEngine) -> None:
    space = engine.register(spec())
    keys = hashes(3)
    assert len(engine.reserve(space, keys, 0, 9, [list(range(9))]).copies) == 3
    assert engine.reserve(space, keys, 2, 1, [list(range(9))]).copies == []
    assert engine.lookup(space, keys, 7).poll() == 3
    assert engine.lookup(space, [], 0).poll() == 0


def test_a_storage_that_answers_nonsense_does_not_end_the_queue(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    space = engine.register(spec())
    storage = engine.manager.tiers[0].storage
    real = storage.store
    storage.store = lambda items: [Failed("x", []) for _ in items]  # type: ignore[arg-type]
    put(engine, space, hashes(3, "bad"))
    assert engine.drain() == 0
    time.sleep(1.2)  # its circuit breaker is open for a second
    storage.store = real
    put(engine, space, hashes(1))  # the one call that is let through
    assert engine.drain() == 0
    put(engine, space, hashes(3))
    assert engine.drain() == 0
    engine.clear(space)
    assert contents(engine, space, hashes(3)) == [1, 2, 3]
    engine.close()


@pytest.mark.parametrize("garbage", ["twice", "gone", "others", "endless"])
def test_a_policy_that_names_garbage_costs_hits_and_nothing_else(engine: CacheEngine, garbage: str) -> None:
    """The engine's memory stays whole: every byte right, every slot accounted for."""
    l1, space = engine.l1, engine.register(spec())
    real, before = l1._pool._policy, []

    class Garbage(type(real)):  # type: ignore[misc]
        def evict(self, nbytes: int, pinned: object) -> object:
            victims = list(super().evict(nbytes, pinned))
            before.extend(victims)
            if garbage == "twice":
                return victims * 2
            if garbage == "gone":
                return [*victims, *before]
            if garbage == "others":
                return [None, 1, "x", object(), *victims]
            return (v for _ in range(1 << 60) for v in victims or [None])

    l1._pool._policy, l1._pool._trusted = Garbage(None, None), False
    for i in range(20):
        keys = hashes(12, str(i))
        put(engine, space, keys)
        found = contents(engine, space, keys)
        assert found == list(range(1, len(found) + 1))
    engine.drain()
    usage = l1.usage()
    assert usage["free"] + (usage["objects"] + usage["staging"]) * space.groups[0].nbytes == usage["size"]


def test_an_engine_that_fails_to_open_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> int:
        return sum(t.name.startswith("kvcore") for t in threading.enumerate())

    path = tmp_path / "kvcore.yaml"
    path.write_text("l1: {size: 8MiB}\nl2: [{storage: memory}]\n")
    before = threads()
    monkeypatch.setattr(exposition, "serve", lambda registry, port: 1 / 0)
    for face in (CacheEngine.open, open_store, CacheEngine.open):
        with pytest.raises(ZeroDivisionError):
            face(str(path), flags={"metrics_port": 0})
    deadline = time.monotonic() + 5
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threads() <= before


def test_metrics_text_is_prometheus(engine: CacheEngine) -> None:
    space = engine.register(spec())
    put(engine, space, hashes(2))
    contents(engine, space, hashes(3))
    text = engine.metrics_text()
    assert "# TYPE kvcore_hit_chunks_total counter" in text
    assert 'kvcore_hit_chunks_total{source="l1"} 2.0' in text
    assert 'kvcore_miss_chunks_total{reason="absent"} 1.0' in text


def test_write_leases_that_run_out_again_and_again_are_one_line(
    engine: CacheEngine, caplog: pytest.LogCaptureFixture
) -> None:
    space = engine.register(spec())

    async def reap() -> None:
        engine.manager._reap()

    real = engine.l1._clock
    for i in range(1, 4):
        engine.reserve(space, hashes(2, str(i)), 0, 2, [[0, 1]])
        engine.l1._clock = lambda i=i: real() + i * 2 * engine.l1.lease_s
        engine.manager.loop.submit(reap()).result(30)
    assert engine.stats()['kvcore_expired_leases_total{kind="write"}'] == 3
    lines = [r.getMessage() for r in caplog.records if "leases ran out" in r.getMessage()]
    assert lines == ["1 write leases ran out: their slots wait for the holder's answer"]
