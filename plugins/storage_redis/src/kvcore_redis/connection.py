"""One connection to one server: the login, and pipelines of commands."""

import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcore.api import StorageError
from kvcore.api.buffers import Part
from kvcore_redis.address import Endpoint
from kvcore_redis.config import Login
from kvcore_redis.resp import Reader, ReplyError, encode
from kvcore_redis.stream import Lost, Stream, TLSStream, time_left

GROUP_BYTES = 1 << 20
"""A pipeline goes out in groups of so many bytes, or of one larger object, at most two of them unanswered: the server
need not hold the values of a whole batch at once, and they stay in its caches."""
GROUP_COMMANDS = 256
"""Small commands, too: what is unanswered fits into the socket buffers, so that neither side waits for the other."""
_ASKING = encode(b"ASKING")
_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}
"""Seconds, seconds, and tries: what stands between us and the server must not forget an idle connection."""

Reply = bytes | int | ReplyError | None


class Command(NamedTuple):
    """One command, encoded.

    Args:
        name: the key that it is about.
        parts: its bytes; what is large is a view of the caller's memory.
        nbytes: bytes that it moves, there or back.
        room: where the value goes; None: the reply is a line.
    """

    name: bytes
    parts: Sequence[Part]
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
        parts = [part for command in commands for part in (_ASKING * asking, *command.parts) if len(part)]
        self._stream.send(parts)


def connect(endpoint: Endpoint, settings: Settings, deadline: float) -> Connection:
    """A new connection. Raises `OSError` when the server cannot be reached, `StorageError` when it refuses us."""
    until = min(deadline, time.monotonic() + settings.connect_timeout_s)
    sock = _reach(endpoint, until)
    if settings.tls is not None:
        sock = _wrap(sock, endpoint, settings.tls, until)
    try:
        stream = Stream(sock) if settings.tls is None else TLSStream(sock)
        stream.deadline = until
        connection = Connection(stream)
        _log_in(connection, endpoint, settings)
    except BlockingIOError:
        sock.close()
        raise TimeoutError("no answer in time") from None
    except BaseException:
        sock.close()
        raise
    return connection


def _reach(endpoint: Endpoint, until: float) -> socket.socket:
    """Of the host's addresses the first that accepts; each gets an equal share of the time."""
    places: Sequence[tuple[Any, ...]]
    if endpoint.is_unix:
        places = [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", endpoint.host)]
    else:
        places = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    failure: OSError = ConnectionError("its name has no address")
    for i, (family, kind, protocol, _, address) in enumerate(places):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(time_left(until) / (len(places) - i))
            sock.connect(address)
            if not endpoint.is_unix:
                _tune(sock)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    if isinstance(failure, PermissionError):
        raise StorageError(f"{endpoint}: this user may not connect to it: give it access to the socket")
    raise failure


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _wrap(sock: socket.socket, endpoint: Endpoint, tls: ssl.SSLContext, until: float) -> ssl.SSLSocket:
    """Shake hands. The socket is closed when that fails."""
    try:
        sock.settimeout(time_left(until))
        return tls.wrap_socket(sock, server_hostname=endpoint.host)
    except ssl.SSLCertVerificationError as error:
        raise StorageError(
            f"{endpoint}: its certificate is not accepted ({error.verify_message}): name the authority with `tls_ca`"
        ) from error
    except ssl.SSLEOFError as error:
        raise Lost("closed during the TLS handshake: is it a TLS port?") from error
    except TimeoutError as error:  # a server without TLS waits for the end of the line
        raise TimeoutError("no answer to the TLS handshake: is it a TLS port?") from error
    except ssl.SSLError as error:
        remedy = "is it a TLS port, and does it want a `tls_cert`?"
        raise StorageError(f"{endpoint}: no TLS handshake ({error.reason}): {remedy}") from error
    finally:
        sock.close()  # it has been detached when all went well


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
            if reply.passing:
                raise ConnectionError(text)
            remedy = "correct `database`" if word[0] == b"SELECT" and reply.code != "NOAUTH" else settings.login.remedy
            raise StorageError(f"{endpoint} refuses {word[0].decode()} ({text}): {remedy}")


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
