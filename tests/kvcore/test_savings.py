"""What hits have saved, who was evicted, what waits and how full the tiers are: counted where it happens."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_engine import contents, hashes, put, spec

from kvcore.engine import CacheEngine, GroupSpec, ModelSpec
from kvcore.observe import Metrics
from kvcore.observe.savings import Evictions, count_saved
from kvcore.service import open_store
from kvcore.testing.servers.kvcore import KVCoreServer

OBJECT = 128 << 10
Make = Callable[[str], CacheEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def open_(text: str) -> CacheEngine:
            path = tmp_path / "kvcore.yaml"
            path.write_text("min_object_size: 128KiB\nlookup_timeout: 20s\n" + text)
            engine = CacheEngine.open(str(path))
            stack.callback(engine.close)
            return engine

        yield open_


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_tokens_are_shared_out_among_their_sources() -> None:
    metrics = Metrics()
    count_saved(metrics, 90, {"l1": 1, "disk": 2})
    count_saved(metrics, 30, {"l1": 5}, tokens_per_s=60)
    count_saved(metrics, 0, {})
    found = metrics.values()
    assert found["kvcore_hit_tokens_total"] == 120
    assert found['kvcore_saved_tokens_total{source="l1"}'] == 30 + 30
    assert found['kvcore_saved_tokens_total{source="disk"}'] == 60
    assert found['kvcore_saved_prefill_seconds_total{source="l1"}'] == 0.5
    assert 'kvcore_saved_prefill_seconds_total{source="disk"}' not in found


def test_an_engine_says_what_each_place_has_saved(make: Make) -> None:
    engine = make("l1: {size: 8MiB}\nl2: [{name: t, storage: memory, read: always}]\n")
    space = engine.register(spec())
    tokens = space.chunk_tokens
    put(engine, space, hashes(4))
    assert engine.drain(30) == 0
    assert contents(engine, space, hashes(4)) == [1, 2, 3, 4]
    assert engine.stats()['kvcore_saved_tokens_total{source="l1"}'] == 4 * tokens
    assert not [name for name in engine.stats() if "prefill_seconds" in name], "its speed is not known yet"
    for _ in range(5):
        engine.prefilled(space, 1000, 0.5)
    engine.clear(space)
    assert contents(engine, space, hashes(4)) == [1, 2, 3, 4]
    found = engine.stats()
    assert found['kvcore_saved_tokens_total{source="t"}'] == 4 * tokens
    assert found['kvcore_saved_prefill_seconds_total{source="t"}'] == pytest.approx(4 * tokens / 2000)
    assert found["kvcore_hit_tokens_total"] == 8 * tokens


def test_a_server_estimates_and_its_engine_counts(tmp_path: Path) -> None:
    from kvcore.service import open_engine

    config = {"l1": {"size": "16MiB"}, "l2": [], "lookup_timeout": "20s"}
    with KVCoreServer(tmp_path, config) as server:
        engine = open_engine(flags={"server.url": server.url, "server.timeout": "20s", "l2": []})
        space = engine.register(spec())
        until(lambda: engine.descriptor() is not None)
        for _ in range(5):
            engine.prefilled(space, 1000, 0.5)
        blocks = [list(range(2 * space.chunk_blocks))]
        engine.publish(engine.reserve(space, hashes(2), 0, 2, blocks).id)
        lookup = engine.lookup(space, hashes(2))
        assert lookup.wait(30)
        assert lookup.poll() == 2
        engine.retrieve(lookup, 0, blocks)
        engine.release(lookup)
        saved = 'kvcore_saved_tokens_total{source="l1"}'
        until(lambda: server.metrics().get(saved) == 2 * space.chunk_tokens)
        assert server.metrics()['kvcore_saved_prefill_seconds_total{source="l1"}'] > 0
        assert engine.stats()[saved] == 2 * space.chunk_tokens
        engine.close()


def test_an_object_store_says_which_tier_saved_what(tmp_path: Path) -> None:
    file = tmp_path / "kvcore.yaml"
    file.write_text("l2: [{name: t, storage: memory}]\nlookup_timeout: 20s\n")
    store = open_store(str(file))
    page = ModelSpec("e", "m", "w", "u8", 1, "l", "b", "", 16, 1, (GroupSpec(("layer",), (64,)),))
    space = store.register(page, "test-page/1")
    buffers = [[memoryview(bytearray(64))] for _ in range(3)]
    assert store.store(space, hashes(3), buffers) == [True] * 3
    assert store.load(space, hashes(4), [*buffers, buffers[0]]) == [True, True, True, False]
    found = store.stats()
    assert found["kvcore_hit_tokens_total"] == found['kvcore_saved_tokens_total{source="t"}'] == 3 * 16
    assert found['kvcore_tier_wait_seconds_count{tier="t",op="load"}'] >= 1
    until(lambda: store.stats().get('kvcore_tier_used_bytes{tier="t"}', 0) > 3 * 64)
    store.close()


def test_evictions_by_policy_and_tenant(make: Make) -> None:
    engine = make(
        "l1: {size: 2MiB, eviction: fifo}\n"
        "l2: [{name: own, storage: {plugin: memory, capacity: 1MiB, eviction: mru}},\n"
        "     {name: kept, storage: memory, capacity: 1MiB}]\n"
        "tenants: {alice: {l1: 1MiB}}\n"
    )
    for tenant in ("alice", "bob"):
        space = engine.register(spec(), tenant)
        for i in range(12):
            put(engine, space, hashes(2, f"{tenant}{i}"))
            assert engine.drain(30) == 0

    def gone(place: str, policy: str, *tenants: str) -> float:
        name = 'kvcore_evictions_total{{place="{}",policy="{}",tenant="{}"}}'
        return sum(engine.stats().get(name.format(place, policy, tenant), 0) for tenant in tenants)

    assert gone("l1", "fifo", "alice") > 0
    assert gone("l1", "fifo", "other") > 0
    assert gone("l1", "fifo", "alice", "other") == engine.stats()["kvcore_evicted_objects_total"]
    assert gone("kept", "lru", "alice", "other") == engine.stats()['kvcore_tier_evicted_total{tier="kept"}'] > 0
    assert gone("own", "mru", "alice") > 0
    assert gone("own", "mru", "other") > 0
    assert not [name for name in engine.stats() if 'tenant="bob"' in name], "one series for all that are not named"


def test_without_tenants_nobody_is_told_apart() -> None:
    metrics = Metrics()

    def never(namespace: bytes) -> str:
        raise AssertionError

    Evictions(metrics, (), never).count("l1", "lru", [b"n"], 3)
    assert metrics.values()['kvcore_evictions_total{place="l1",policy="lru",tenant="other"}'] == 3


def test_waits_and_how_full_a_tier_is(make: Make) -> None:
    engine = make("l1: {size: 8MiB}\nl2: [{name: t, storage: memory, capacity: 8MiB}]\n")
    space = engine.register(spec())
    engine.stats()  # asks; there is nothing yet
    put(engine, space, hashes(4))
    assert engine.drain(30) == 0
    engine.clear(space)
    assert contents(engine, space, hashes(4)) == [1, 2, 3, 4]
    found = engine.stats()
    for op in ("load", "store"):
        assert found[f'kvcore_tier_wait_seconds_count{{tier="t",op="{op}"}}'] >= 1
        assert found[f'kvcore_tier_wait_seconds_sum{{tier="t",op="{op}"}}'] >= 0
    engine.manager.occupancy._next = 0.0  # a minute later
    until(lambda: engine.stats().get('kvcore_tier_used_bytes{tier="t"}', 0) > 4 * OBJECT)
    assert engine.stats()['kvcore_tier_capacity_bytes{tier="t"}'] == 8 << 20
