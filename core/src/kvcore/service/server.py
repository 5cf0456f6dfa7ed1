"""The server: one thread that serves all clients of a `CacheEngine`.

No byte of KV passes through it: clients are answered with plans, and their workers map the arena. Every request is
answered at once. While nobody asks, nothing is done.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from hmac import compare_digest
from select import EPOLLIN, EPOLLOUT, epoll
from typing import Any

from kvcore import __version__
from kvcore.api import ServiceError
from kvcore.engine import CacheEngine
from kvcore.observe import Throttle, logger
from kvcore.service import wire
from kvcore.service.address import Listener
from kvcore.service.connection import Connection
from kvcore.service.removal import Removals
from kvcore.service.session import Session
from kvcore.service.wake import Wake

GREETING_S = 5.0
"""How long a connection may take to say who it is."""
STALLED_S = 0.5
"""How often lookups that tiers are asked for are looked after."""
WATCH_S = 2.0
HEARD_S = 30.0
"""How often is looked whether our socket's file is still there: where its removal is not heard of, and where it is."""
NO_ROOM_S = 0.5
"""How long nobody is accepted after the process has run out of files."""
LAST_S = 0.5
"""How long a server that is to end still reads what engines have sent."""
MAX_CONNECTIONS = 4096


class Server:
    """Serves `engine`, in the thread that calls `run`. Engine and listeners stay their owner's to close.

    Args:
        token: what who connects over TCP must know.
    """

    def __init__(self, engine: CacheEngine, listeners: Sequence[Listener], token: str | None = None) -> None:
        self.engine = engine
        self.addresses = tuple(listener.address for listener in listeners)
        self._token = token or ""
        self._epoll = epoll()
        self._wake = Wake()
        self._epoll.register(self._wake, EPOLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {self._wake.fileno(): self._woken}
        self._sessions: dict[str, Session] = {}
        self._connections: set[Connection] = set()
        self._strangers: dict[Connection, float] = {}
        self._searching: set[Session] = set()
        self._behind: set[Connection] = set()
        """Connections with messages whose turn is the next."""
        self._later: deque[tuple[Connection, Callable[[], None]]] = deque()
        self._posted: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._accept_again: float | None = None
        self._stalled_at = 0.0
        self._log = Throttle()
        self._listeners = tuple(listeners)
        self._files = [listener for listener in listeners if listener.address.path]
        self._removals = Removals()
        self._look_s = WATCH_S
        if self._removals.fileno() >= 0:
            self._epoll.register(self._removals, EPOLLIN)
            self._handlers[self._removals.fileno()] = self._removed
            self._look_s = HEARD_S
        for listener in self._listeners:
            self._listen(listener)
        self._look_at = time.monotonic() + self._look_s

    def run(self) -> None:
        """Serve until `stop`, and then what had been sent by that time: what was stored last is not lost."""
        while not self._stopping:
            self._turn(0 if self._behind else self._timeout())
        give_up = time.monotonic() + LAST_S
        while self._turn(0) and time.monotonic() < give_up:
            pass

    def _turn(self, timeout_s: float) -> bool:
        """Do what there is to do; was there anything?"""
        behind = list(self._behind)
        ready = self._epoll.poll(timeout_s)
        for fd, events in ready:
            handler = self._handlers.get(fd)  # one before it may have closed this one
            if handler is not None:
                handler(events)
        for connection in behind:
            if connection in self._behind:  # not closed since
                self._read(connection)
        for _ in range(len(self._later)):  # what they add is for the next turn, and wakes it
            connection, call = self._later.popleft()
            self._guarded(connection, call)
        while self._posted:
            self._posted.popleft()()
        if self._files or self._strangers or self._searching or self._accept_again is not None:
            self._tick(time.monotonic())
        return bool(ready or behind)

    def post(self, call: Callable[[], None]) -> None:
        """Have `run` call something that returns at once and raises nothing. From any thread, until `close`."""
        self._posted.append(call)
        self._wake.set()

    def stop(self) -> None:
        """End `run`. From any thread, and from a signal's handler."""
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        """Accept nobody any more, and let all clients go. After `run`. Idempotent."""
        if self._epoll.closed:
            return
        for listener in self._listeners:
            listener.stop()
        for connection in list(self._connections):
            connection.close()
        self._epoll.close()
        self._removals.close()
        self._wake.close()

    def sessions(self) -> list[dict[str, Any]]:
        """Who is connected, as plain values. From any thread."""
        return [s.status() for s in list(self._sessions.values())]

    # -- listening -----------------------------------------------------------------------------------------------------

    def _listen(self, listener: Listener) -> None:
        fd = listener.socket.fileno()
        self._epoll.register(fd, 0 if self._accept_again is not None else EPOLLIN)
        self._handlers[fd] = partial(self._accept, listener)
        if listener.address.path and not self._removals.watch(listener.address.path):
            self._look_s = WATCH_S

    def _removed(self, events: int) -> None:
        self._removals.clear()
        self._look_at = 0.0

    def _watch(self, listener: Listener) -> None:
        """Listen again where somebody has removed our socket's file: nobody finds us without it."""
        if not listener.lost:
            return
        fd = listener.socket.fileno()
        try:
            listener.restore()
        except ServiceError as error:
            text = f"engines do not find this server any more, the file of its socket was removed: {error}"
            self._log.warning("lost", text)
            self._look_at = time.monotonic() + WATCH_S
            return
        self._handlers.pop(fd, None)  # closed, and so out of the epoll
        self._listen(listener)
        logger.warning(
            "the file of the socket of %s had been removed, and is there again: keep cleaners of temporary files away "
            "from it, or put it into another folder", listener.address,
        )  # fmt: skip

    # -- connections -------------------------------------------------------------------------------------------------

    def _accept(self, listener: Listener, events: int) -> None:
        try:
            made, _ = listener.socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of files: without a pause this would spin
            self._log.warning("accept", f"a client cannot be accepted: {error.strerror}")
            self._pause(True)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._log.warning("accept", f"a client is turned away: there are {MAX_CONNECTIONS} connections")
            made.close()
            return
        local = made.family == socket.AF_UNIX
        try:
            if not local:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(made, self._epoll)
        except OSError as error:  # no more can be watched, or it is gone
            self._log.warning("accept", f"a client cannot be served: {error.strerror}")
            made.close()
            return
        self._connections.add(connection)
        self._strangers[connection] = time.monotonic() + GREETING_S
        connection.on_message = partial(self._greet, connection, local)
        connection.on_close = partial(self._closed, connection)
        self._handlers[connection.fd] = partial(self._serve, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        if events & EPOLLOUT:
            self._guarded(connection, connection.flush)
        if events & ~EPOLLOUT and connection not in self._behind:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        if connection in self._connections:  # else it ended while it was written to
            self._guarded(connection, connection.read)
        if connection.waiting and connection in self._connections:
            self._behind.add(connection)
        else:
            self._behind.discard(connection)

    def _guarded(self, connection: Connection, call: Callable[[], None]) -> None:
        """What one client does costs it its connection, and nobody else anything."""
        try:
            call()
        except (EOFError, OSError) as error:
            if not isinstance(error, EOFError | ConnectionError):
                self._log.warning("connection", f"a client's connection failed: {error}")
            connection.close()
        except wire.ProtocolError as error:
            self._log.warning("protocol", f"a connection is closed: it has sent {error}")
            self.engine.metrics.add("refused_connections", 1, "protocol")
            connection.close()
        except Exception:
            logger.exception("a client's request failed; its connection is closed")
            connection.close()

    def _closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._behind.discard(connection)
        self._strangers.pop(connection, None)
        self._handlers.pop(connection.fd, None)

    # -- who it is ---------------------------------------------------------------------------------------------------

    def _greet(self, connection: Connection, local: bool, body: memoryview) -> None:
        preamble = wire.decode_preamble(body)
        if preamble.protocol != wire.PROTOCOL:
            self._refuse(
                connection,
                "version",
                f"this server is kvcore {__version__} (protocol {wire.PROTOCOL}), the client is kvcore "
                f"{preamble.version[:40]} (protocol {preamble.protocol}): install the same version on both sides",
            )
            return
        greeting = wire.decode_greeting(body)
        if isinstance(greeting, wire.Attach):
            self._greet_worker(connection, local, greeting)
        elif not local and not (self._token and compare_digest(greeting.token.encode(), self._token.encode())):
            self._refuse(connection, "token", "the token is wrong: set the same `server.token` on both sides")
        else:
            self._greet_client(connection, greeting)

    def _greet_client(self, connection: Connection, hello: wire.Hello) -> None:
        session = Session(self.engine, connection, hello, partial(self._call_later, connection), self._searching.add)
        self._sessions[session.token] = session
        del self._strangers[connection]
        connection.frames.limit = wire.MAX_FRAME
        connection.on_message = session.handle
        connection.on_close = partial(self._session_closed, connection, session)
        config = self.engine.manager.config
        descriptor = self.engine.descriptor()
        assert descriptor is not None
        connection.send(
            wire.Welcome(
                wire.PROTOCOL,
                __version__,
                session.token,
                descriptor,
                config.l1.lease,
                config.lookup_timeout,
                self.engine.tiers,
                self.engine.manager.hooks.listens("queued"),
            )
        )
        self.engine.metrics.set("sessions", len(self._sessions))
        logger.info("%s (process %d) is connected", session.name or "a client", session.pid)

    def _session_closed(self, connection: Connection, session: Session) -> None:
        self._closed(connection)
        self._sessions.pop(session.token, None)
        self._searching.discard(session)
        session.end()
        self.engine.metrics.set("sessions", len(self._sessions))
        logger.info("%s (process %d) is gone", session.name or "a client", session.pid)

    def _greet_worker(self, connection: Connection, local: bool, attach: wire.Attach) -> None:
        session = self._sessions.get(attach.session)
        if session is None:
            self._refuse(connection, "session", "its engine's session has ended")
            return
        del self._strangers[connection]
        session.workers.add(connection)
        connection.on_message = _chatter
        connection.on_close = partial(self._worker_closed, connection, session)
        if local:
            descriptor = self.engine.descriptor()
            assert descriptor is not None
            connection.send_file(wire.Attached(), descriptor["fd"])
        else:
            connection.send(wire.Attached())

    def _worker_closed(self, connection: Connection, session: Session) -> None:
        self._closed(connection)
        session.workers.discard(connection)
        session.settle()

    def _refuse(self, connection: Connection, kind: str, reason: str) -> None:
        self._log.warning(f"refused {kind}", f"a client is refused: {reason}")
        self.engine.metrics.add("refused_connections", 1, kind)
        connection.send(wire.Refused(wire.PROTOCOL, __version__, reason))
        raise EOFError

    # -- time --------------------------------------------------------------------------------------------------------

    def _call_later(self, connection: Connection, call: Callable[[], None]) -> None:
        self._later.append((connection, call))
        self._wake.set()

    def _woken(self, events: int) -> None:
        self._wake.clear()

    def _timeout(self) -> float:
        """Seconds until there is something to do unasked; -1 for ever."""
        times = (
            next(iter(self._strangers.values()), None),
            self._accept_again,
            self._look_at if self._files else None,
            self._stalled_at if self._searching else None,
        )
        due = [t for t in times if t is not None]
        return max(0.0, min(due) - time.monotonic()) if due else -1

    def _tick(self, now: float) -> None:
        while self._strangers and next(iter(self._strangers.values())) <= now:
            next(iter(self._strangers)).close()
        if self._accept_again is not None and self._accept_again <= now:
            self._pause(False)
        if self._look_at <= now:
            self._look_at = now + self._look_s
            for listener in self._files:
                self._watch(listener)
        if self._searching and self._stalled_at <= now:
            self._stalled_at = now + STALLED_S
            for session in list(self._searching):
                session.give_up()
                if not session.waiting:
                    self._searching.discard(session)

    def _pause(self, pause: bool) -> None:
        self._accept_again = time.monotonic() + NO_ROOM_S if pause else None
        for listener in self._listeners:
            self._epoll.modify(listener.socket.fileno(), 0 if pause else EPOLLIN)


def _chatter(body: memoryview) -> None:
    raise wire.ProtocolError("a message from a worker, which has nothing more to say")
