"""Sockets at an address: a server's, which only one process can have, and a client's."""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvcore.api import ServiceError
from kvcore.config import Address
from kvcore.engine.attach import check_owner

BACKLOG = 128
PROBE_S = 1.0
"""How long whoever listens on a socket's path may take to accept."""


class Listener:
    """A listening socket. For a Unix socket also a lock beside it (`PATH.lock`), held for as long as the process lives:
    with it a socket that nobody accepts on is certain to be a dead server's, and is replaced. What stands there and is
    another's stays.

    Raises `ServiceError`.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock: int | None = None
        self._place: tuple[int, int] | None = None
        try:
            self.socket = self._unix(address.path) if address.path else self._tcp(address.port)
        except OSError as error:
            self.close()
            raise ServiceError(f"cannot listen on {address}: {error.strerror or error}") from error
        except ServiceError:
            self.close()
            raise
        self.socket.setblocking(False)

    def stop(self) -> None:
        """Accept nobody any more. Idempotent."""
        if not hasattr(self, "socket") or self.socket.fileno() < 0:
            return
        if self.address.path and not self.lost:
            with suppress(OSError):
                os.unlink(self.address.path)
        self.socket.close()

    @property
    def lost(self) -> bool:
        """Nobody finds this socket any more: its file has been removed, as cleaners of `/tmp` do."""
        return bool(self.address.path) and _place(self.address.path) != self._place

    def restore(self) -> None:
        """Listen in the same place again, once it is lost. Raises `ServiceError` when another is there by now."""
        try:
            if not _same_file(self._lock, f"{self.address.path}.lock"):
                Path(self.address.path).parent.mkdir(0o700, parents=True, exist_ok=True)
                lock = _locked(self.address.path)
                if self._lock is not None:
                    os.close(self._lock)
                self._lock = lock
            made = self._bound(self.address.path)
        except OSError as error:
            raise ServiceError(f"cannot listen on {self.address}: {error.strerror or error}") from error
        made.setblocking(False)
        self.socket.close()
        self.socket = made

    def close(self) -> None:
        """Leave the address to others. Idempotent."""
        self.stop()
        if self._lock is not None:
            path = f"{self.address.path}.lock"
            with suppress(OSError):
                if _same_file(self._lock, path):
                    os.unlink(path)
            os.close(self._lock)
            self._lock = None

    def _unix(self, path: str) -> socket.socket:
        folder = Path(path).parent
        try:
            with suppress(FileExistsError):
                folder.mkdir(0o700, parents=True)
            self._lock = _locked(path)
        except OSError as error:
            raise ServiceError(
                f"cannot listen on {self.address}: {folder} cannot be made or written to ({error.strerror or error}): "
                "make it, with write permission for this user, or give another path in `server`"
            ) from error
        return self._bound(path)

    def _bound(self, path: str) -> socket.socket:
        """Under the lock."""
        _remove_stale(path)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(made.fileno(), 0o600)  # before it has a name: at no moment may others connect
            made.bind(path)
            self._place = _place(path)
            made.listen(BACKLOG)
        except OSError:
            made.close()
            raise
        return made

    def _tcp(self, port: int) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("127.0.0.1", port))
            made.listen(BACKLOG)
        except OSError as error:
            made.close()
            if error.errno == errno.EADDRINUSE:
                raise ServiceError(
                    f"another program listens on {self.address}: stop it, or give another port in `server`"
                ) from error
            raise
        return made


def _locked(path: str) -> int:
    while True:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ServiceError(
                f"another server is running on unix://{path}, or just ending: stop it, or give another path in `server`"
            ) from None
        if _same_file(lock, f"{path}.lock"):
            return lock
        os.close(lock)  # the server before has just removed it


def _same_file(fd: int | None, path: str) -> bool:
    """Whether this is what stands at the path."""
    try:
        return fd is not None and os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _place(path: str) -> tuple[int, int] | None:
    """What stands at the path; None: nothing."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _remove_stale(path: str) -> None:
    """Remove a socket that nobody accepts on, and nothing else."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ServiceError(f"{path} is no socket: give another path in `server`, or remove it")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            pass  # full or slow, so there is somebody
    raise ServiceError(f"another program listens on unix://{path}: stop it, or give another path in `server`")


def connect(address: Address, timeout_s: float, begun: Callable[[socket.socket], None] | None = None) -> socket.socket:
    """A blocking socket connected to a server. Raises `OSError`.

    Args:
        begun: told of the socket before it connects.
    """
    made = socket.socket(socket.AF_UNIX if address.path else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if begun is not None:
            begun(made)
        made.settimeout(timeout_s)
        made.connect(address.path or ("127.0.0.1", address.port))
        check_owner(made)
        if not address.path:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.settimeout(None)
    except OSError:
        made.close()
        raise
    return made
