"""One call with an odd argument is refused, and costs nobody anything: not its link, and no other request's leases."""

import dataclasses
import math
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import CONFIG, back, blocks, connected, engine_of, hashes, put, spec

from kvcore import __version__
from kvcore.api import LayoutError
from kvcore.engine import CacheEngine, GroupSpec, ModelSpec
from kvcore.service import session, wire
from kvcore.service.connection import Connection
from kvcore.service.link import Link
from kvcore.testing.servers.kvcore import KVCoreServer

H = hashes(8)


@pytest.fixture(scope="module")
def server() -> Iterator[KVCoreServer]:
    """One server for all that must not harm it."""
    with tempfile.TemporaryDirectory(prefix="kv") as path, KVCoreServer(Path(path), CONFIG) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[CacheEngine]:
    """A cache of this process."""
    (tmp_path / "own.yaml").write_text("l1: {size: 8MiB}\nl2: []\nmin_object_size: 128KiB\n")
    engine = CacheEngine.open(str(tmp_path / "own.yaml"))
    yield engine
    engine.close()


ODD = [
    [b"a" * 20, b"b" * 20 + b"cc", b"c" * 18],
    [b"a" * 20, b"b" * 19],
    [b""],
    [b"x" * 8],
    [b"x" * 15],
    [b"x" * 65],
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: "/".join(str(len(h)) for h in odd))
def test_hashes_that_name_no_chunks_are_refused(server: KVCoreServer, own: CacheEngine, odd: list[bytes]) -> None:
    """Also where their lengths add up: they would be taken for other chunks'."""
    engine, space = connected(server)
    put(engine, space, H)
    held, token = engine.lookup(space, H), back(engine)
    for one, there in ((engine, space), (own, own.register(spec()))):
        put(one, there, [b"a" * 20, b"b" * 20, b"c" * 20])
        lookup = one.lookup(there, odd)
        assert (lookup.poll(), lookup.misses) == (0, {"refused": len(odd)})
        one.release(lookup)
        plan = one.reserve(there, odd, 0, len(odd), blocks(there, len(odd)))
        assert (plan.id, plan.copies, plan.skipped) == (0, [], {"refused": len(odd)})
    assert held.poll() == 8
    assert back(engine) == token
    engine.close()


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "a parent of 65 bytes": lambda e, s: e.reserve(s, [b"p" * 65, *H], 1, 9, blocks(s, 9)),
    "no parent": lambda e, s: e.reserve(s, [b"", *H], 1, 9, blocks(s, 9)),
    "block ids of no group": lambda e, s: e.reserve(s, H, 0, 8, []),
    "block ids of 70 groups": lambda e, s: e.reserve(s, H, 0, 8, blocks(s, 8) * 70),
    "no tokens": lambda e, s: e.prefilled(s, -1, 1.0),
    "many tokens": lambda e, s: e.prefilled(s, 1 << 70, 1.0),
    "no time": lambda e, s: e.prefilled(s, 10, math.nan),
    "a drain until never": lambda e, s: e.drain(math.nan),
    "a drain until yesterday": lambda e, s: e.drain(-math.inf),
    "a word of success": lambda e, s: e.publish(e.reserve(s, hashes(1, 900), 0, 1, blocks(s, 1)).id, "yes"),
    "a tenant that is a number": lambda e, s: e.lookup(e.register(spec(), 5), H),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_odd_argument_costs_its_own_call(server: KVCoreServer, call: Callable[[Any, Any], Any]) -> None:
    engine, space = connected(server)
    put(engine, space, H)
    held, token = engine.lookup(space, H), back(engine)
    call(engine, space)
    assert engine.drain() == 0
    assert held.poll() == 8
    assert back(engine) == token
    engine.close()


def _with(**values: Any) -> ModelSpec:
    return dataclasses.replace(spec(), **values)


SPECS = {
    "block_tokens 0": _with(block_tokens=0),
    "block_tokens 1<<30": _with(block_tokens=1 << 30),
    "ranks 0": _with(ranks=0),
    "ranks 1<<70": _with(ranks=1 << 70),
    "element_bytes 0": _with(element_bytes=0),
    "parallel": _with(parallel={"tp": 1 << 70}),
    "extra": _with(extra={"a": 1}),
    "a block of 1<<70 bytes": _with(groups=(GroupSpec(("a",), (1 << 70,)),)),
    "a block of -5 bytes": _with(groups=(GroupSpec(("a",), (-5,)),)),
    "a block of text": _with(groups=(GroupSpec(("a",), ("5",)),)),  # type: ignore[arg-type]
    "no window": _with(groups=(GroupSpec(("a",), (65536,), 0),)),
    "65 groups": _with(groups=tuple(GroupSpec((f"l{i}",), (65536,)) for i in range(65))),
    "100,000 layers": _with(groups=(GroupSpec(tuple(f"l{i}" for i in range(100_000)), (64,) * 100_000),)),
}


@pytest.mark.parametrize("odd", SPECS.values(), ids=SPECS)
def test_a_model_that_cannot_be_is_an_error_everywhere(server: KVCoreServer, own: CacheEngine, odd: ModelSpec) -> None:
    engine = engine_of(server)
    for one in (engine, own):
        with pytest.raises(LayoutError):
            one.register(odd)
    engine.close()


def test_a_model_that_is_too_long_to_tell_is_refused(server: KVCoreServer) -> None:
    for early in (True, False):
        engine = engine_of(server)
        if not early:
            back(engine)
        odd = engine.register(spec("x" * wire.MAX_FRAME))
        token = back(engine)
        assert engine.lookup(odd, H).misses == {"refused": 8}
        space = engine.register(spec())
        engine.clear(space)
        assert space.namespace
        assert back(engine) == token
        engine.close()


def test_one_space_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(session, "MAX_SPACES", 0)
    one = object.__new__(session.Session)
    one._spaces = {}
    one._connection = type("Said", (), {"send": staticmethod(said.append)})()
    one._register(wire.Register(7, spec(), "", 32, "k", ""))
    assert said[0].id == 7
    assert "more than 0 models" in said[0].refused


def test_a_servers_answer_to_what_its_clients_never_send(server: KVCoreServer) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(30)
        made.connect(str(server.socket))
        made.sendall(wire.frame(wire.Hello(wire.PROTOCOL, __version__, "raw")))
        _next(made)
        for i, (odd, chunk) in enumerate([(_with(ranks=0), 32), (_with(block_tokens=0), 32), (spec(), 33)]):
            made.sendall(wire.frame(wire.Register(i, odd, "", chunk, "k", "")))
            assert wire.decode_reply(_next(made)).refused


def test_a_long_request_is_cut_to_its_front(server: KVCoreServer) -> None:
    engine, space = connected(server)
    put(engine, space, H)
    many = [*H, *(i.to_bytes(32, "big") for i in range(100_000))]
    token = back(engine)
    lookup = engine.lookup(space, many)
    assert lookup.wait(10)
    assert lookup.poll() == 8
    assert sum(lookup.sources.values()) + sum(lookup.misses.values()) == wire.MAX_HASHES
    engine.release(lookup)
    plan = engine.reserve(space, many, 0, len(many), [range(len(many) * space.chunk_blocks)])
    engine.publish(plan.id, False)
    assert plan.skipped["too_long"] == len(many) - wire.MAX_HASHES
    assert sum(plan.skipped.values()) + len(plan.copies) == len(many)
    assert back(engine) == token
    engine.close()
    assert wire.most_hashes(1) == wire.MAX_HASHES
    assert wire.most_hashes(64) == 1024


def test_a_connections_messages_wait_for_the_others_turn() -> None:
    import select

    ours, theirs = socket.socketpair()
    heard: list[bytes] = []

    def slow(body: memoryview) -> None:
        heard.append(bytes(body))
        time.sleep(0.005)

    connection = Connection(ours, select.epoll())
    connection.on_message = slow
    messages = [bytes([i]) for i in range(5)]
    theirs.sendall(b"".join(wire.LENGTH.pack(1) + m for m in messages) + wire.LENGTH.pack(1))
    for turn in range(1, 6):
        connection.read()
        assert heard == messages[:turn]
        assert list(connection.waiting) == messages[turn:]
    theirs.sendall(b"z")
    connection.read()
    assert heard == [*messages, b"z"]
    connection.close()
    theirs.close()


def test_a_frozen_link_takes_each_caller_its_own_time() -> None:
    """Eight at once, on a server that says nothing: none waits for the others first."""
    ours, theirs = socket.socketpair()
    welcome = wire.Welcome(wire.PROTOCOL, __version__, "s", {}, 10.0, 1.0, {})
    lost: list[str] = []
    link = Link(ours, welcome, 0.4, lambda reply: None, lambda link, reason: lost.append(reason))
    stop = threading.Event()

    def trickle() -> None:  # so that no single wait is a long one
        while not stop.wait(0.05):
            theirs.send(wire.frame(wire.Searching(999)))

    threading.Thread(target=trickle, daemon=True).start()
    took: list[float] = []

    def ask(number: int) -> None:
        began = time.monotonic()
        link.ask(wire.Ping(number))
        took.append(time.monotonic() - began)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    stop.set()
    assert len(took) == 8
    assert max(took) < 5 * 0.4
    assert lost == ["timeout"]
    link.close()
    theirs.close()


def test_what_is_told_behind_a_slow_call_is_sent_after_it() -> None:
    ours, theirs = socket.socketpair()
    welcome = wire.Welcome(wire.PROTOCOL, __version__, "s", {}, 10.0, 1.0, {})
    link = Link(ours, welcome, 0.05, lambda reply: None, lambda link, reason: None)
    with link._lock:
        assert link.tell(wire.Release(1))
        assert link.ask(wire.Ping(2)) is None
    assert link.alive
    assert link.tell(wire.Release(3))
    sent = list(wire.Frames().cut(memoryview(theirs.recv(4096))))
    assert [wire.decode_request(body) for body in sent[:1]] == [wire.Release(1)]
    link.close()
    theirs.close()


def test_many_registrations_take_the_time_of_as_many(server: KVCoreServer) -> None:
    """A register looks at what has gone, not at all that there are."""
    engine, space = connected(server)

    def twenty(kind: str) -> tuple[float, Any]:
        began = time.process_time()
        made = [engine.register(spec(), f"{kind} {i}") for i in range(20)]
        return time.process_time() - began, made

    few, _ = twenty("few")
    many = range(1 << 40, (1 << 40) + 100_000)
    engine._registered.update(many)
    engine._spaces.update(dict.fromkeys(many, space))
    took, _ = twenty("many")
    assert took < 5 * few
    engine._registered.difference_update(many)
    for number in many:
        del engine._spaces[number]
    del _
    kept = []
    kept.append(engine.register(spec(), "the last"))
    assert len(engine._registered) == 2
    engine.close()


def test_much_is_cleared_turn_by_turn(folder: Path) -> None:
    """More than one turn takes, all of it, and it is counted."""
    small = _with(groups=(GroupSpec(("a",), (512,)),))
    with KVCoreServer(folder, {**CONFIG, "l1": {"size": "160MiB"}, "l2": [], "min_object_size": "512B"}) as server:
        engine, space = connected(server, small)
        other, there = connected(server)
        count = 3 * session.CLEARED + 5
        for start in range(0, count, 8192):
            keys = [i.to_bytes(32, "big") for i in range(start, min(start + 8192, count))]
            plan = engine.reserve(space, keys, 0, len(keys), blocks(space, len(keys)))
            assert len(plan.copies) == len(keys)
            engine.publish(plan.id)
        assert other.clear(there) == 0
        assert engine.clear(space) == count
        assert engine.clear(space) == 0
        engine.close()
        other.close()


def test_only_a_client_says_whether_its_server_is_up(server: KVCoreServer) -> None:
    engine, _ = connected(server)
    assert engine.stats()["kvcore_server_up"] == 1
    assert "kvcore_server_up" not in server.metrics()
    engine.close()


def _next(made: socket.socket) -> memoryview:
    (length,) = wire.LENGTH.unpack(made.recv(4, socket.MSG_WAITALL))
    return memoryview(made.recv(length, socket.MSG_WAITALL))
