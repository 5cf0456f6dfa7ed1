"""The plugin in a real cache: alone, over a server, and with users who come back."""

import itertools
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.api import Brought
from kvcore.engine import CacheEngine, Space
from kvcore.service import open_engine
from kvcore.service.client import RemoteEngine
from kvcore.testing.chunks import hashes, publish, put, spec
from kvcore.testing.servers.kvcore import KVCoreServer
from kvcore_prefetch.queued import ENOUGH, MOST_S, PAUSE_S, Queued

SOON_S = 60.0
CONFIG: dict[str, Any] = {
    "l1": {"size": "8MiB"},
    "l2": [{"storage": "memory", "read": "always"}],
    "min_object_size": "128KiB",
    "lookup_timeout": "20s",
    "hooks": ["prefetch"],
}


def until(true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline, f"not within {SOON_S:g} s: {what}"
        time.sleep(0.01)


@pytest.fixture
def engine() -> Iterator[CacheEngine]:
    engine = CacheEngine.open(flags=CONFIG)
    yield engine
    engine.close()
    assert "kvcore-prefetch" not in {t.name for t in threading.enumerate()}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a socket's is."""
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        yield Path(path)


def ask(engine: CacheEngine, space: Space, keys: list[bytes]) -> dict[str, int]:
    """As an engine does for a request; where its chunks were."""
    lookup = engine.lookup(space, keys)
    assert lookup.wait(SOON_S)
    end = lookup.poll()
    if end:
        engine.retrieve(lookup, 0, [list(range(len(keys)))])
    engine.release(lookup)
    publish(engine, space, keys[end:])
    return dict(lookup.sources)


def test_what_a_queued_request_needs_is_there_when_it_is_looked_up(engine: CacheEngine) -> None:
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.clear(space)
    engine.queued(space, hashes())
    until(lambda: engine.prefetcher.brought("queued").brought == 8, "all are brought")
    assert ask(engine, space, hashes()) == {"l1": 8}
    until(lambda: engine.prefetcher.brought("queued") == Brought(8, 8, 0), "they are used")


def test_over_a_server(folder: Path) -> None:
    with KVCoreServer(folder, CONFIG) as server:
        engine = open_engine(str(server.config), flags={"server.timeout": "5s"}, name="test")
        assert isinstance(engine, RemoteEngine)
        space = engine.register(spec())
        assert engine.wait_ready(SOON_S)
        put(engine, space, hashes())  # type: ignore[arg-type]
        engine.clear(space)
        engine.queued(space, hashes())
        name = 'kvcore_prefetch_objects_total{became="brought",cause="queued"}'
        until(lambda: server.metrics().get(name) == 8, "all are in the server's L1")
        lookup = engine.lookup(space, hashes())
        assert lookup.wait(SOON_S)
        assert lookup.sources == {"l1": 8}
        engine.release(lookup)
        engine.queued(space, [])
        engine.queued(space, [b"short"])  # refused here: the server would end the connection
        assert engine.drain() == 0
        engine.close()


def test_a_server_that_has_no_use_for_it_is_not_told(folder: Path) -> None:
    with KVCoreServer(folder, {k: v for k, v in CONFIG.items() if k != "hooks"}) as server:
        engine = open_engine(str(server.config), name="test")
        assert isinstance(engine, RemoteEngine)
        space = engine.register(spec())
        assert engine.wait_ready(SOON_S)
        assert engine._link is not None
        assert not engine._link.welcome.queued
        engine.queued(space, hashes())
        assert engine.drain() == 0
        engine.close()


def test_users_who_come_back_find_their_conversations_in_l1(engine: CacheEngine) -> None:
    """Four of them, each every second, while documents fill L1 several times in between."""
    space = engine.register(spec())
    documents = itertools.count(1)
    talks = [(hashes(6, 100_000 * n), 0.25 * n) for n in range(4)]
    begun = time.monotonic()
    turns = sorted((at + n, keys) for keys, at in talks for n in range(1000))
    deadline = begun + 2 * SOON_S
    found: list[dict[str, int]] = []
    for at, keys in turns:
        for n in itertools.count():
            if n >= 2 and time.monotonic() >= begun + at:  # on a slow machine they come back later, not too soon
                break
            ask(engine, space, hashes(12, 10**6 + 12 * next(documents)))
            time.sleep(0.1)
        found.append(ask(engine, space, keys))
        if engine.prefetcher.brought("next_turn").used >= 12:
            break
        assert time.monotonic() < deadline, engine.prefetcher.brought("next_turn")
    assert any("memory" in sources for sources in found[4:])  # the documents do push them out
    assert {"l1": 6} in found
    name = 'kvcore_prefetch_objects_total{cause="next_turn",became="used"}'
    assert engine.stats()[name] >= 12


def test_what_is_of_no_use_for_queued_requests_is_let_be() -> None:
    so_far = Brought()
    queued = Queued(0.25, lambda: so_far, logging.getLogger("kvcore"))
    assert queued.helps(0.0)
    so_far = Brought(ENOUGH, ENOUGH - 1, 0)
    assert queued.helps(1.0)  # not yet enough to say
    so_far = Brought(2 * ENOUGH, ENOUGH, ENOUGH // 2)
    assert queued.helps(2.0)
    so_far = Brought(4 * ENOUGH, ENOUGH + 5, 2 * ENOUGH)
    assert not queued.helps(3.0)
    assert not queued.helps(2.0 + PAUSE_S)
    assert queued.helps(3.0 + PAUSE_S)
    so_far = Brought(6 * ENOUGH, ENOUGH + 5, 4 * ENOUGH)
    assert not queued.helps(100.0)
    assert not queued.helps(100.0 + 1.5 * PAUSE_S)  # twice as long
    assert queued.helps(100.0 + 2 * PAUSE_S)
    assert MOST_S > PAUSE_S


@pytest.mark.parametrize("options", [{"queued": False}, {"next_turn": False}])
def test_each_of_both_can_be_left_out(options: dict[str, Any]) -> None:
    engine = CacheEngine.open(flags={**CONFIG, "hooks": [{"plugin": "prefetch", **options}]})
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.clear(space)
    names = {t.name for t in threading.enumerate()}
    assert ("kvcore-prefetch" in names) == options.get("next_turn", True)
    engine.queued(space, hashes())
    if options.get("queued", True):
        until(lambda: engine.prefetcher.brought("queued").brought == 8, "all are brought")
    else:
        assert not engine.prefetcher._wanted
    engine.close()
