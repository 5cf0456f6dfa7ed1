"""How a worker reaches the arena, whoever owns it.

That of its own engine it opens through `/proc`. To a server it makes a connection, over which it is handed the file
(SCM_RIGHTS); over TCP it opens the arena through `/proc`, too. It keeps the connection for as long as it has the arena
mapped: so the server knows when nobody can write into the slots of a client that is gone.
"""

import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from kvcore import __version__
from kvcore.api import ArenaError
from kvcore.l1.arena import ArenaView, open_arena

PROTOCOL = 1
"""Version of the messages between clients, workers and the server. Both ends must have the same."""
LENGTH = struct.Struct("<I")
"""Before each message: how many bytes it has."""
_MAX_REPLY_BYTES = 4096
_CREDENTIALS = struct.Struct("@iII")  # pid, uid, gid


class Attach(msgspec.Struct, tag="attach", tag_field="kind", frozen=True):
    """The first message of a worker. `session` is the token of its engine's descriptor."""

    protocol: int
    version: str
    session: str
    rank: int


class Attached(msgspec.Struct, tag="attached", tag_field="kind", frozen=True):
    """The server's answer; over a Unix socket the arena's file comes with it."""


class Refused(msgspec.Struct, tag="refused", tag_field="kind", frozen=True):
    """The answer to whom the server will not serve, before it closes the connection. `again`: it may later."""

    protocol: int
    version: str
    reason: str
    again: bool = True


def attach_arena(descriptor: dict[str, Any] | None, rank: int = 0) -> ArenaView:
    """Map the arena of an `Engine.descriptor()`, in this or another process. Raises `ArenaError`.

    `rank` is the worker's, for people who look at the server.
    """
    if descriptor is None:
        raise ArenaError("there is no arena: the server is away; ask the engine for its descriptor again later")
    if "server" not in descriptor:
        return ArenaView.attach(descriptor)
    return _ServedView.attach_to_server(descriptor, rank)


class _ServedView(ArenaView):
    """A server's arena, and the connection that tells the server so."""

    connection: socket.socket
    _closing = False
    _watched: socket.socket | None = None

    @classmethod
    def attach_to_server(cls, descriptor: dict[str, Any], rank: int) -> "_ServedView":
        where = descriptor["server"]
        connection = socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.settimeout(descriptor["timeout"])
            connection.connect(where if isinstance(where, str) else tuple(where))
            check_owner(connection)
            fd = _ask(connection, Attach(PROTOCOL, __version__, descriptor["token"], rank))
            if fd is None:
                fd = open_arena(descriptor)
            try:
                view = cls(fd, descriptor, fresh=False)
            finally:
                os.close(fd)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            connection.close()
            text = str(error) or "it closed the connection"
            raise ArenaError(f"cannot attach the arena of the server at {where}: {text}") from error
        except ArenaError:
            connection.close()
            raise
        view.connection = connection
        _views.add(view)
        return view

    def watch(self, lost: Callable[[], None]) -> None:
        """See `ArenaView.watch`."""
        # Its own descriptor: the number of one that is closed may be another file's before this thread looks again.
        watched = self._watched = self.connection.dup()
        poll = select.poll()
        poll.register(watched, select.POLLRDHUP)

        def wait() -> None:
            with watched:
                poll.poll()
            if not self._closing:
                lost()

        threading.Thread(target=wait, name="kvcore-watch", daemon=True).start()

    def close(self) -> None:
        """See `ArenaView.close`. The server then takes it that nothing is written any more."""
        super().close()
        self._closing = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # whoever watches it wakes
        self.connection.close()


def check_owner(connection: socket.socket) -> None:
    """Raise `PermissionError` when the other end of a Unix socket is another user's, who may have taken the path before
    the server: what it says would be believed."""
    if connection.family == socket.AF_UNIX:
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in (0, os.geteuid()):
            raise PermissionError(f"it is run by user {uid}, this by user {os.geteuid()}: run both as one user")


def _ask(connection: socket.socket, message: Attach) -> int | None:
    """The file that comes with the answer, if one does."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(LENGTH.pack(len(body)) + body)
    data, fds, _, _ = socket.recv_fds(connection, _MAX_REPLY_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0] <= _MAX_REPLY_BYTES:
            more = connection.recv(_MAX_REPLY_BYTES)
            if not more:
                raise EOFError
            data += more
        answer = msgspec.msgpack.decode(data[LENGTH.size :], type=Attached | Refused)
        if isinstance(answer, Refused):
            raise ArenaError(f"the server refuses this worker: {answer.reason}")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds[0] if fds else None


_views: "weakref.WeakSet[_ServedView]" = weakref.WeakSet()


def _forked() -> None:
    """A child of a fork must not keep its parent's connections open: the parent's end would go unnoticed."""
    for view in list(_views):
        with suppress(OSError):
            view.connection.close()
            if view._watched is not None:
                view._watched.close()


os.register_at_fork(after_in_child=_forked)
