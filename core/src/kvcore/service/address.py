"""Sockets at an address: a server's, which only one process can have, and a client's."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
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
    with it a socket that nobody accepts on is certain to be a dead server's, and is replaced.

    Raises `ServiceError`.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock: int | None = None
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
        if self.address.path:
            with suppress(OSError):
                os.unlink(self.address.path)
        self.socket.close()

    def close(self) -> None:
        """Leave the address to others. Idempotent."""
        self.stop()
        if self._lock is not None:
            with suppress(OSError):
                os.unlink(f"{self.address.path}.lock")
            os.close(self._lock)
            self._lock = None

    def _unix(self, path: str) -> socket.socket:
        folder = Path(path).parent
        with suppress(FileExistsError):
            folder.mkdir(0o700, parents=True)
        self._lock = _locked(path)
        _remove_stale(path)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(made.fileno(), 0o600)  # before it has a name: at no moment may others connect
            made.bind(path)
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
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(f"{path}.lock")):
                return lock
        os.close(lock)  # the server before has just removed it


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


def connect(address: Address, timeout_s: float) -> socket.socket:
    """A blocking socket connected to a server. Raises `OSError`."""
    made = socket.socket(socket.AF_UNIX if address.path else socket.AF_INET, socket.SOCK_STREAM)
    try:
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
