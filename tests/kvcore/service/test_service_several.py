"""One engine over two servers: each has its ranks' KV, and a prefix counts where both have it."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from served import CONFIG, SOON_S, WINDOWED, blocks, hashes, spec, until

from kvcore.api import ConfigError, LeaseError
from kvcore.engine import attach_arena
from kvcore.engine.parts import Part
from kvcore.service import open_engine
from kvcore.service.several import SeveralEngine, SeveralSpace
from kvcore.testing.servers.kvcore import KVCoreServer

RANKS = 4
MODEL = dataclasses.replace(spec(), ranks=RANKS)


@pytest.fixture
def servers(folder: Path) -> Iterator[list[KVCoreServer]]:
    """Two servers that run."""
    with KVCoreServer(folder, CONFIG, "a") as a, KVCoreServer(folder, CONFIG, "b") as b:
        yield [a, b]


@pytest.fixture
def engine(servers: list[KVCoreServer], folder: Path) -> Iterator[SeveralEngine]:
    """An engine of both."""
    config = folder / "engine.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "server": [s.url for s in servers]}))
    made = open_engine(str(config), name="several")
    assert isinstance(made, SeveralEngine)
    until(made.descriptor, "both servers")
    yield made
    made.close()


def ranges(engine: SeveralEngine, space: SeveralSpace, copies: Sequence[Any], rank: int) -> Iterator[tuple[Any, Any]]:
    """Each copy of one rank, as its worker sees it, with the memory that is the rank's."""
    descriptor = engine.descriptor()
    assert descriptor is not None
    part = Part.find(descriptor, rank, space.groups[0].ranks)
    view = attach_arena(part.descriptor(descriptor), rank)
    for copy in part.own(copies, len(space.groups)):
        size = space.groups[copy.group].rank_bytes
        at = copy.slot + part.rank * size
        assert view.generation(copy.slot) == copy.generation
        yield copy, view.buffer[at : at + size]
    view.close()


def put(engine: SeveralEngine, space: SeveralSpace, keys: Sequence[bytes], ranks: int = RANKS, first: int = 0) -> int:
    """Store chunks; each rank writes its number and the chunk's into all its bytes. How many objects that were."""
    plan = engine.reserve(space, keys, first, len(keys), blocks(space, len(keys)))
    for rank in range(ranks):
        for copy, memory in ranges(engine, space, plan.copies, rank):
            memory[:] = bytes([16 * rank + copy.blocks[0] // space.chunk_blocks + 1]) * len(memory)
            del memory
    engine.publish(plan.id)
    return len(plan.copies)


def read(engine: SeveralEngine, space: SeveralSpace, keys: Sequence[bytes], ranks: int = RANKS) -> list[list[int]]:
    """Per rank, what a lookup promises: the chunks, as their first bytes say."""
    lookup = engine.lookup(space, keys)
    assert lookup.wait(SOON_S)
    copies = engine.retrieve(lookup, 0, blocks(space, len(keys))) if lookup.poll() else []
    found = []
    for rank in range(ranks):
        found.append([])
        for copy, memory in ranges(engine, space, copies, rank):
            assert bytes(memory) == bytes(memory[:1]) * len(memory)
            assert memory[0] - 16 * rank == copy.blocks[0] // space.chunk_blocks + 1
            found[-1].append(memory[0] - 16 * rank)
            del memory
    engine.release(lookup)
    return found


def only(engine: SeveralEngine, space: SeveralSpace, part: int, keys: Sequence[bytes]) -> None:
    """Store chunks on one of the servers only."""
    one = engine.parts[part].reserve(space.parts[part], keys, 0, len(keys), blocks(space, len(keys)))
    engine.parts[part].publish(one.id)


def test_each_rank_finds_its_own_bytes(engine: SeveralEngine) -> None:
    space = engine.register(MODEL)
    assert [layout.ranks for layout in space.groups] == [2]
    keys = hashes(6)
    assert put(engine, space, keys) == 12  # an object on each server
    assert read(engine, space, keys) == [[1, 2, 3, 4, 5, 6]] * RANKS
    assert until(lambda: space.namespace, "the servers' answers")
    assert space.parts[0].namespace != space.parts[1].namespace
    assert engine.stats()["kvcore_server_up"] == 1
    assert engine.drain() == 0
    assert engine.clear(space) == 12
    assert read(engine, space, keys) == [[1, 2, 3, 4, 5, 6]] * RANKS  # from both servers' tiers


def test_the_answer_is_what_all_can_serve(engine: SeveralEngine) -> None:
    space = engine.register(MODEL)
    keys = hashes(6)
    only(engine, space, 0, keys)
    lookup = engine.lookup(space, keys)
    assert lookup.wait(SOON_S)
    assert lookup.poll() == 0
    assert engine.retrieve(lookup, 0, blocks(space, 6)) == []
    only(engine, space, 1, keys[:4])
    lookup = engine.lookup(space, keys, 1)
    assert lookup.wait(SOON_S)
    assert lookup.poll() == 4
    assert lookup.sources
    copies = engine.retrieve(lookup, space.chunk_blocks, blocks(space, 6))
    assert sorted(c.group for c in copies) == [0] * 3 + [1] * 3
    engine.release(lookup)
    assert put(engine, space, keys, first=4) == 2  # what only the second lacks


def test_a_window_ends_where_the_shortest_ends(engine: SeveralEngine) -> None:
    space = engine.register(dataclasses.replace(WINDOWED, ranks=2))
    keys = hashes(8)
    only(engine, space, 0, keys)
    one = engine.parts[1].reserve(space.parts[1], keys, 0, 5, [blocks(space, 5)[0], [-1, -1, *blocks(space, 5)[1][2:]]])
    engine.parts[1].publish(one.id)  # of the window's objects, the first two are not there
    lookup = engine.lookup(space, keys)
    assert lookup.wait(SOON_S)
    assert lookup.poll() == 5
    copies = engine.retrieve(lookup, 0, blocks(space, 8))
    chunks = [{c.blocks[0] // space.chunk_blocks for c in copies if c.group == g} for g in range(4)]
    assert chunks[0] == chunks[2] == set(range(5))
    assert chunks[1] == chunks[3] == {2, 3, 4}
    engine.release(lookup)


def test_with_one_server_away_all_is_a_miss_and_nothing_is_stored(
    engine: SeveralEngine, servers: list[KVCoreServer]
) -> None:
    space = engine.register(MODEL)
    keys = hashes(4)
    put(engine, space, keys)
    lookup = engine.lookup(space, keys)
    assert lookup.wait(SOON_S)
    assert lookup.poll() == 4
    descriptor = engine.descriptor()
    assert descriptor is not None
    servers[1].kill()
    until(lambda: engine.descriptor() is None, "the end of the second server")
    assert lookup.poll() == 0
    with pytest.raises(LeaseError):
        lookup.answer = 4
        engine.retrieve(lookup, 0, blocks(space, 4))
    gone = engine.lookup(space, keys)
    assert gone.wait(SOON_S)
    assert gone.poll() == 0
    more = hashes(6)
    plan = engine.reserve(space, more, 4, 6, blocks(space, 6))
    assert (plan.id, plan.copies, plan.arena) == (0, [], "")
    assert plan.skipped == {"no_server": 2}
    assert engine.stats()["kvcore_server_up"] == 0
    text = engine.metrics_text().splitlines()
    assert [line for line in text if line.startswith("kvcore_server_up")] == ["kvcore_server_up 0.0"]
    lost = [line for line in text if line.startswith("kvcore_server_lost_total")]
    assert lost == ['kvcore_server_lost_total{reason="closed"} 1.0']
    until(lambda: servers[0].metrics()["kvcore_leases"] == 0, "the first server's leases are over")
    servers[1].start()
    until(engine.descriptor, "both servers")
    again = engine.descriptor()
    assert again is not None
    assert again["token"] != descriptor["token"]
    assert read(engine, space, keys) == [[]] * RANKS  # the second has lost its part
    assert put(engine, space, keys) == 4
    assert read(engine, space, keys) == [[1, 2, 3, 4]] * RANKS


def test_with_one_server_away_the_other_gives_up_nothing(engine: SeveralEngine, servers: list[KVCoreServer]) -> None:
    space = engine.register(MODEL)
    servers[1].kill()
    until(lambda: engine.descriptor() is None, "the end of the second server")
    alone, part = engine.parts[0], space.parts[0]
    plan = alone.reserve(part, hashes(10), 0, 10, blocks(part, 10))
    alone.publish(plan.id)
    for start in range(100, 200, 10):
        stored = engine.reserve(space, hashes(10, start), 0, 10, blocks(space, 10))
        assert (stored.id, stored.skipped) == (0, {"no_server": 10})
    assert servers[0].metrics()["kvcore_evicted_objects_total"] == 0
    lookup = alone.lookup(part, hashes(10))
    assert lookup.wait(SOON_S)
    assert lookup.poll() == 10
    alone.release(lookup)


def test_ranks_that_cannot_be_split_are_refused(engine: SeveralEngine) -> None:
    with pytest.raises(ConfigError, match="2 servers for 1 tensor-parallel ranks: the ranks are split evenly"):
        engine.register(spec())


def test_tenants_do_not_see_each_other(engine: SeveralEngine) -> None:
    mine, theirs = engine.register(MODEL, "mine"), engine.register(MODEL, "theirs")
    keys = hashes(3)
    put(engine, mine, keys)
    assert read(engine, theirs, keys) == [[]] * RANKS
    assert read(engine, mine, keys) == [[1, 2, 3]] * RANKS


@pytest.mark.parametrize(("ranks", "servers", "expected"), [(4, 2, [0, 0, 1, 1]), (3, 3, [0, 1, 2]), (2, 1, [0, 0])])
def test_ranks_are_split_evenly_and_in_order(ranks: int, servers: int, expected: list[int]) -> None:
    descriptor: dict[str, Any] = {"token": "t"} if servers == 1 else {"parts": [{} for _ in range(servers)]}
    parts = [Part.find(descriptor, rank, ranks // servers) for rank in range(ranks)]
    assert [p.part for p in parts] == expected
    assert [p.rank for p in parts] == [rank % (ranks // servers) for rank in range(ranks)]
