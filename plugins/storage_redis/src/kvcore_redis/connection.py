"""One connection to one server: sockets with a deadline, the login, and pipelines of commands."""

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcore.api import StorageError
from kvcore_redis.address import Endpoint
from kvcore_redis.config import Login
from kvcore_redis.resp import Reader, ReplyError, encode
from kvcore_redis.views import drop

GROUP_BYTES = 4 << 20
"""A pipeline goes out in groups of so many bytes, at most two of them unanswered: the server need not hold the values
of a whole batch at once."""
GROUP_COMMANDS = 64
"""So many replies to small commands fit into the socket buffers, so that neither side ever waits for the other."""
_IOV_MAX = 1024
_TEMPORARY = ("ERR max number of clients", "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN")
_ASKING = encode(b"ASKING")

Reply = bytes | int | ReplyError | None


class Lost(ConnectionError):
    """The connection broke after it had been made: on another one the same commands may do."""


class Command(NamedTuple):
    """One command, encoded.

    Args:
        name: the key that it is about.
        parts: its bytes; what is large is a view of the caller's memory.
        nbytes: bytes that it moves, there or back.
        room: where the value goes; None: the reply is a line.
    """

    name: bytes
    parts: Sequence[bytes | memoryview]
    nbytes: int = 0
    room: Sequence[memoryview] | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What every connection of a storage has in common.

    Args:
        login: who we are.
        database: which database is selected.
        tls: how to speak TLS; None: not at all.
        connect_timeout_s: the time that a connection has to come about, login included.
        passive: what is read does not count as used, where the server can do that (Redis 7.2, Valkey).
    """

    login: Login
    database: int
    tls: ssl.SSLContext | None
    connect_timeout_s: float
    passive: bool = False


class Stream:
    """A connected socket; every operation ends by `deadline` (`time.monotonic()`), with `TimeoutError` if need be.

    The kernel keeps the time (`SO_RCVTIMEO`), which allows one system call to bring a whole value.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.deadline = 0.0
        sock.settimeout(None)

    def send(self, views: Sequence[memoryview]) -> None:
        """Send all of `views`."""
        while views:
            self._limit(socket.SO_SNDTIMEO)
            views = drop(views, self._socket.sendmsg(views[:_IOV_MAX]))

    def receive(self, into: memoryview) -> int:
        """At least one byte; how many."""
        self._limit(socket.SO_RCVTIMEO)
        return _some(self._socket.recv_into(into))

    def receive_all(self, views: Sequence[memoryview]) -> None:
        """Fill all of `views`."""
        while views:
            self._limit(socket.SO_RCVTIMEO)
            count = self._socket.recvmsg_into(views[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]
            views = drop(views, _some(count))

    @property
    def quiet(self) -> bool:
        """Nothing has arrived, not even the end: the peer has not closed it."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def shut(self) -> None:
        """End it for whoever waits in it. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket."""
        self._socket.close()

    def _limit(self, option: int) -> None:
        left = _left(self.deadline)
        seconds = int(left)
        self._socket.setsockopt(
            socket.SOL_SOCKET, option, struct.pack("ll", seconds, max(1, int((left - seconds) * 1e6)))
        )


class TLSStream(Stream):
    """The same over TLS, whose library knows neither vectors nor the kernel's timeouts."""

    _socket: ssl.SSLSocket

    def send(self, views: Sequence[memoryview]) -> None:
        for view in views:
            rest = view
            while rest:
                self._socket.settimeout(_left(self.deadline))
                rest = rest[self._socket.send(rest) :]

    def receive(self, into: memoryview) -> int:
        self._socket.settimeout(_left(self.deadline))
        return _some(self._socket.recv_into(into))

    def receive_all(self, views: Sequence[memoryview]) -> None:
        while views:
            views = drop(views, self.receive(views[0]))

    @property
    def quiet(self) -> bool:
        return self._socket.pending() == 0 and super().quiet


class Connection:
    """A connection that is logged in. One thread at a time; after any exception it is of no use but to `close`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._reader = Reader(stream)

    def until(self, deadline: float) -> None:
        """All that follows ends by `deadline`."""
        self._stream.deadline = deadline

    def pipeline(self, commands: Sequence[Command], *, asking: bool = False) -> Iterator[Reply]:
        """Send the commands and yield their replies in order. Take all of them.

        Args:
            asking: say ASKING before each, as a node of a cluster wants it that is taking over their slot.
        """
        groups = _grouped(commands)
        for i, group in enumerate(groups):
            if i == 0:
                self._send(group, asking)
            if i + 1 < len(groups):
                self._send(groups[i + 1], asking)
            for command in group:
                if asking:
                    self._reader.line()
                yield self._reader.line() if command.room is None else self._reader.value(command.room)

    @property
    def usable(self) -> bool:
        """It is open, and no reply of an earlier call is left in it."""
        return self._reader.empty and self._stream.quiet

    def shut(self) -> None:
        """End the call that is under way in another thread."""
        self._stream.shut()

    def close(self) -> None:
        """Close it."""
        self._stream.close()

    def _send(self, commands: Sequence[Command], asking: bool) -> None:
        views: list[memoryview] = []
        small: list[bytes] = []
        for command in commands:
            if asking:
                small.append(_ASKING)
            for part in command.parts:
                if isinstance(part, bytes):
                    small.append(part)
                elif len(part):
                    views.append(memoryview(b"".join(small)))
                    views.append(part)
                    small.clear()
        if small:
            views.append(memoryview(b"".join(small)))
        self._stream.send([view for view in views if len(view)])


def connect(endpoint: Endpoint, settings: Settings, deadline: float) -> Connection:
    """A new connection. Raises `OSError` when the server cannot be reached, `StorageError` when it refuses us."""
    limit = min(settings.connect_timeout_s, _left(deadline))
    sock = _open(endpoint, limit)
    try:
        stream = Stream(sock) if settings.tls is None else TLSStream(_wrap(sock, endpoint, settings.tls, limit))
        stream.deadline = min(deadline, time.monotonic() + settings.connect_timeout_s)
        connection = Connection(stream)
        _log_in(connection, endpoint, settings)
    except BlockingIOError:
        sock.close()
        raise TimeoutError("the time is up") from None
    except BaseException:
        sock.close()
        raise
    return connection


def _open(endpoint: Endpoint, timeout_s: float) -> socket.socket:
    if endpoint.is_unix:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(endpoint.host)
        except PermissionError:
            sock.close()
            raise StorageError(f"{endpoint}: this user may not connect to the socket: give it write access") from None
        except BaseException:
            sock.close()
            raise
        return sock
    sock = socket.create_connection(endpoint, timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


def _wrap(sock: socket.socket, endpoint: Endpoint, tls: ssl.SSLContext, timeout_s: float) -> ssl.SSLSocket:
    sock.settimeout(timeout_s)
    try:
        return tls.wrap_socket(sock, server_hostname=endpoint.host)
    except ssl.SSLCertVerificationError as error:
        raise StorageError(
            f"{endpoint}: its certificate is not accepted ({error.verify_message}): name the authority with `tls_ca`"
        ) from error
    except ssl.SSLEOFError as error:
        raise Lost("closed during the TLS handshake") from error
    except ssl.SSLError as error:
        raise StorageError(f"{endpoint}: no TLS handshake ({error.reason}): is it a TLS port?") from error


def _log_in(connection: Connection, endpoint: Endpoint, settings: Settings) -> None:
    password = settings.login.password()
    words: list[tuple[bytes, ...]] = []
    if password is not None:
        user = [settings.login.username.encode()] if settings.login.username is not None else []
        words.append((b"AUTH", *user, password.encode()))
    if settings.database:
        words.append((b"SELECT", b"%d" % settings.database))
    if settings.passive:
        words.append((b"CLIENT", b"NO-TOUCH", b"ON"))
    commands = [Command(b"", (encode(*w),)) for w in words]
    for word, reply in zip(words, connection.pipeline(commands), strict=True):
        if isinstance(reply, ReplyError) and word[0] != b"CLIENT":
            text = reply.text.replace(password, "***") if password else reply.text
            if text.startswith(_TEMPORARY):
                raise ConnectionError(text)
            raise StorageError(f"{endpoint} refuses {word[0].decode()} ({text}): {_remedy(word[0], text)}")


def _remedy(word: bytes, text: str) -> str:
    if text.startswith("NOAUTH"):
        return "give `password_env` or `password_file`"
    if word == b"AUTH":
        return "correct `username` and the password"
    return "correct `database`"


def _grouped(commands: Sequence[Command]) -> list[Sequence[Command]]:
    groups: list[Sequence[Command]] = []
    begin, nbytes = 0, 0
    for i, command in enumerate(commands):
        if i > begin and (nbytes + command.nbytes > GROUP_BYTES or i - begin == GROUP_COMMANDS):
            groups.append(commands[begin:i])
            begin, nbytes = i, 0
        nbytes += command.nbytes
    if begin < len(commands):
        groups.append(commands[begin:])
    return groups


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is up")
    return left


def _some(count: int) -> int:
    if count == 0:
        raise Lost("the server closed the connection")
    return count


def broken(error: OSError) -> OSError:
    """What a socket raised in the middle of a call, as `TimeoutError` or `Lost`."""
    if isinstance(error, BlockingIOError | TimeoutError):  # the first is how the kernel's timeouts show
        return TimeoutError("the time is up")
    if isinstance(error, ssl.SSLError):
        return Lost(f"TLS: {error.reason or error}")
    return error if isinstance(error, Lost) else Lost(error.strerror or str(error))
