"""A client hears what comes into the server's cache and leaves it, of its own spaces."""

import threading
from collections.abc import Sequence

import pytest
from served import back, connected, contents, engine_of, hashes, put, spec, until

from kvcore.api import ObjectEvent, ObjectKey
from kvcore.service import wire
from kvcore.service.client import RemoteEngine
from kvcore.service.link import Link
from kvcore.service.news import MAX_OBJECTS, Box
from kvcore.testing.servers.kvcore import KVCoreServer


class Holdings:
    """Where objects are, as one that asks knows it."""

    def __init__(self) -> None:
        self.held: set[tuple[str, bytes]] = set()
        self.lost_times = 0

    def stored(self, events: Sequence[ObjectEvent]) -> None:
        self.held |= {(e.tier, e.key.chunk_hash) for e in events}

    def evicted(self, events: Sequence[ObjectEvent]) -> None:
        self.held -= {(e.tier, e.key.chunk_hash) for e in events}

    def lost(self) -> None:
        self.lost_times += 1
        self.held.clear()

    def of(self, tier: str) -> set[bytes]:
        return {h for t, h in self.held if t == tier}


def test_what_any_engine_stores_and_what_leaves_is_heard(server: KVCoreServer) -> None:
    listener, space = connected(server)
    writer, same = connected(server)
    stranger, other = connected(server, tenant="other")
    holdings = Holdings()
    listener.observe("test", holdings)
    keys = hashes(5)
    put(writer, same, keys)
    put(stranger, other, hashes(3, 100))
    writer.drain()
    listener.hear()
    assert holdings.of("l1") == holdings.of("memory") == set(keys)
    listener.clear(space)

    def gone() -> bool:
        listener.hear()
        return not holdings.of("l1")

    until(gone, "the news of the removal")
    assert holdings.of("memory") == set(keys)
    assert contents(writer, same, keys) == [1, 2, 3, 4, 5]
    listener.hear()
    assert holdings.of("l1") == set(keys)
    assert holdings.lost_times == 0
    for engine in (listener, writer, stranger):
        engine.close()


def test_a_new_server_makes_all_that_was_heard_untrue(server: KVCoreServer) -> None:
    engine = engine_of(server)
    holdings = Holdings()
    engine.observe("test", holdings)  # before there is a connection
    space = engine.register(spec())
    token = back(engine)
    put(engine, space, hashes(3))
    engine.drain()
    engine.hear()
    assert holdings.of("l1") == set(hashes(3))
    server.kill()
    server.start()
    back(engine, but=token)
    put(engine, space, hashes(2))
    engine.drain()
    engine.hear()
    assert holdings.lost_times == 1
    engine.hear()
    assert holdings.of("l1") == set(hashes(2))
    server.kill()
    until(lambda: engine.descriptor() is None, "the end of the server")
    for _ in range(3):
        engine.hear()
    assert (holdings.lost_times, holdings.held) == (2, set())
    engine.close()


def test_who_begins_to_listen_while_a_connection_is_made_misses_nothing(
    server: KVCoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdings, listening = Holdings(), list[threading.Thread]()

    class Made(Link):
        @property
        def alive(self) -> bool:
            """Asked for as the last thing before it is used."""
            if self._alive and not listening:
                listening.append(threading.Thread(target=lambda: opened().observe("test", holdings)))
                listening[0].start()
                listening[0].join(1)  # it is done, or waits for us
            return self._alive

        @alive.setter
        def alive(self, value: bool) -> None:
            self._alive = value

    def opened() -> RemoteEngine:
        until(lambda: engines, "the engine is there")
        return engines[0]

    engines: list[RemoteEngine] = []
    monkeypatch.setattr("kvcore.service.client.Link", Made)
    engines.append(engine_of(server))
    back(engines[0])
    listening[0].join()
    space = engines[0].register(spec())
    put(engines[0], space, hashes(3))
    engines[0].hear()
    assert holdings.of("l1") == set(hashes(3))
    engines[0].close()


@pytest.mark.parametrize("known", [True, False])
def test_what_is_kept_for_a_client_is_bounded(known: bool) -> None:
    box = Box(lambda namespace: known)
    for i in range(MAX_OBJECTS // 1000 + 5):
        box.put(True, [ObjectEvent(ObjectKey(bytes(16), h, 0), "l1", 1) for h in hashes(1000, 1000 * i)])
    news, lost = box.take()
    assert lost == known
    assert sum(len(heard.hashes) for heard in news) == (1000 * (MAX_OBJECTS // 1000) if known else 0)
    box.put(False, [ObjectEvent(ObjectKey(bytes(16), hashes(1)[0], 0), "l1", 1)])
    assert [heard.here for heard in box.take()[0]] == [False] * known


@pytest.mark.parametrize("alike", [True, False])
def test_what_is_kept_fits_into_one_message(alike: bool) -> None:
    """Also what goes all at once, as when its time is over; and what comes by turns from two tiers with long names."""
    box = Box(lambda namespace: True)
    tiers = ["a" * 64, "b" * 64]
    keys = [ObjectKey(bytes(16), i.to_bytes(4) * 16, 0) for i in range(4 * MAX_OBJECTS)]
    if alike:
        box.put(False, [ObjectEvent(key, tiers[0], 1) for key in keys])
    else:
        for i, key in enumerate(keys):
            box.put(False, [ObjectEvent(key, tiers[i % 2], 1)])
    told = wire.Told(1, *box.take())
    assert told.lost
    assert len(wire.frame(told)) - wire.LENGTH.size <= wire.MAX_FRAME
