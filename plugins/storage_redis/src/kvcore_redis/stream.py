"""Sockets with a deadline, plain and TLS."""

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence

from kvcore.api import StorageError
from kvcore.api.buffers import Part, drop

_IOV_MAX = 1024
_SLACK = 1.05
_TLS_RECORD_BYTES = 16 << 10


class Lost(ConnectionError):
    """The connection broke after it had been made: on another one the same commands may do."""


class Stream:
    """A connected socket; every operation ends by `deadline` (`time.monotonic()`), with `OSError` if need be.

    The kernel keeps the time (`SO_RCVTIMEO`): Python's own timeouts cost a `poll` for each operation. It may be late by
    `_SLACK`, so that it need not be told at each what is left.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._limits = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.deadline = 0.0
        sock.settimeout(None)

    def send(self, parts: Sequence[Part]) -> None:
        """Send all of `parts`."""
        while parts:
            self._limit(socket.SO_SNDTIMEO)
            parts = drop(parts, self._socket.sendmsg(parts[:_IOV_MAX]))

    def receive(self, into: memoryview) -> int:
        """At least one byte; how many."""
        self._limit(socket.SO_RCVTIMEO)
        return _some(self._socket.recv_into(into))

    def receive_all(self, views: Sequence[memoryview]) -> None:
        """Fill all of `views`."""
        while views:
            self._limit(socket.SO_RCVTIMEO)
            # What has arrived by now. MSG_WAITALL was slower, by up to a half: the kernel wakes us for every segment.
            views = drop(views, _some(self._socket.recvmsg_into(views[:_IOV_MAX])[0]))

    @property
    def quiet(self) -> bool:
        """Nothing has arrived, not even the end: the peer has not closed it."""
        return not self._poll.poll(0)

    def shut(self) -> None:
        """End it for whoever waits in it. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket."""
        self._socket.close()

    def _limit(self, option: int) -> None:
        left = self.deadline - time.monotonic()
        if not left <= self._limits[option] <= left * _SLACK:
            limit = time_left(self.deadline) * _SLACK
            seconds = int(limit)
            microseconds = max(1, int((limit - seconds) * 1e6))  # 0 and 0 would be for ever
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, microseconds))
            self._limits[option] = limit


class TLSStream(Stream):
    """The same over TLS, whose library knows neither vectors nor the kernel's timeouts."""

    _socket: ssl.SSLSocket

    def send(self, parts: Sequence[Part]) -> None:
        for part in _records(parts):
            rest = memoryview(part)
            while rest:
                self._socket.settimeout(time_left(self.deadline))
                rest = rest[self._socket.send(rest) :]

    def receive(self, into: memoryview) -> int:
        self._socket.settimeout(time_left(self.deadline))
        return _some(self._socket.recv_into(into))

    def receive_all(self, views: Sequence[memoryview]) -> None:
        while views:
            views = drop(views, self.receive(views[0]))

    @property
    def quiet(self) -> bool:
        return self._socket.pending() == 0 and super().quiet


def broken(error: OSError) -> OSError | StorageError:
    """What a socket raised in the middle of a call: a `TimeoutError`, a `Lost`, or that we are not wanted."""
    if isinstance(error, BlockingIOError | TimeoutError):  # the first is how the kernel's timeouts show
        return TimeoutError("no answer in time")
    if isinstance(error, ssl.SSLError):
        if "CERTIFICATE_REQUIRED" in (error.reason or ""):  # TLS 1.3 says so only after the handshake
            return StorageError("the server wants a certificate of its clients: give `tls_cert`")
        return Lost(f"TLS: {error.reason or error}")
    return error if isinstance(error, Lost) else Lost(reason(error))


def reason(error: Exception) -> str:
    """An error in words, without its number."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def time_left(deadline: float) -> float:
    """Seconds until `deadline`. Raises `TimeoutError` when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _some(count: int) -> int:
    if count == 0:
        raise Lost("the server closed the connection")
    return count


def _records(parts: Sequence[Part]) -> Iterator[Part]:
    """`parts`, small neighbours joined: each one becomes a record of its own, and a packet."""
    small: list[Part] = []
    nbytes = 0
    for part in parts:
        if nbytes + len(part) > _TLS_RECORD_BYTES:
            yield b"".join(small)
            small, nbytes = [], 0
        if len(part) > _TLS_RECORD_BYTES:
            yield part
        else:
            small.append(part)
            nbytes += len(part)
    yield b"".join(small)
