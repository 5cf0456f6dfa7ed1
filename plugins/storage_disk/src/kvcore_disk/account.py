"""How many bytes the directory holds, shared by all processes that use it.

    ROOT/.kvcore/lock              flock'ed around every change
    ROOT/.kvcore/used              8 bytes, mapped: bytes of objects and of writes in flight
    ROOT/.kvcore/live/ID           one per process, flock'ed while it lives; 8 bytes, mapped: its writes in flight
    ROOT/.kvcore/tmp/ID-NUMBER     its unfinished writes

A write reserves its bytes before it begins, so the sum never passes the capacity, whatever process it is in. A process
that was killed is known by its lock being free: its unfinished files are removed and its reservation is given back.
Changes are ordered so that a kill in between leaves the count too high, never too low; whoever opens the directory
alone counts it anew.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator

from kvcore_disk.paths import CONTROL

_U64 = struct.Struct("<Q")


class Account:
    """The shared count. `locked` guards every change, between threads and between processes.

    Raises `OSError` when the control files cannot be made.
    """

    def __init__(self, root: str) -> None:
        self._control = f"{root}/{CONTROL}"
        for folder in (self._control, f"{self._control}/live", f"{self._control}/tmp"):
            os.makedirs(folder, 0o700, exist_ok=True)
        self._thread_lock = threading.RLock()
        self._depth = 0
        self._number = 0
        self._lock_fd = os.open(f"{self._control}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._used = _map(f"{self._control}/used")
        self._id = f"{os.getpid()}-{secrets.token_hex(6)}"
        with self.locked():
            self._live_fd = os.open(self._live(self._id), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._live_fd, fcntl.LOCK_EX)
            self._reserved = _map(self._live(self._id))

    def start(self, count: Callable[[], int]) -> None:
        """Clean up after the dead; when no other process lives, set the count to what `count()` finds."""
        with self.locked():
            if self._bury() == 0:
                _set(self._used, count())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone, among threads and processes. May be nested."""
        with self._thread_lock:
            if self._depth == 0:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    @property
    def used(self) -> int:
        """Bytes held and in flight, of all processes."""
        return _get(self._used)

    def reserve(self, nbytes: int) -> None:
        """Count a write that begins. Under `locked`, after making sure of the room."""
        _set(self._used, _get(self._used) + nbytes)
        _set(self._reserved, _get(self._reserved) + nbytes)

    def commit(self, nbytes: int) -> None:
        """The write is about to be published: it belongs to no process any more. Under `locked`."""
        _set(self._reserved, max(0, _get(self._reserved) - nbytes))

    def cancel(self, nbytes: int) -> None:
        """The write came to nothing. Under `locked`."""
        self.commit(nbytes)
        self.release(nbytes)

    def release(self, nbytes: int) -> None:
        """An object is gone. Under `locked`."""
        _set(self._used, max(0, _get(self._used) - nbytes))

    def temporary(self) -> str:
        """A new path for an unfinished write of this process."""
        with self._thread_lock:
            self._number += 1
            return f"{self._control}/tmp/{self._id}-{self._number}"

    def close(self) -> None:
        """Leave: what this process had in flight is given back."""
        with self.locked():
            self._forget(self._id, _get(self._reserved))
        self._reserved.close()
        self._used.close()
        os.close(self._live_fd)
        os.close(self._lock_fd)

    def _bury(self) -> int:
        """Clean up after processes that died; how many others live."""
        alive = 0
        for name in os.listdir(f"{self._control}/live"):
            if name == self._id:
                continue
            try:
                fd = os.open(self._live(name), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alive += 1
            else:
                raw = os.pread(fd, _U64.size, 0)
                self._forget(name, _U64.unpack(raw)[0] if len(raw) == _U64.size else 0)
            finally:
                os.close(fd)
        living = {self._id, *os.listdir(f"{self._control}/live")}
        for name in os.listdir(f"{self._control}/tmp"):
            if name.rpartition("-")[0] not in living:
                _remove(f"{self._control}/tmp/{name}")
        return alive

    def _forget(self, name: str, reserved: int) -> None:
        for file in os.listdir(f"{self._control}/tmp"):
            if file.rpartition("-")[0] == name:
                _remove(f"{self._control}/tmp/{file}")
        _remove(self._live(name))
        self.release(reserved)

    def _live(self, name: str) -> str:
        return f"{self._control}/live/{name}"


def _map(path: str) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size < _U64.size:
            os.ftruncate(fd, _U64.size)
        return mmap.mmap(fd, _U64.size)
    finally:
        os.close(fd)


def _get(memory: mmap.mmap) -> int:
    return int(_U64.unpack_from(memory)[0])


def _set(memory: mmap.mmap, value: int) -> None:
    _U64.pack_into(memory, 0, value)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
