"""The engine's end of its connection to a server: one message at a time, each with a deadline.

The time a call may take begins with the call: whoever has to wait for others goes on without an answer by then.

Whoever asks reads the answer himself, so that no other thread has to be woken for it; what else arrives on the way
(answers of lookups that tiers were asked for) goes where it belongs. A link that has failed once is never used again.
"""

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from kvcore.service import wire
from kvcore.service.wake import Wake

_BUFFER_BYTES = 64 << 10
_WHOLE = 0.9
_UNWOKEN_S = 0.01
"""How often who waits looks for what another thread has read for it, where there is no file to be woken by."""


class Link:
    """A connection that the server has welcomed. Thread-safe; no method raises.

    Args:
        made: the connected socket, blocking.
        welcome: what the server said of itself.
        timeout_s: how long an answer may take.
        on_reply: called with each message that nobody waits for. It must not use the link.
        on_lost: called once with the link and why it was lost: `closed`, `timeout` or `protocol`. The same holds.
    """

    def __init__(
        self,
        made: socket.socket,
        welcome: wire.Welcome,
        timeout_s: float,
        on_reply: Callable[[Any], None],
        on_lost: "Callable[[Link, str], None]",
    ) -> None:
        self.welcome = welcome
        self.token = welcome.session
        self.timeout_s = timeout_s
        self.alive = True
        self._socket = made
        self._lock = threading.Lock()
        self._end = threading.Lock()
        self._frames = wire.Frames()
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._unsent: deque[msgspec.Struct] = deque()
        self._waiters: list[Wake] = []
        self._heard = time.monotonic()
        self._pinged = 0.0
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def tell(self, message: msgspec.Struct) -> bool:
        """Send what is not answered. False when the server is gone. Behind others that take too long it is left to
        them to send."""
        self._unsent.append(message)
        if self._lock.acquire(timeout=self.timeout_s):
            try:
                return self._flush()
            finally:
                self._lock.release()
        return self.alive

    def ask(self, message: Any) -> Any | None:
        """Send a message with an `id`, and wait for the first answer with the same; what else comes with it goes where
        it belongs. None when the server is gone, or when others have used the link for half of the time: then the
        message is not sent, and the link lives on."""
        deadline = time.monotonic() + self.timeout_s
        if not self._lock.acquire(timeout=self.timeout_s / 2):  # the rest is the server's, which is gone if it is late
            return None
        try:
            if not self._flush() or not self._send(message, deadline):
                return None
            answer = None
            while answer is None and self.alive:
                for reply in self._receive(deadline):
                    if answer is None and reply.id == message.id:
                        answer = reply
                    else:
                        self._deliver(reply)
            return answer
        finally:
            self._lock.release()

    def listen(self) -> None:
        """Take what has arrived, for whoever waits for it. Never waits itself. A server that has not been heard of is
        asked whether it is there, and lost when it does not say so in time."""
        if not self._lock.acquire(blocking=False):
            return  # another thread waits for an answer, and takes what else comes
        try:
            self._flush()
            for reply in self._receive(None):
                self._deliver(reply)
            now = time.monotonic()
            if self._pinged > self._heard:
                if now - self._pinged > self.timeout_s:
                    self.lose("timeout")
            elif now - self._heard > self.timeout_s:
                self._pinged = now
                self._send(wire.Ping(0))
        finally:
            self._lock.release()

    def wait(self, arrived: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `arrived`, or the link is lost, but at most for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        longest_s = self.timeout_s
        woken: Wake | None = None
        poll = select.poll()
        try:
            woken = Wake()
            poll.register(woken, select.POLLIN)
            self._waiters.append(woken)  # before the first look: a thread that reads our answer then wakes us
        except OSError:  # out of files: nobody can wake us
            longest_s = min(longest_s, _UNWOKEN_S)
        try:
            with suppress(ValueError, OSError):  # closed, and so lost
                poll.register(self._socket, select.POLLIN)
            while True:
                self.listen()
                if arrived() or not self.alive:
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                poll.poll(max(1, round(min(left, longest_s) * 1000)))
                if woken is not None:
                    woken.clear()
        finally:
            if woken is not None:
                self._waiters.remove(woken)
                woken.close()

    def watch(self, wake: Wake) -> None:
        """Sleep until the link is lost, which the server's end is, or until `wake` is set."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.register(self._socket, select.POLLRDHUP)
        if self._socket.fileno() in [fd for fd, _ in poll.poll()]:
            self.lose("closed")

    def lose(self, reason: str) -> None:
        """Use it no more. Idempotent."""
        if not self._end.acquire(blocking=False):
            return
        self.alive = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever sleeps on it wakes
        self._on_lost(self, reason)
        self._wake()

    def close(self) -> None:
        """Let go of the socket. By its owner, once it is lost or to lose it."""
        self.lose("closed")
        self._socket.close()

    def forked(self) -> None:
        """In the child of a fork: the connection is the parent's."""
        self.alive = False
        self._waiters = []  # one of the parent's threads may be waking them
        with suppress(OSError):
            os.close(self._socket.detach())

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _flush(self) -> bool:
        while self._unsent:
            self._send(self._unsent.popleft())
        return self.alive

    def _send(self, message: msgspec.Struct, deadline: float | None = None) -> bool:
        if not self.alive:
            return False
        data = memoryview(wire.frame(message))
        if deadline is None:
            deadline = time.monotonic() + self.timeout_s
        while data:
            try:
                data = data[self._socket.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if not self._ready(select.POLLOUT, deadline):
                    self.lose("timeout")
                    return False
            except OSError:
                self.lose("closed")
                return False
        return True

    def _ready(self, event: int, deadline: float) -> bool:
        left = deadline - time.monotonic()
        poll = select.poll()
        with suppress(ValueError, OSError):  # closed, as its use says
            poll.register(self._socket, event)
            return left > 0 and bool(poll.poll(left * 1000))
        return True

    def _receive(self, deadline: float | None) -> list[Any]:
        """What has arrived. With a deadline waits for something; the link is lost when there is nothing by then."""
        if not self.alive:
            return []
        try:
            # The socket's own time-out is that of a whole call, and waiting by it is the fastest.
            whole = deadline is not None and deadline - time.monotonic() > _WHOLE * self.timeout_s
            if deadline is not None and not whole:
                self._ready(select.POLLIN, deadline)
            count = self._socket.recv_into(self._buffer, 0, 0 if whole else socket.MSG_DONTWAIT)
            if count:
                self._heard = time.monotonic()
                return [wire.decode_reply(body) for body in self._frames.cut(self._buffer[:count])]
            self.lose("closed")
        except BlockingIOError:
            if deadline is not None and time.monotonic() >= deadline:
                self.lose("timeout")
        except OSError:
            self.lose("closed")
        except wire.ProtocolError:
            self.lose("protocol")
        return []

    def _deliver(self, reply: Any) -> None:
        self._on_reply(reply)
        self._wake()

    def _wake(self) -> None:
        for waiter in list(self._waiters):
            waiter.set()
