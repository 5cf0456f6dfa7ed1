"""The server's end of one connection: bytes in and out, never waiting."""

import socket
import time
from collections import deque
from collections.abc import Callable
from select import EPOLLIN, EPOLLOUT, epoll

import msgspec

from kvcore.service.wire import MAX_GREETING, Frames, frame

SLICE_S = 0.002
"""For how long one connection's messages are handled before it is the others' turn."""
MAX_UNSENT = 16 << 20
"""Bytes that may wait for a client which does not read; then its connection ends."""
_buffer = memoryview(bytearray(256 << 10))  # the server has one thread: what is received is cut up before the next


class Connection:
    """One accepted socket, watched by `watch`. Methods raise `OSError` (or `EOFError`) when the other side is gone."""

    def __init__(self, made: socket.socket, watch: epoll) -> None:
        made.setblocking(False)
        self.socket = made
        self.fd = made.fileno()
        self.frames = Frames(MAX_GREETING)
        self.on_message: Callable[[memoryview], None] = _nobody
        """Called with each message."""
        self.on_close: Callable[[], None] = _nothing
        """Called once, when the connection has ended."""
        self.waiting: deque[bytes] = deque()
        """Messages that have arrived, and whose turn is with the next `read`."""
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._watch = watch
        watch.register(self.fd, EPOLLIN)

    def read(self) -> None:
        """Hand on the messages that have arrived, of one portion: more of it shows with the next look at the socket.
        What takes longer than a turn stays `waiting`."""
        end = time.monotonic() + SLICE_S
        if self.waiting:
            while self.waiting and time.monotonic() < end:
                self.on_message(memoryview(self.waiting.popleft()))
            return
        try:
            count = self.socket.recv_into(_buffer)
        except BlockingIOError:
            return
        if not count:
            raise EOFError
        late = False
        for body in self.frames.cut(_buffer[:count]):
            if late:
                self.waiting.append(bytes(body))
            else:
                self.on_message(body)
                late = time.monotonic() >= end

    def send(self, message: msgspec.Struct) -> None:
        """Send now what goes at once, and the rest when there is room."""
        self._send(memoryview(frame(message)))

    def send_file(self, message: msgspec.Struct, fd: int) -> None:
        """Send a message, and a file with it. Only as the first of a connection, when there is room."""
        data = frame(message)
        if socket.send_fds(self.socket, [data], [fd]) < len(data):
            raise OSError("the first message did not fit into the socket")

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        while self._unsent:
            sent = self._try(self._unsent[0])
            self._unsent_bytes -= sent
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
                return
            self._unsent.popleft()
        self._watch.modify(self.fd, EPOLLIN)

    def close(self) -> None:
        """End it. Idempotent."""
        if self.socket.fileno() >= 0:
            self._watch.unregister(self.fd)
            self.socket.close()
            self.frames = Frames(0)
            self._unsent.clear()
            on_close, self.on_close, self.on_message = self.on_close, _nothing, _ignored
            on_close()  # both led back to us: without them nothing waits for the garbage collector

    def _send(self, data: memoryview) -> None:
        sent = 0 if self._unsent else self._try(data)
        if sent == len(data):
            return
        if not self._unsent:
            self._watch.modify(self.fd, EPOLLIN | EPOLLOUT)
        self._unsent.append(data[sent:])
        self._unsent_bytes += len(data) - sent
        if self._unsent_bytes > MAX_UNSENT:
            raise OSError("it does not read what it is sent")

    def _try(self, data: memoryview) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0


def _nobody(message: memoryview) -> None:
    raise AssertionError("a connection without a reader")


def _ignored(message: memoryview) -> None:
    pass


def _nothing() -> None:
    pass
