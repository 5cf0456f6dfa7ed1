"""A lookup that says what is coming, and gives each object when it comes: in this process and behind a server."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.api import LeaseError, Missing
from kvcore.engine import CacheEngine, Engine, EngineLookup, GroupSpec, ModelSpec, Space, attach_arena
from kvcore.service import open_engine
from kvcore.service.client import RemoteEngine
from kvcore.testing.chunks import hashes, spec
from kvcore.testing.servers.kvcore import KVCoreServer

CONFIG: dict[str, Any] = {"l1": {"size": "8MiB"}, "min_object_size": "128KiB", "lookup_timeout": "20s"}
WINDOWED = ModelSpec(
    "test", "m", "w", "bfloat16", 2, "LBHNC", "CPU", "vec", 32, 1,
    (GroupSpec(("a", "b"), (64 << 10, 64 << 10)), GroupSpec(("c",), (128 << 10,), window_tokens=64)),
)  # fmt: skip


HALVES = ModelSpec(
    "test", "m", "w", "bfloat16", 2, "LBHNC", "CPU", "vec", 32, 1, (GroupSpec(("a",), (64 << 10,)),)
)  # fmt: skip
"""Two blocks a chunk."""


def until(true: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    give_up = time.monotonic() + timeout_s
    while not (value := true()):
        assert time.monotonic() < give_up
        time.sleep(0.002)
    return value


class Gate:
    """Stands before a storage's loads: so many are let through, or all."""

    def __init__(self, engine: CacheEngine) -> None:
        self._storage = engine.manager.tiers[0].storage
        self._real = self._storage.load
        self._open = threading.Semaphore(0)
        self.asked = 0
        """Calls that have come to it. Who came first is let through first."""
        self.lost: set[bytes] = set()
        """Hashes that are there no more when they are asked for."""
        self._storage.load = self._load

    def let(self, calls: int) -> None:
        self._open.release(calls)

    def _load(self, items: Sequence[Any]) -> Any:
        self.asked += 1
        self._open.acquire()
        found = self._real(items)
        return [Missing() if i.key.chunk_hash in self.lost else f for i, f in zip(items, found, strict=True)]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheEngine]:
    path = tmp_path / "kvcore.yaml"
    path.write_text(json.dumps({**CONFIG, "l2": [{"storage": "memory"}]}))
    with contextlib.closing(CacheEngine.open(str(path))) as engine:
        yield engine


def blocks(space: Space, count: int) -> list[list[int]]:
    return [list(range(count * space.chunk_blocks))] * len(space.groups)


def put(engine: Engine, space: Space, keys: list[bytes]) -> None:
    """Store chunks whose every byte is their index + 1, and have them in the tier only."""
    keep(engine, space, keys)
    assert engine.drain() == 0
    engine.clear(space)


def keep(engine: Engine, space: Space, keys: list[bytes]) -> None:
    """Have them in L1."""
    plan = engine.reserve(space, keys, 0, len(keys), blocks(space, len(keys)))
    descriptor = engine.descriptor()
    assert descriptor is not None
    view = attach_arena(descriptor)
    for copy in plan.copies:
        size = space.groups[copy.group].nbytes
        view.buffer[copy.slot : copy.slot + size] = bytes([copy.blocks[0] // space.chunk_blocks + 1]) * size
    view.close()
    engine.publish(plan.id)


def take(engine: Engine, space: Space, lookup: EngineLookup, count: int, first_block: int = 0) -> list[int]:
    """Which chunks have come since the last call; each has the bytes that it was stored with."""
    descriptor = engine.descriptor()
    assert descriptor is not None
    view = attach_arena(descriptor)
    came = []
    for copy in engine.arrived(lookup, first_block, blocks(space, count)):
        index = copy.blocks[0] // space.chunk_blocks
        size = space.groups[0].nbytes
        assert bytes(view.buffer[copy.slot : copy.slot + size]) == bytes([index + 1]) * size
        assert view.generation(copy.slot) == copy.generation
        came.append(index)
    view.close()
    return came


def test_objects_are_given_as_they_come_and_each_once(cache: CacheEngine) -> None:
    space, keys = cache.register(spec()), hashes(12)
    put(cache, space, keys)
    gate = Gate(cache)
    lookup = cache.lookup(space, keys)
    time.sleep(0.05)
    assert lookup.poll() is None
    assert cache.coming(lookup) is None  # nothing is there yet: the tier may hang
    gate.let(1)
    coming = until(lambda: cache.coming(lookup))
    assert coming.end == 12
    assert coming.sources == {"memory": 12}
    some = take(cache, space, lookup, 12)
    assert 0 < len(some) < 12
    assert take(cache, space, lookup, 12) == []
    assert lookup.poll() is None
    gate.let(100)
    assert lookup.wait(10)
    assert cache.coming(lookup) is None
    assert sorted(some + take(cache, space, lookup, 12)) == list(range(12))
    assert take(cache, space, lookup, 12) == []
    cache.release(lookup)
    assert cache.l1.usage()["leases"] == 0
    assert cache.stats()["kvcore_hit_tokens_total"] == 12 * space.chunk_tokens
    assert cache.l1.usage()["objects"] == 12  # it was used, and so it stays


def test_what_is_resident_is_there_at_once(cache: CacheEngine) -> None:
    space, keys = cache.register(spec()), hashes(12)
    put(cache, space, keys)
    keep(cache, space, keys[:5])
    gate = Gate(cache)
    lookup = cache.lookup(space, keys, 2)
    coming = until(lambda: cache.coming(lookup))
    assert coming == (12, {"l1": 3, "memory": 7})
    assert take(cache, space, lookup, 12, 2 * space.chunk_blocks) == [2, 3, 4]
    gate.let(100)
    assert lookup.wait(10)
    assert sorted(take(cache, space, lookup, 12, 2 * space.chunk_blocks)) == list(range(5, 12))
    cache.release(lookup)


def test_what_a_tier_said_and_does_not_deliver_is_missing_in_the_end(cache: CacheEngine) -> None:
    space, keys = cache.register(spec()), hashes(12)
    put(cache, space, keys)
    gate = Gate(cache)
    gate.lost = {keys[7]}
    lookup = cache.lookup(space, keys)
    gate.let(1)
    assert until(lambda: cache.coming(lookup)).end == 12
    gate.let(100)
    assert lookup.wait(10)
    assert lookup.poll() == 7
    assert sorted(take(cache, space, lookup, 12)) == [*range(7), *range(8, 12)]
    cache.release(lookup)
    assert cache.l1.usage()["leases"] == 0


def test_only_the_blocks_that_the_engine_lacks_are_given(cache: CacheEngine) -> None:
    space, keys = cache.register(HALVES), hashes(8)
    assert space.chunk_blocks == 2
    put(cache, space, keys)
    gate = Gate(cache)
    lookup = cache.lookup(space, keys)
    gate.let(100)
    assert lookup.wait(10)
    copies = cache.arrived(lookup, 1, blocks(space, 8))
    assert sorted(b for c in copies for b in c.blocks) == list(range(1, 8 * space.chunk_blocks))
    cache.release(lookup)


def test_blocks_of_less_than_is_coming_are_an_error(cache: CacheEngine) -> None:
    space, keys = cache.register(HALVES), hashes(8)
    put(cache, space, keys)
    lookup = cache.lookup(space, keys)
    assert lookup.wait(10)
    with pytest.raises(ValueError, match=r"block_ids: 14 of a group, but 8 chunks are coming, which have 16"):
        cache.arrived(lookup, 0, [range(14)])
    assert take(cache, space, lookup, 8) == list(range(8))  # none is lost by it
    with pytest.raises(ValueError, match=r"block_ids: of 2 groups, and the model has 1"):
        cache.arrived(cache.lookup(space, keys), 0, [range(16), range(16)])
    cache.release(lookup)


def test_after_its_leases_ended_nothing_is_given(cache: CacheEngine) -> None:
    space, keys = cache.register(spec()), hashes(12)
    put(cache, space, keys)
    gate = Gate(cache)
    lookup = cache.lookup(space, keys)
    gate.let(1)
    until(lambda: cache.coming(lookup))
    cache.release(lookup)
    with pytest.raises(LeaseError):
        cache.arrived(lookup, 0, blocks(space, 12))
    gate.let(100)
    until(lambda: not cache.l1.usage()["leases"] and not cache.l1.usage()["staging"])


def test_where_windows_depend_on_the_end_nothing_is_said(cache: CacheEngine) -> None:
    space, keys = cache.register(WINDOWED), hashes(8)
    put(cache, space, keys)
    gate = Gate(cache)
    lookup = cache.lookup(space, keys)
    gate.let(1)
    time.sleep(0.1)
    assert cache.coming(lookup) is None
    gate.let(100)
    assert lookup.wait(10)
    cache.release(lookup)


def test_a_server_gives_objects_as_they_come(folder: Path) -> None:
    # The first half is resident, and the tier takes its time for the rest.
    tier = {"storage": {"plugin": "faulty", "storage": "memory", "latency": "300ms"}}
    with KVCoreServer(folder, {**CONFIG, "l2": [tier]}) as server:
        engine = open_engine(str(server.config), flags={"server.timeout": "5s"}, name="test")
        assert isinstance(engine, RemoteEngine)
        with contextlib.closing(engine):
            space, keys = engine.register(spec()), hashes(12)
            assert engine.wait_ready(10)
            put(engine, space, keys)
            keep(engine, space, keys[:6])

            lookup = engine.lookup(space, keys, 1)
            coming = until(lambda: (lookup.poll() is not None and "too late") or engine.coming(lookup))
            assert coming == (12, {"l1": 5, tier["storage"]["plugin"]: 6})
            some = take(engine, space, lookup, 12, space.chunk_blocks)
            assert some[:5] == [1, 2, 3, 4, 5]
            assert lookup.wait(10)
            assert lookup.poll() == 12
            assert engine.coming(lookup) is None
            rest = take(engine, space, lookup, 12, space.chunk_blocks)
            assert sorted(some + rest) == list(range(1, 12))
            assert take(engine, space, lookup, 12, space.chunk_blocks) == []
            engine.release(lookup)
            with pytest.raises(LeaseError):
                engine.arrived(lookup, 0, blocks(space, 12))
            lookup = engine.lookup(space, keys)
            assert lookup.wait(10)
            with pytest.raises(ValueError, match="block_ids: 1 of a group, but 12 chunks are coming"):
                engine.arrived(lookup, 0, [[0]])
            engine.release(lookup)


def test_a_server_that_ends_meanwhile_is_an_error_for_the_holder(folder: Path) -> None:
    tier = {"storage": {"plugin": "faulty", "storage": "memory", "latency": "300ms"}}
    with KVCoreServer(folder, {**CONFIG, "l2": [tier]}) as server:
        engine = open_engine(str(server.config), flags={"server.timeout": "5s"}, name="test")
        with contextlib.closing(engine):
            space, keys = engine.register(spec()), hashes(12)
            assert isinstance(engine, RemoteEngine)
            assert engine.wait_ready(10)
            put(engine, space, keys)
            lookup = engine.lookup(space, keys)
            server.kill()
            until(lambda: lookup.poll() is not None)
            assert lookup.poll() == 0
            with pytest.raises(LeaseError):
                engine.arrived(lookup, 0, blocks(space, 12))


def test_what_another_lookup_loads_is_kept_for_who_waits_for_it(cache: CacheEngine) -> None:
    space, keys = cache.register(spec()), hashes(12)
    put(cache, space, keys)
    gate = Gate(cache)
    first = cache.lookup(space, keys[:2])
    until(lambda: gate.asked == 2)
    second = cache.lookup(space, keys)
    until(lambda: gate.asked == 4 and cache.l1.usage()["staging"] == 12)  # it waits for two, and loads the others
    gate.let(2)
    assert first.wait(10)
    cache.release(first)  # unused
    gate.let(100)
    assert second.wait(10)
    assert second.poll() == 12
    cache.release(second)
    assert cache.l1.usage()["leases"] == 0


def test_what_another_lookup_has_let_go_of_is_loaded_again(cache: CacheEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    space, keys = cache.register(spec()), hashes(12)
    put(cache, space, keys)
    gate = Gate(cache)
    first = cache.lookup(space, keys[:2])
    until(lambda: gate.asked == 2)
    second = cache.lookup(space, keys)
    until(lambda: gate.asked == 4 and cache.l1.usage()["staging"] == 12)
    lease = cache.l1.reserve_each

    def late(table: Any, wanted: Sequence[bytes]) -> Any:
        """As if the first had been released before."""
        monkeypatch.setattr(cache.l1, "reserve_each", lease)
        cache.clear(space)
        return lease(table, wanted)

    monkeypatch.setattr(cache.l1, "reserve_each", late)
    gate.let(100)
    assert first.wait(10)
    assert second.wait(10)
    assert second.poll() == 12
    cache.release(first)
    cache.release(second)


def test_a_server_keeps_what_has_come_for_as_long_as_it_is_asked(folder: Path) -> None:
    # What the tier takes is longer than a lease: each question what has come starts that again.
    tier = {"storage": {"plugin": "faulty", "storage": "memory", "latency": "1200ms"}}
    config = {**CONFIG, "l1": {"size": "8MiB", "lease": "2s"}, "l2": [tier]}
    with KVCoreServer(folder, config) as server:
        engine = open_engine(str(server.config), flags={"server.timeout": "5s"}, name="test")
        assert isinstance(engine, RemoteEngine)
        with contextlib.closing(engine):
            space, keys = engine.register(spec()), hashes(12)
            assert engine.wait_ready(10)
            put(engine, space, keys)
            keep(engine, space, keys[:6])

            lookup = engine.lookup(space, keys)
            until(lambda: (lookup.poll() is not None and "too late") or engine.coming(lookup))
            came: list[int] = []
            while lookup.poll() is None:
                came += take(engine, space, lookup, 12)
                time.sleep(0.05)
            came += take(engine, space, lookup, 12)
            assert sorted(came) == list(range(12))
            engine.release(lookup)
