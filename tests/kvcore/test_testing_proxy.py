"""The relay of the server helpers, before a server that answers each byte with a thousand."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvcore.testing.servers.proxy import Proxy, Way

ANSWER = bytes(range(250)) * 4


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client:
            while request := client.recv(1 << 16):
                client.sendall(ANSWER * len(request))

    def accept() -> None:
        try:
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
        except OSError:
            return

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def ask(proxy: Proxy, count: int = 1) -> bytes:
    """What comes back before the end, at most the whole answer."""
    with socket.create_connection(("127.0.0.1", proxy.port), 20) as client:
        client.sendall(b"?" * count)
        got = b""
        while len(got) < count * len(ANSWER) and (data := client.recv(1 << 16)):
            got += data
        return got


def test_it_relays_and_counts(port: int) -> None:
    with Proxy(port) as proxy:
        assert ask(proxy) == ANSWER
        assert ask(proxy, 70_000) == ANSWER * 70_000
        assert proxy.accepted == 2


def test_it_cuts_replies_so_often(port: int) -> None:
    with Proxy(port) as proxy:
        proxy.cut_replies_after, proxy.cuts_left = 300, 2
        assert [len(ask(proxy)) for _ in range(3)] == [300, 300, len(ANSWER)]


def test_it_cuts_requests(port: int) -> None:
    with Proxy(port) as proxy:
        proxy.cut_requests_after = 2
        assert ask(proxy, 2) == ANSWER * 2
        assert len(ask(proxy, 3)) < len(ANSWER) * 3


def test_replies_trickle(port: int) -> None:
    with Proxy(port) as proxy:
        proxy.reply_bytes_s = 10_000
        begun = time.monotonic()
        assert ask(proxy) == ANSWER
        assert time.monotonic() - begun >= 0.1


def test_a_subclass_reads_along_and_begins_to_count_anew(port: int) -> None:
    class Exchanges(Proxy):
        def passes(self, way: Way, data: bytes, passed: dict[Way, int]) -> None:
            if way == "requests":
                passed.update(requests=0, replies=0)

    with Exchanges(port) as proxy, socket.create_connection(("127.0.0.1", proxy.port), 20) as client:
        proxy.cut_replies_after = len(ANSWER)
        for _ in range(3):
            client.sendall(b"?")
            got = b""
            while len(got) < len(ANSWER):
                data = client.recv(1 << 16)
                assert data, "the connection was cut"
                got += data


def test_its_end_ends_connections(port: int) -> None:
    with Proxy(port) as proxy:
        client = socket.create_connection(("127.0.0.1", proxy.port), 20)
        client.sendall(b"?")
        assert client.recv(1)
    with client:
        while data := client.recv(1 << 16):
            assert ANSWER.endswith(data)
