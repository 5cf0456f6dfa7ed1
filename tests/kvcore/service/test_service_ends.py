"""What must not outlive its end: a forked engine's connection, a session's memory; and a socket whose file is removed
while its server lives."""

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from served import Child, back, blocks, connected, contents, engine_of, hashes, nothing_held, put, spec, until

from kvcore import __version__
from kvcore.api import ServiceError
from kvcore.builtin.memory import MemoryStorage
from kvcore.config import Address
from kvcore.engine import CacheEngine
from kvcore.service import open_engine, wire
from kvcore.service.address import Listener
from kvcore.service.client import RemoteEngine
from kvcore.service.connection import Connection
from kvcore.service.server import STALLED_S, Server
from kvcore.service.session import Session
from kvcore.testing.servers import free_port
from kvcore.testing.servers.kvcore import KVCoreServer


def test_a_fork_before_the_server_answers_keeps_nothing_alive(server: KVCoreServer) -> None:
    """The engine's socket was already connected: without the parent its session ends, whatever the child does."""
    server.freeze()
    with Child("forked_while_connecting", str(server.config)) as child:
        pid = child.heard()
        try:
            server.thaw()
            assert child.heard() == 8
            assert server.metrics()["kvcore_sessions"] == 1
            child.end()
            until(lambda: nothing_held(server), "its session has ended")
            os.kill(pid, 0)  # while its child lives
            engine, space = connected(server)
            assert put(engine, space, hashes()) == 8
            engine.close()
        finally:
            os.kill(pid, signal.SIGKILL)


def test_a_socket_whose_file_is_removed_is_there_again(server: KVCoreServer) -> None:
    """And nobody else gets its place in between."""
    engine, space = connected(server)
    put(engine, space, hashes())
    server.socket.unlink()
    until(server.socket.exists, "the socket is there again")
    other = engine_of(server)
    back(other)
    assert contents(other, other.register(spec()), hashes()) == list(range(1, 9))
    assert contents(engine, space, hashes()) == list(range(1, 9))  # its connection has not noticed
    for path in (Path(f"{server.socket}.lock"), server.socket):  # that of the socket is heard of at once
        path.unlink()
    until(server.socket.exists, "also when its lock was removed, too")
    command = [sys.executable, "-m", "kvcore", "serve", "--config", str(server.config)]
    done = subprocess.run(
        [*command, "--set", f"metrics_port={free_port()}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "another server is running" in done.stderr) == (1, True)
    third = engine_of(server)
    back(third)
    for e in (engine, other, third):
        e.close()
    assert "had been removed, and is there again" in server.log.read_text()
    server.stop()
    assert not list(server.socket.parent.glob("kvcore.sock*"))


def test_a_server_that_ends_leaves_anothers_socket(folder: Path) -> None:
    address = Address(path=str(folder / "a.sock"))
    first = Listener(address)
    for name in ("a.sock", "a.sock.lock"):
        (folder / name).unlink()
    second = Listener(address)
    assert (first.lost, second.lost) == (True, False)
    with pytest.raises(ServiceError, match="another server is running"):
        first.restore()
    first.close()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address.path)
    with pytest.raises(ServiceError, match="another server is running"):
        Listener(address)
    second.close()
    assert not list(folder.iterdir())


@contextmanager
def serving(folder: Path, **flags: Any) -> Iterator[Server]:
    """A server in this process."""
    engine = CacheEngine.open(flags={"l1.size": "8MiB", "l2": "[]", "lookup_timeout": "20s", **flags})
    listener = Listener(Address(path=str(folder / "in.sock")))
    made = Server(engine, [listener])
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        yield made
    finally:
        made.stop()
        thread.join()
        made.close()
        listener.close()
        engine.close()


def test_what_was_sent_before_the_end_is_served(folder: Path) -> None:
    """A server that is busy when it is told to end still reads what engines had sent by then."""
    halted, go = threading.Event(), threading.Event()

    def halt() -> None:
        halted.set()
        go.wait(10)

    with serving(folder) as server:
        engine = open_engine(flags={"server": str(server.addresses[0]), "server.timeout": "5s"})
        space = engine.register(spec())
        back(engine)
        plan = engine.reserve(space, hashes(), 0, 8, blocks(space, 8))
        server.post(halt)
        assert halted.wait(10)
        engine.publish(plan.id)
        server.stop()
        go.set()
        until(lambda: server.engine.l1.usage()["leases"] == 0, "it is published")
        assert server.engine.l1.usage()["objects"] == len(plan.copies) > 0
        engine.close()


def test_a_session_that_has_ended_is_freed_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half a message that it has sent, and without the garbage collector."""
    ended: list[weakref.ref[Session]] = []
    real = Session.end

    def end(session: Session) -> None:
        ended.append(weakref.ref(session))
        real(session)

    monkeypatch.setattr(Session, "end", end)
    hello = wire.frame(wire.Hello(wire.PROTOCOL, __version__, "half"))
    with serving(folder) as server:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(server.addresses[0].path)
                    client.sendall(hello)
                    assert client.recv(4096)
                    client.sendall(wire.LENGTH.pack(1 << 20) + bytes(1 << 19))
                until(lambda: not server.sessions(), "it has ended")
            assert len(ended) == 3
            until(lambda: [s() for s in ended[:2]] == [None, None], "they are freed")
        finally:
            gc.enable()


def test_a_client_that_cannot_be_watched_ends_nobody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = [OSError(errno.ENOSPC, "No space left on device")]

    def watched(*arguments: Any) -> Connection:
        if lacks:
            raise lacks.pop()
        return Connection(*arguments)

    monkeypatch.setattr("kvcore.service.server.Connection", watched)
    with serving(folder) as server:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(server.addresses[0].path)
            assert client.recv(1) == b""
        engine = open_engine(flags={"server": str(server.addresses[0]), "server.timeout": "5s"})
        back(engine)
        engine.close()


def test_lookups_that_wait_cost_the_others_nothing(folder: Path) -> None:
    """They are looked after every half a second, however many messages come meanwhile."""

    class Waits:
        waiting = True
        times = 0

        def give_up(self) -> None:
            self.times += 1

    waits: Any = Waits()
    with serving(folder) as server:
        engine = open_engine(flags={"server": str(server.addresses[0]), "server.timeout": "5s"})
        space = engine.register(spec())
        back(engine)
        began = time.monotonic()
        server.post(lambda: server._searching.add(waits))
        for _ in range(200):
            engine.clear(space)
        assert waits.times <= (time.monotonic() - began) / STALLED_S + 1
        times = waits.times
        until(lambda: waits.times > times, "it is looked after while nobody asks")
        server.post(lambda: server._searching.discard(waits))
        engine.close()


def test_a_lookup_that_takes_longer_than_a_lease_is_no_miss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is resident stays leased meanwhile, and what the tiers give is leased from then on."""
    go, renewed = threading.Event(), list[Any]()
    load, renew = MemoryStorage.load, CacheEngine.renew

    def late(*arguments: Any) -> Any:
        go.wait(10)
        return load(*arguments)

    def renewing(engine: CacheEngine, lookup: Any) -> bool:
        renewed.append(lookup)
        return renew(engine, lookup)

    monkeypatch.setattr(MemoryStorage, "load", late)
    monkeypatch.setattr(CacheEngine, "renew", renewing)
    with serving(folder, l2="[{storage: memory}]") as server:
        flags = {"server": str(server.addresses[0]), "server.timeout": "10s", "min_object_size": "128KiB"}
        engine = open_engine(flags=flags)
        assert isinstance(engine, RemoteEngine)
        space = engine.register(spec())
        back(engine)
        put(engine, space, hashes())
        engine.drain()
        engine.clear(space)
        lookup = engine.lookup(space, hashes())
        assert lookup.poll() is None
        until(lambda: renewed, "its leases begin anew while it waits")
        lookup._leased -= 10 * server.engine.manager.config.l1.lease  # as if it had been asked so long ago
        go.set()
        assert lookup.wait(10)
        assert lookup.poll() == 8
        engine.release(lookup)
        engine.close()
