"""What observers hear of objects that come and go, in L1 and in tiers."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from test_engine import contents, hashes, opened, put, spec

from kvcore.api import ObjectEvent
from kvcore.engine import CacheEngine

DISK = "l2: [{{storage: {{plugin: disk, path: {path}, capacity: {capacity}, direct: 'off'}}}}]\n"


class Holdings:
    """Where objects are, as an observer knows it from what it is told; a contradiction fails."""

    def __init__(self) -> None:
        self.held: set[tuple[str, bytes]] = set()
        self.heard: list[tuple[str, ObjectEvent]] = []

    def stored(self, events: Sequence[ObjectEvent]) -> None:
        self.heard += [("stored", e) for e in events]
        self.held |= {(e.tier, e.key.chunk_hash) for e in events}

    def evicted(self, events: Sequence[ObjectEvent]) -> None:
        self.heard += [("evicted", e) for e in events]
        self.held -= {(e.tier, e.key.chunk_hash) for e in events}

    def of(self, tier: str) -> set[bytes]:
        return {h for t, h in self.held if t == tier}

    def reasons(self, what: str) -> set[tuple[str, str]]:
        return {(e.tier, e.reason) for w, e in self.heard if w == what}


def observed(engine: CacheEngine) -> Holdings:
    holdings = Holdings()
    engine.observe("holdings", holdings)
    return holdings


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 15
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_what_is_computed_is_told_with_its_parent_and_tokens(tmp_path: Path) -> None:
    engine = opened(tmp_path, "l2: []\n")
    holdings = observed(engine)
    space = engine.register(spec())
    keys = hashes(4)
    put(engine, space, keys[:3])
    put(engine, space, keys, first=2)
    told = [(e.key.chunk_hash, e.parent, e.tokens, e.tier) for _, e in holdings.heard]
    assert told == [(k, p, 32, "l1") for k, p in zip(keys, [b"", *keys], strict=False)]
    engine.close()


def test_the_told_and_the_resident_agree_when_room_is_made_and_when_it_is_cleared(tmp_path: Path) -> None:
    engine = opened(tmp_path, "l2: []\n")
    holdings = observed(engine)
    space = engine.register(spec())
    table = engine.object_space(space, 0)
    for i in range(6):  # 8 MiB hold 64 objects
        put(engine, space, hashes(20, str(i)))
        assert holdings.of("l1") == set(table.objects)
    assert holdings.reasons("evicted") == {("l1", "room")}
    engine.clear(space)
    assert until(lambda: not holdings.held)
    assert holdings.reasons("evicted") == {("l1", "room"), ("l1", "cleared")}
    engine.close()


def test_what_a_lookup_fetched_is_told_and_what_it_left_unused_too(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    holdings = observed(engine)
    space = engine.register(spec())
    keys = hashes(8)
    put(engine, space, keys)
    engine.drain()
    assert holdings.of("memory") == holdings.of("l1") == set(keys)
    engine.clear(space)
    assert until(lambda: not holdings.of("l1"))
    lookup = engine.lookup(space, keys)
    assert lookup.wait(10)
    assert holdings.of("l1") == set(keys)
    engine.release(lookup)
    assert until(lambda: not holdings.of("l1"))
    assert ("l1", "unused") in holdings.reasons("evicted")
    assert contents(engine, space, keys) == list(range(1, 9))
    assert holdings.of("l1") == set(keys)
    assert holdings.reasons("stored") == {("l1", ""), ("memory", ""), ("l1", "loaded")}
    engine.close()


@pytest.mark.parametrize(
    ("tier", "text"),
    [
        ("memory", "l2: [{storage: {plugin: memory, capacity: 1MiB}}]\n"),
        ("disk", "l2: [{storage: {plugin: disk, path: PATH, capacity: 1MiB, direct: 'off'}}]\n"),
        ("disk", "l2: [{storage: {plugin: disk, path: PATH, direct: 'off'}, write: evicted}]\n"),
    ],
)
def test_a_tier_that_is_full_tells_what_it_gives_up(tmp_path: Path, tier: str, text: str) -> None:
    engine = opened(tmp_path, text.replace("PATH", str(tmp_path / "objects")))
    holdings = observed(engine)
    space = engine.register(spec())
    for i in range(5):
        put(engine, space, hashes(20, str(i)))
        engine.drain()
    assert until(lambda: holdings.of("l1") == set(engine.object_space(space, 0).objects))
    there = {e.key.chunk_hash for e in list(engine.manager.tiers[0].storage.list())}
    assert holdings.of(tier) == there
    assert len(there) > 3
    engine.close()


def test_what_is_too_old_for_a_tier_is_told_to_have_expired(tmp_path: Path) -> None:
    engine = opened(tmp_path, "l2: [{storage: memory, ttl: 200ms}]\n")
    holdings = observed(engine)
    space = engine.register(spec())
    put(engine, space, hashes(4))
    engine.drain()
    assert until(lambda: not holdings.of("memory"))
    assert holdings.reasons("evicted") == {("memory", "expired")}
    engine.close()
