"""A TCP relay between a storage and its server: connections break on demand, replies trickle, TLS ends."""

import contextlib
import os
import socket
import ssl
import threading
import time
from types import TracebackType
from typing import Literal, Self

CHUNK_BYTES = 64 << 10
Way = Literal["requests", "replies"]


class Proxy:
    """Relays connections to `port` of this machine. A context manager; its attributes may change while it runs.

    Args:
        tls: end TLS here, as a terminator in front of the server does.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = port
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        """Connections so far."""
        self.cut_replies_after: int | None = None
        """So many bytes of replies pass per connection, then it is cut."""
        self.cut_requests_after: int | None = None
        """The same for requests."""
        self.cuts_left = 1 << 30
        """How many connections are cut before all pass."""
        self.reply_bytes_s: int | None = None
        """So fast are replies passed on."""
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def passes(self, way: Way, data: bytes, passed: dict[Way, int]) -> None:
        """Called before each piece passes, for subclasses that read along; it does nothing.

        Args:
            passed: the bytes of this connection that have passed, which the limits are about. A subclass that knows
                where a request begins sets both to 0 there, so that the limits are about one exchange.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        with self._lock:
            for sock in self._sockets:
                _end(sock)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(client)
            try:
                if self._tls is not None:
                    client = self._tls.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
                    stack.enter_context(client)
                    _shake_hands(client)
                server = stack.enter_context(socket.create_connection(("127.0.0.1", self._target)))
            except OSError:
                return
            with self._lock:
                self._sockets += [client, server]
            passed: dict[Way, int] = {"requests": 0, "replies": 0}
            back = threading.Thread(target=self._pump, args=(server, client, "replies", passed), daemon=True)
            back.start()
            self._pump(client, server, "requests", passed)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket, way: Way, passed: dict[Way, int]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(self._piece_bytes(way)):
                self.passes(way, data, passed)
                limit = self.cut_requests_after if way == "requests" else self.cut_replies_after
                if limit is not None and passed[way] + len(data) > limit and self._cut():
                    target.sendall(data[: max(0, limit - passed[way])])
                    break
                passed[way] += len(data)  # before it is sent: the answer may be quicker
                target.sendall(data)
        _end(source)
        _end(target)

    def _piece_bytes(self, way: Way) -> int:
        if self.reply_bytes_s is None or way == "requests":
            return CHUNK_BYTES
        time.sleep(0.01)
        return max(1, self.reply_bytes_s // 100)

    def _cut(self) -> bool:
        with self._lock:
            self.cuts_left -= 1
            return self.cuts_left >= 0


def _shake_hands(sock: ssl.SSLSocket) -> None:
    try:
        sock.do_handshake()
    except OSError:
        with socket.socket(fileno=os.dup(sock.fileno())) as raw:
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(CHUNK_BYTES):  # else closing would reset the connection, and the alert be lost
                pass
        raise


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
