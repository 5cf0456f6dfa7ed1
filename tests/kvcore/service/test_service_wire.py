"""What is no message, or another version's: it ends its own connection, and nothing else."""

import os
import random
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import CONFIG, WINDOWED, connected, contents, engine_of, hashes, put, spec, until

from kvcore import __version__
from kvcore.service import wire
from kvcore.testing.servers.kvcore import KVCoreServer

Dial = Callable[[KVCoreServer], socket.socket]
HELLO = wire.Hello(wire.PROTOCOL, __version__, "raw")


@pytest.fixture(scope="module")
def server() -> Iterator[KVCoreServer]:
    """One server for all that must not harm it."""
    with tempfile.TemporaryDirectory(prefix="kv") as path, KVCoreServer(Path(path), CONFIG) as made:
        yield made


def refused(server: KVCoreServer) -> float:
    """How many connections it has closed for what they sent."""
    return server.metrics().get('kvcore_refused_connections_total{reason="protocol"}', 0.0)


@pytest.fixture
def raw() -> Iterator[Dial]:
    """Makes connections of our own."""
    with ExitStack() as stack:

        def dial(server: KVCoreServer) -> socket.socket:
            made = stack.enter_context(socket.socket(socket.AF_UNIX))
            made.settimeout(60)
            made.connect(str(server.socket))
            return made

        yield dial


@pytest.fixture
def welcomed(raw: Dial) -> Dial:
    """Makes connections that have said who they are."""

    def dial(server: KVCoreServer) -> socket.socket:
        made = raw(server)
        made.sendall(wire.frame(HELLO))
        assert isinstance(wire.decode_welcome(memoryview(message(made))), wire.Welcome)
        return made

    return dial


def message(made: socket.socket) -> bytes:
    """The next message."""
    head = made.recv(4, socket.MSG_WAITALL)
    return made.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL)


def closed(made: socket.socket) -> bool:
    """Whether the server closes the connection, whatever it says before."""
    try:
        while made.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def memory(server: KVCoreServer) -> int:
    """Bytes of the server's own memory at its highest, without the arena."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssFile:")))


def test_a_claim_of_4_gib_is_refused_before_anything_is_taken(server: KVCoreServer, raw: Dial, welcomed: Dial) -> None:
    before, earlier = memory(server), refused(server)
    for made in (raw(server), welcomed(server)):
        made.sendall(struct.pack("<I", (1 << 32) - 1) + b"x" * 100)
        assert closed(made)
    assert memory(server) < before + (16 << 20)
    assert refused(server) == earlier + 2


def test_a_long_message_is_taken_within_the_bound_and_not_beyond(server: KVCoreServer, welcomed: Dial) -> None:
    made = welcomed(server)
    made.sendall(wire.frame(wire.Register(1, spec(), "", 32, "engine/1", "")))
    assert wire.decode_reply(memoryview(message(made))).namespace
    made.sendall(wire.frame(wire.Find(2, 1, 64, os.urandom(64 * wire.MAX_HASHES))))
    while isinstance(reply := wire.decode_reply(memoryview(message(made))), wire.Searching):
        pass
    assert sum(reply.misses.values()) == wire.MAX_HASHES
    odd = wire.Register(3, spec("x" * (wire.MAX_FRAME - 1000)), "", 32, "engine/1", "")
    made.sendall(wire.frame(odd))
    assert wire.decode_reply(memoryview(message(made))).namespace
    made.sendall(struct.pack("<I", wire.MAX_FRAME + 1))
    assert closed(made)


def test_garbage_ends_its_connection_only(server: KVCoreServer, raw: Dial, welcomed: Dial) -> None:
    engine, space = connected(server)
    put(engine, space, hashes())
    ran = random.Random(11)
    for i in range(200):
        made = welcomed(server) if i % 2 else raw(server)
        body = ran.randbytes(ran.randint(1, 300))
        made.sendall(body if i % 3 else struct.pack("<I", len(body)) + body)
        made.shutdown(socket.SHUT_WR)
        assert closed(made)
    for body in (
        b"",
        b"\x80",
        b"\x93",
        msgspec.msgpack.encode({"kind": "hello"}),
        b"\xdd\xff\xff\xff\xff",
        b"\x81" * 3000,
    ):
        made = raw(server)
        made.sendall(struct.pack("<I", len(body)) + body)
        assert closed(made)
    assert contents(engine, space, hashes()) == list(range(1, 9))
    until(lambda: server.metrics()["kvcore_sessions"] == 1, "only the engine is there")
    engine.close()


@pytest.mark.parametrize(
    "wrong",
    [
        wire.Find(5, 1, 32, bytes(33)),
        wire.Reserve(5, 1, 16, bytes(32), b"", (wire.pack_indexes([2]),)),
        wire.Reserve(5, 1, 16, bytes(32), b"", (b"123",)),
        wire.Reserve(5, 1, 16, bytes(32), b"", ()),
        wire.Number(1, 1),
        wire.Find(-1, 1, 32, b""),
        wire.Find(5, 1, 0, bytes(32)),
        wire.Find(5, 1, 15, bytes(30)),
        wire.Find(5, 1, 16, bytes(16 * (wire.MAX_HASHES + 1))),
        wire.Reserve(5, 1, 16, bytes(16 * (wire.MAX_HASHES + 1)), b"", (None,)),
        wire.Reserve(5, 1, 16, bytes(32), b"", (wire.pack_indexes([0, 1, 0]),)),
        wire.Exists(5, 1, 32, bytes(33)),
        wire.Delete(5, 1, 32, bytes(33)),
        wire.Exists(5, 2, 32, bytes(32)),  # of a space with two groups
        wire.Delete(5, 2, 32, bytes(32)),
        wire.Drain(5, float("inf")),
        HELLO,
    ],
    ids=lambda w: f"{type(w).__name__}",
)
def test_a_message_that_makes_no_sense_ends_its_connection(
    server: KVCoreServer, welcomed: Dial, wrong: msgspec.Struct
) -> None:
    made = welcomed(server)
    for number, model in ((1, spec()), (2, WINDOWED)):
        made.sendall(wire.frame(wire.Register(number, model, "", 32, "engine/1", "")))
        message(made)
    made.sendall(wire.frame(wrong))
    assert closed(made)
    until(lambda: server.metrics()["kvcore_sessions"] == 0, "its session has ended")


def test_another_clients_plans_and_lookups_are_out_of_reach(server: KVCoreServer, welcomed: Dial) -> None:
    """Numbers mean something within their session only."""
    engine, space = connected(server)
    keys = hashes(8, 500)
    plan = engine.reserve(space, keys, 0, 8, [range(8 * space.chunk_blocks)])
    made = welcomed(server)
    for number in range(100):
        made.sendall(wire.frame(wire.Publish(number, True)) + wire.frame(wire.Release(number)))
    made.sendall(wire.frame(wire.Ping(7)))
    assert wire.decode_reply(memoryview(message(made))) == wire.Number(7, 0)
    assert contents(engine, space, keys) == []
    engine.publish(plan.id)
    lookup = engine.lookup(space, keys)
    assert lookup.poll() == 8
    engine.close()


def test_who_says_nothing_is_let_go(server: KVCoreServer, raw: Dial) -> None:
    made = raw(server)
    assert closed(made)


# -- versions ----------------------------------------------------------------------------------------------------------


def of_another_version(server: KVCoreServer) -> KVCoreServer:
    """The same server, as the release after the next would be."""
    code = (
        "import sys, kvcore, kvcore.engine.attach as a; a.PROTOCOL, kvcore.__version__ = 7, '9.1';"
        "from kvcore.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    server._command = [sys.executable, "-c", code, "serve", "--config", str(server.config)]
    return server


def test_a_server_of_another_version(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Both sides say both versions; the engine runs on without a cache."""
    with of_another_version(KVCoreServer(folder, CONFIG)) as server:
        engine = engine_of(server)
        space = engine.register(spec())
        until(lambda: "refuses this engine" in caplog.text, "the refusal")
        assert engine.descriptor() is None
        assert engine.lookup(space, hashes()).poll() == 0
        assert f"this is kvcore {__version__} (protocol {wire.PROTOCOL})" in caplog.text
        assert "the server is kvcore 9.1 (protocol 7): install the same version on both sides" in caplog.text
        until(lambda: "is refused" in server.log.read_text(), "the server's line")
        assert "this server is kvcore 9.1 (protocol 7)" in server.log.read_text()
        assert f"the client is kvcore {__version__} (protocol {wire.PROTOCOL})" in server.log.read_text()
        engine.close()


@pytest.mark.parametrize("kind", ["hello", "attach", "something new"])
def test_a_client_of_another_version(server: KVCoreServer, raw: Dial, kind: str) -> None:
    """Whatever else its first message holds."""
    made = raw(server)
    made.sendall(framed({"kind": kind, "protocol": 99, "version": "12.0", "news": [1, {"x": 2}]}))
    refused = wire.decode_welcome(memoryview(message(made)))
    assert isinstance(refused, wire.Refused)
    assert "the client is kvcore 12.0 (protocol 99)" in refused.reason
    assert f"this server is kvcore {__version__} (protocol {wire.PROTOCOL})" in refused.reason
    assert closed(made)


def framed(body: Any) -> bytes:
    raw_body = msgspec.msgpack.encode(body)
    return wire.LENGTH.pack(len(raw_body)) + raw_body


# -- the pure parts ----------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_frames_are_cut_however_they_arrive(bodies: list[bytes], portions: list[int]) -> None:
    stream = b"".join(wire.LENGTH.pack(len(b)) + b for b in bodies)
    frames, found, at = wire.Frames(), [], 0
    for i in range(len(stream) + 1):
        size = portions[i % len(portions)]
        found += [bytes(b) for b in frames.cut(memoryview(stream[at : at + size]))]
        at += size
    assert found == bodies


@given(st.binary(max_size=200))
def test_no_bytes_make_a_decoder_fail_otherwise(body: bytes) -> None:
    for decode in (
        wire.decode_preamble,
        wire.decode_greeting,
        wire.decode_welcome,
        wire.decode_request,
        wire.decode_reply,
    ):
        try:
            decode(memoryview(body))
        except wire.ProtocolError:
            continue


@given(st.integers(1, 64), st.integers(0, 50))
def test_hashes_come_apart_as_they_were(size: int, count: int) -> None:
    given_hashes = [os.urandom(size) for _ in range(count)]
    assert wire.split_hashes(b"".join(given_hashes), size) == given_hashes


def test_numbers_come_back_as_they_were() -> None:
    values = [0, 1, 1 << 40, (1 << 63) - 1]
    assert list(wire.unpack_slots(wire.pack_slots(values))) == values
    assert list(wire.unpack_indexes(wire.pack_indexes([0, 5, 1 << 31]))) == [0, 5, 1 << 31]
