"""The record of a served cache: the engine and the server know the same of a request, but for its token ids."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from served import CONFIG, SOON_S, blocks, connected, contents, hashes, put, spec, until

from kvcore.engine import Asked, Space
from kvcore.observe import Decision
from kvcore.observe.decisions import MAX_WORD, tenant_shown
from kvcore.service import open_engine
from kvcore.service.inspect import ask, caches
from kvcore.service.several import SeveralEngine
from kvcore.testing.servers.kvcore import KVCoreServer

ASKED = Asked("r1", 7, [1, 2, 3], "adapter", "5a17", {"traceparent": "00-11-22-01"})


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of sockets, before the server of the test starts."""
    monkeypatch.setenv("KVCORE_RUN_DIR", str(folder / "run"))
    return folder


@pytest.fixture
def server(run: Path) -> Iterator[KVCoreServer]:
    with KVCoreServer(run, CONFIG) as made:
        yield made


def asked(engine: Any, space: Space, count: int, first: int = 0, about: Asked = ASKED) -> Decision:
    lookup = engine.lookup(space, hashes(count), first, about)
    assert lookup.wait(SOON_S)
    if (lookup.poll() or 0) > first:
        engine.retrieve(lookup, first * space.chunk_blocks, blocks(space, count))
    engine.release(lookup)
    decision = engine.decisions.latest(about.id)
    assert isinstance(decision, Decision)
    return decision


def told(name: str) -> list[dict[str, Any]]:
    """What the server has on record of requests with an id."""
    (cache,) = [cache for cache in caches() if ask(cache, "/status")["kind"] == "server"]
    requests: list[dict[str, Any]] = ask(cache, "/requests?hashes=1")["requests"]
    return [request for request in requests if request["id"] == name]


def test_both_sides_have_the_same_on_record(server: KVCoreServer) -> None:
    engine, space = connected(server, tenant="alice", **{"inspect.tokens": True})
    put(engine, space, hashes(6))
    mine = asked(engine, space, 8, first=2)
    plan = engine.reserve(space, hashes(8), 6, 8, blocks(space, 8), "r1")
    engine.publish(plan.id)
    engine.clear(space)  # behind all that was said before
    (theirs,) = told("r1")
    assert mine.asked == ASKED._replace(trace=None)
    for name in ("first", "answer", "broke", "blame", "retrieved", "stored", "chunk_tokens"):
        assert theirs[name] == getattr(mine, name), name
    assert (mine.first, mine.answer, mine.broke, mine.stored) == (2, 6, "absent", 2)
    assert mine.retrieved == 4 * space.chunk_tokens
    assert (mine.namespace.hex(), mine.begin) == (theirs["namespace"], 0)
    assert theirs["begin"] == 2  # what the engine held itself it was not told
    assert theirs["hashes"] == [h.hex() for h in mine.hashes[2:]]
    assert (theirs["adapter"], theirs["salt"], theirs["tokens"]) == ("adapter", "5a17", 7)
    assert theirs["tenant"] == tenant_shown("alice", ())
    assert (
        (dict(mine.sources), dict(mine.misses)) == (theirs["sources"], theirs["misses"]) == ({"l1": 4}, {"absent": 2})
    )
    engine.close()


def test_what_is_not_asked_of_the_server_is_on_record_here(server: KVCoreServer) -> None:
    engine, space = connected(server)
    short = asked(engine, space, 0)
    assert (short.answer, short.chunks, short.broke) == (0, 0, "")
    assert told("r1") == []
    server.kill()
    until(lambda: engine.descriptor() is None, "the loss of the server")
    away = asked(engine, space, 4)
    assert (away.answer, away.broke, dict(away.misses)) == (0, "no_server", {"no_server": 4})
    engine.close()


def test_whatever_an_engine_says_of_a_request_its_connection_lives(server: KVCoreServer) -> None:
    engine, space = connected(server)
    put(engine, space, hashes(4))
    token = engine.descriptor()["token"]
    odd: Any = [
        Asked("x" * 10_000, -1, None, "a" * 1000, "s" * 1000, {str(i): "v" * 1000 for i in range(100)}),
        Asked(7, "seven", 7, None, b"salt", {1: None}),  # type: ignore[arg-type]
        Asked("\ud800", 1 << 80, trace={"\udfff": "\ud800"}),
    ]
    for about in odd:
        lookup = engine.lookup(space, hashes(4), 0, about)
        assert lookup.wait(SOON_S)
        assert lookup.poll() == 4
        engine.release(lookup)
        engine.publish(engine.reserve(space, hashes(1, 100), 0, 1, blocks(space, 1), about.id).id)
    assert contents(engine, space, hashes(4)) == [1, 2, 3, 4]
    assert engine.descriptor()["token"] == token
    assert [len(request["id"]) for request in told("x" * MAX_WORD)] == [MAX_WORD]
    engine.close()


def test_several_servers_are_one_request_on_record(run: Path) -> None:
    with KVCoreServer(run, CONFIG, "a") as a, KVCoreServer(run, CONFIG, "b") as b:
        config = run / "engine.yaml"
        config.write_text(yaml.safe_dump({**CONFIG, "server": {"url": [a.url, b.url], "timeout": "5s"}}))
        engine = open_engine(str(config), name="several")
        assert isinstance(engine, SeveralEngine)
        until(engine.descriptor, "both servers")
        space = engine.register(dataclasses.replace(spec(), ranks=2))
        engine.clear(space)
        plan = engine.reserve(space, hashes(4), 0, 4, blocks(space, 4))
        engine.publish(plan.id)
        mine = asked(engine, space, 6)
        assert (mine.answer, mine.broke, mine.retrieved) == (4, "absent", 4 * space.chunk_tokens)
        assert mine.namespace == space.namespace
        plan = engine.reserve(space, hashes(6), 4, 6, blocks(space, 6), "r1")
        engine.publish(plan.id)
        assert mine.stored == 2
        assert [d.asked.id for d in engine.decisions.since()] == ["r1"]
        assert all(len(part.decisions) == 0 for part in engine.parts)
        engine.close()
