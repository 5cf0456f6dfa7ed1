"""The engine's end of its connection: what else comes with an answer, waiting for want of files, one lost at once."""

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from served import CONFIG, engine_of, until

from kvcore import __version__
from kvcore.service import link as links
from kvcore.service import wire
from kvcore.service.link import Link
from kvcore.testing.servers.kvcore import KVCoreServer

PATIENCE_S = 60.0


@contextmanager
def linked() -> Iterator[tuple[Link, socket.socket, list[Any]]]:
    """A link, the server's end of it, and what nobody waited for."""
    ours, servers = socket.socketpair()
    delivered: list[Any] = []
    welcome = wire.Welcome(wire.PROTOCOL, __version__, "session", {}, 60.0, 2.0, {})
    link = Link(ours, welcome, PATIENCE_S, delivered.append, lambda link, reason: None)
    with servers:
        yield link, servers, delivered
        link.close()


def test_what_comes_with_an_answer_goes_where_it_belongs() -> None:
    """A lookup's `Coming`, say, right behind `Searching`: who reads late has both at once."""
    searching, coming = wire.Searching(7), wire.Coming(7, 3, {"disk": 3})
    with linked() as (link, server, delivered):
        server.sendall(wire.frame(searching) + wire.frame(coming))
        assert link.ask(wire.Find(7, 1, 16, bytes(16))) == searching
        assert delivered == [coming]


def test_for_want_of_files_who_waits_looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(links, "Wake", lack)
    with linked() as (link, server, delivered):
        assert not link.wait(lambda: bool(delivered), 0)
        server.sendall(wire.frame(wire.Number(1, 5)))
        assert link.wait(lambda: bool(delivered), PATIENCE_S)
        read = threading.Event()  # by another thread, which cannot wake us
        looked: list[bool] = []

        def arrived() -> bool:
            looked.append(read.is_set())
            if len(looked) == 2:
                read.set()
            return looked[-1]

        assert link.wait(arrived, PATIENCE_S)
        assert looked == [False, False, True]


def test_a_server_that_is_lost_by_the_first_who_uses_it_is_not_up(folder: Path) -> None:
    """Another thread may use a connection before the one that made it has said that there is one."""
    before: list[float] = []

    class Used(threading.Event):
        def set(self) -> None:
            before.append(engine.stats()["kvcore_server_up"])
            assert engine._link is not None
            engine._link.lose("closed")
            super().set()

    server = KVCoreServer(folder, CONFIG)
    engine = engine_of(server)
    engine._up = Used()
    with server:
        until(lambda: len(before) > 1, "it has been connected again", PATIENCE_S)
        engine.close()
    assert before[1] == 0
