"""Loads ahead of requests: what is brought, what never gives way to it, and what is counted."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_engine import FULL, WINDOW, contents, hashes, put, spec

from kvcore.api import Brought, ObjectKey
from kvcore.builtin.memory import MemoryStorage
from kvcore.engine import CacheEngine, Space

SOON_S = 30.0


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., CacheEngine]]:
    engines = []

    def make(l2: str = "[{storage: memory}]", size: str = "8MiB") -> CacheEngine:
        path = tmp_path / "kvcore.yaml"
        path.write_text(f"l1: {{size: {size}}}\nmin_object_size: 128KiB\nlookup_timeout: 20s\nl2: {l2}\n")
        engines.append(CacheEngine.open(str(path)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def stored(engine: CacheEngine, space: Space, keys: list[bytes], groups: int = 1) -> list[bytes]:
    """Objects that the tier has and L1 no more."""
    put(engine, space, keys, groups=groups)
    assert engine.drain(SOON_S) == 0
    engine.clear(space)
    return keys


def resident(engine: CacheEngine, space: Space, keys: list[bytes], group: int = 0) -> int:
    return sum(key in engine.object_space(space, group).objects for key in keys)


def test_what_a_tier_has_is_brought_and_counted_once_it_is_used(opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec())
    keys = stored(engine, space, hashes(8))
    assert engine.prefetcher.bring(space.namespace, keys, "test")
    until(lambda: resident(engine, space, keys) == 8)
    assert contents(engine, space, keys) == list(range(1, 9))
    assert engine.stats()['kvcore_hit_chunks_total{source="l1"}'] == 8
    until(lambda: engine.prefetcher.brought("test") == Brought(8, 8, 0))
    assert engine.stats()['kvcore_prefetch_objects_total{cause="test",became="used"}'] == 8
    assert 'kvcore_prefetch_objects_total{cause="test",became="wasted"}' not in engine.stats()


def test_what_leaves_unused_is_wasted(opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec())
    keys = stored(engine, space, hashes(8))
    engine.prefetcher.bring(space.namespace, keys, "test")
    until(lambda: engine.prefetcher.brought("test").brought == 8)
    engine.clear(space)
    until(lambda: engine.prefetcher.brought("test") == Brought(8, 0, 8))
    contents(engine, space, keys)  # too late
    assert engine.prefetcher.brought("test") == Brought(8, 0, 8)


def test_only_what_l1_lacks_is_loaded_and_only_what_a_prefix_needs(opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec())
    keys = stored(engine, space, hashes(8))
    contents(engine, space, keys[:3])
    engine.prefetcher.bring(space.namespace, [*keys[:6], *hashes(1, "nowhere"), *keys[6:]], "test")
    until(lambda: engine.prefetcher.brought("test").brought == 3)
    put(engine, space, hashes(1, "later"))  # the loop has had its turn
    assert resident(engine, space, keys) == 6


def test_of_a_window_the_end_is_brought(opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec(FULL, WINDOW))
    assert space.windows == (None, 3)
    keys = stored(engine, space, hashes(9), groups=2)
    engine.prefetcher.bring(space.namespace, keys, "test")
    until(lambda: engine.prefetcher.brought("test").brought == 12)
    assert resident(engine, space, keys, 0) == 9
    assert [key in engine.object_space(space, 1).objects for key in keys] == [False] * 6 + [True] * 3


def test_a_request_that_comes_first_needs_nothing_ahead(opened: Callable[..., CacheEngine], monkeypatch: Any) -> None:
    from kvcore.engine import prefetch

    monkeypatch.setattr(prefetch, "PATIENCE_S", 3600.0)
    engine = opened()
    space = engine.register(spec())
    keys = stored(engine, space, hashes(8))
    engine.prefetcher.bring(space.namespace, keys, "test")
    contents(engine, space, keys)
    assert engine.stats()['kvcore_prefetch_skipped_total{cause="test",reason="asked"}'] == 1
    assert engine.prefetcher.brought("test") == Brought()


def test_who_asks_again_and_again_is_not_put_off(opened: Callable[..., CacheEngine], monkeypatch: Any) -> None:
    from kvcore.engine import prefetch

    monkeypatch.setattr(prefetch, "PATIENCE_S", 0.5)
    engine = opened()
    space = engine.register(spec())
    keys = stored(engine, space, hashes(8))
    until(lambda: engine.prefetcher.bring(space.namespace, keys, "test") and resident(engine, space, keys) == 8)


def test_at_most_a_quarter_of_l1_is_unused(opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec())
    keys = stored(engine, space, hashes(40))
    engine.prefetcher.bring(space.namespace, keys, "test")
    until(lambda: engine.stats().get('kvcore_prefetch_skipped_total{cause="test",reason="no_room"}') == 1)
    most = engine.l1.arena.size // 4 // space.groups[0].nbytes
    assert engine.prefetcher.brought("test").brought == resident(engine, space, keys) == most
    assert [key in engine.object_space(space, 0).objects for key in keys[:most]] == [True] * most  # the front
    contents(engine, space, keys[:most])
    until(lambda: engine.prefetcher.brought("test").used == most)
    engine.prefetcher.bring(space.namespace, keys, "test")
    until(lambda: engine.prefetcher.brought("test").brought == 2 * most)


@pytest.mark.parametrize("write", ["evicted", "none", "reused"])
def test_what_l1_alone_has_never_gives_way(opened: Callable[..., CacheEngine], tmp_path: Path, write: str) -> None:
    disk = f"{{plugin: disk, path: {tmp_path / 'objects'}}}"
    engine = opened(f"[{{storage: {disk}}}]")
    space = engine.register(spec())
    keys = stored(engine, space, hashes(8))
    engine.close()
    engine = opened(f"[{{storage: {disk}, write: {write}}}]")
    space = engine.register(spec())
    own = hashes(200, "own")
    put(engine, space, own)  # L1 is full of what was just computed
    engine.drain(SOON_S)
    before = engine.stats()["kvcore_evicted_objects_total"]
    engine.prefetcher.bring(space.namespace, keys, "test")
    until(lambda: 'kvcore_prefetch_skipped_total{cause="test",reason="no_room"}' in engine.stats())
    assert engine.stats()["kvcore_evicted_objects_total"] == before
    engine.clear(space)
    engine.prefetcher.bring(space.namespace, keys, "test")  # now there is room
    until(lambda: resident(engine, space, keys) == 8)


def test_nothing_is_loaded_while_a_request_waits_for_a_tier(opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec())
    keys, ahead, others = (stored(engine, space, hashes(n, str(n))) for n in (8, 9, 10))
    (tier,) = engine.manager.tiers
    load, gate = tier.load, threading.Event()

    async def slow(wanted: Any, *args: Any) -> Any:
        while wanted[0].key.chunk_hash in keys and not gate.is_set():
            await asyncio.sleep(0.005)
        return await load(wanted, *args)

    tier.load = slow  # type: ignore[method-assign]
    lookup = engine.lookup(space, keys)
    until(lambda: not engine.manager.fetcher.idle.is_set())
    engine.prefetcher.bring(space.namespace, ahead, "test")
    until(lambda: not engine.prefetcher._wanted)
    for _ in range(5):  # requests have their turn, and it would have had its own
        assert contents(engine, space, others) == list(range(1, 11))
        assert resident(engine, space, ahead) == 0
        engine.clear(space)
    gate.set()
    until(lambda: resident(engine, space, ahead) == 9)
    assert lookup.answer == 8
    engine.release(lookup)


def test_a_tier_that_fails_is_let_be(opened: Callable[..., CacheEngine], tmp_path: Path) -> None:
    disk = f"{{plugin: disk, path: {tmp_path / 'objects'}}}"
    engine = opened(f"[{{storage: {disk}}}]")
    space = engine.register(spec())
    keys = stored(engine, space, hashes(8))
    engine.close()
    engine = opened(f"[{{storage: {{plugin: faulty, fail_rate: 1, storage: {disk}}}, write: none}}]")
    space = engine.register(spec())
    engine.prefetcher.bring(space.namespace, keys, "test")
    engine.prefetcher.bring(space.namespace, keys[:4], "test")
    until(lambda: engine.stats().get('kvcore_prefetch_skipped_total{cause="test",reason="failed"}') == 2)
    assert engine.prefetcher.brought("test") == Brought()


def test_what_one_tier_has_lost_and_another_brings_is_awaited_by_nobody(opened: Callable[..., CacheEngine]) -> None:
    engine = opened("[{storage: memory}, {storage: memory}]")
    space = engine.register(spec())
    keys = stored(engine, space, hashes(8))
    first, second = engine.manager.tiers
    load, idle = second.load, list[bool]()
    assert isinstance(first.storage, MemoryStorage)
    exists = first.storage.exists
    first.storage.exists = lambda asked: [True for _ in exists(asked)]  # type: ignore[method-assign]
    first.storage.delete([ObjectKey(space.namespace, key, 0) for key in keys])

    async def seen(*args: Any) -> Any:
        idle.append(engine.manager.fetcher.idle.is_set())
        return await load(*args)

    second.load = seen  # type: ignore[method-assign]
    engine.prefetcher.bring(space.namespace, keys, "test")
    until(lambda: resident(engine, space, keys) == 8)
    assert set(idle) == {True}


def test_what_cannot_be_brought_is_refused(opened: Callable[..., CacheEngine], monkeypatch: Any) -> None:
    from kvcore.engine import prefetch

    monkeypatch.setattr(prefetch, "PATIENCE_S", 3600.0)
    engine = opened()
    space = engine.register(spec())
    bring = engine.prefetcher.bring
    assert not bring(b"x" * 16, hashes(2), "test")
    assert not bring(space.namespace, [], "test")
    assert not bring(space.namespace, [b"short"], "test")
    assert not bring(space.namespace, [*hashes(1), b"x" * 16], "test")
    kept = [bring(space.namespace, hashes(1, str(i)), "test") for i in range(prefetch.MAX_WANTED + 1)]
    assert kept == [True] * prefetch.MAX_WANTED + [False]
    assert engine.stats()['kvcore_prefetch_skipped_total{cause="test",reason="queue_full"}'] == 1
    engine.close()
    assert not bring(space.namespace, hashes(2), "test")


def test_hooks_hear_of_requests_and_may_load_ahead(opened: Callable[..., CacheEngine]) -> None:
    class Hook:
        heard: list[Any] = []

        def queued(self, namespace: bytes, hashes: list[bytes]) -> None:
            self.heard.append(("queued", namespace, len(hashes)))

        def asked(self, namespace: bytes, hashes: list[bytes]) -> None:
            self.heard.append(("asked", namespace, len(hashes)))

    engine = opened()
    engine.observe("hook", Hook())
    space = engine.register(spec())
    keys = hashes(5)
    engine.queued(space, keys)
    engine.lookup(space, keys)
    engine.lookup(space, keys, each=True)  # of an object store: nobody's prompt
    assert Hook.heard == [("queued", space.namespace, 5), ("asked", space.namespace, 5)]


def test_a_request_of_before_does_not_count_as_a_use(opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec())
    keys, other = stored(engine, space, hashes(8)), stored(engine, space, hashes(8, "other"))
    engine.prefetcher.bring(space.namespace, other, "test")
    until(lambda: engine.prefetcher.brought("test").brought == 8)
    engine.prefetcher.asked(space, [engine.object_space(space, 0)], keys)  # while there is something not used
    engine.prefetcher.bring(space.namespace, keys, "test")
    until(lambda: engine.prefetcher.brought("test").brought == 16)
    contents(engine, space, other)
    until(lambda: engine.prefetcher.brought("test").used == 8)
    assert not engine.prefetcher._asked
    assert engine.prefetcher.brought("test") == Brought(16, 8, 0)


def test_the_head_outlives_the_tail(opened: Callable[..., CacheEngine]) -> None:
    """Whatever of it came first: what is left of a prefix is a front."""
    engine = opened()
    space = engine.register(spec())
    keys = stored(engine, space, hashes(12))
    contents(engine, space, keys[:4])
    engine.prefetcher.bring(space.namespace, keys, "test")
    until(lambda: resident(engine, space, keys) == 12)
    until(lambda: not engine.l1.usage()["leases"])
    for i in range(200):
        put(engine, space, hashes(1, f"later {i}"))
        engine.drain(SOON_S)
        there = [key in engine.object_space(space, 0).objects for key in keys]
        assert there == sorted(there, reverse=True)
        if not any(there):
            return
    pytest.fail("it never left L1")
