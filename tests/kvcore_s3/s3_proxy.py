"""A TCP relay between a storage and its server: it counts requests, cuts connections, and ends TLS."""

import contextlib
import re
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

CHUNK_BYTES = 64 << 10
_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) \S+ HTTP/1\.1\r\n")
_LARGE_BYTES = 100_000


class Proxy:
    """Relays connections to `port` of this machine. A context manager.

    Args:
        tls: end TLS here, as a load balancer in front of a server does.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = port
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.requests: Counter[str] = Counter()
        """How many requests of each method have passed."""
        self.heads: list[bytes] = []
        """The head of each request."""
        self.cut_replies_after: int | None = None
        """A reply of more bytes is cut there, with its connection."""
        self.cut_requests_after: int | None = None
        """The same for requests."""
        self.cuts_left = 1 << 30
        """How many are cut before all pass."""
        self.meanwhile: Callable[[], object] | None = None
        """Called once in each large reply, when its head and some of its body have passed."""
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

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
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(client)
            try:
                if self._tls is not None:
                    client = stack.enter_context(self._tls.wrap_socket(client, server_side=True))
                server = stack.enter_context(socket.create_connection(("127.0.0.1", self._target)))
            except OSError:
                return
            with self._lock:
                self._sockets += [client, server]
            counts = {"replies": 0, "requests": 0, "called": 0}  # bytes of the exchange under way on this connection
            back = threading.Thread(target=self._pump, args=(server, client, counts, "replies"), daemon=True)
            back.start()
            self._pump(client, server, counts, "requests")
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket, counts: dict[str, int], way: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(CHUNK_BYTES):
                if way == "requests" and (head := _REQUEST.match(data)):
                    counts.update(replies=0, requests=0, called=0)
                    with self._lock:
                        self.requests[head[1].decode()] += 1
                        self.heads.append(data.partition(b"\r\n\r\n")[0])
                passed, counts[way] = counts[way], counts[way] + len(data)
                if way == "replies" and counts[way] > _LARGE_BYTES and not counts["called"]:
                    counts["called"] = 1
                    if (call := self.meanwhile) is not None:
                        call()
                limit = getattr(self, f"cut_{way}_after")
                if limit is not None and counts[way] > limit and self._cut():
                    target.sendall(data[: max(0, limit - passed)])
                    break
                target.sendall(data)
        _end(source)
        _end(target)

    def _cut(self) -> bool:
        with self._lock:
            self.cuts_left -= 1
            return self.cuts_left >= 0


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
