"""How many bytes and objects the directory holds, shared by all processes that use it.

    ROOT/.kvcore/account                  bytes of objects and of writes in flight, number of objects, and the two once
                                          more with every bit flipped; flock'ed around every change
    ROOT/.kvcore/live/ID                  one per open storage, empty, flock'ed while it lives
    ROOT/.kvcore/writing/ID-NUMBER-BYTES  its unfinished writes, each with the bytes that were reserved for it

A write reserves its bytes before it begins, so the sum never passes the capacity, whatever process it is in. The
reservation is the unfinished file itself: publishing it by a rename moves the bytes to an object and changes no number.
A killed process is known by its lock being free; its unfinished files are removed and their bytes given back.

Changes are ordered so that a kill between any two steps leaves the count too high, never too low, and `recount` sets it
right: under the lock the truth is what the files say. The same is done when somebody else has written into the account,
or cut it short: numbers that are not each other's complement are not believed. Nothing is mapped: a mapping of a file
system that fills up or fails ends the process, where a system call returns an error.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from kvcore_disk.paths import CONTROL

LOCK_S = 5.0
"""How long an operation waits for the lock, which is held for microseconds, or for the seconds that a rescan takes. A
process that was stopped while it had it (SIGSTOP, a debugger) must not take all others along."""
OPEN_LOCK_S = 60.0

_COUNTS = struct.Struct("<QQQQ")  # bytes, objects, their complements
_MASK = (1 << 64) - 1
_LIVE = re.compile("[0-9]+-[0-9a-f]{12}")
_WRITE = re.compile("([0-9]+-[0-9a-f]{12})-[0-9]+-([0-9]+)")


class Account:
    """The shared count. `locked` guards every change, between threads and between processes.

    All methods raise `OSError`, among others when the account is closed, or inherited by a fork, and `TimeoutError`
    when the lock cannot be had.

    Args:
        mend: called with the account, locked, when its counts cannot be believed: it must `recount`.
    """

    def __init__(self, root: str, mend: "Callable[[Account], object] | None" = None) -> None:
        control = f"{root}/{CONTROL}"
        self._live, self._writing = f"{control}/live", f"{control}/writing"
        for folder in (control, self._live, self._writing):
            os.makedirs(folder, 0o700, exist_ok=True)
        self._thread_lock = threading.RLock()
        self._depth = 0
        self._mend: Callable[[Account], object] | None = None
        self._number = 0
        self._id = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._open = True
        self._fd = os.open(f"{control}/account", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._live_fd = -1
        _accounts.add(self)
        try:
            with self.locked(OPEN_LOCK_S):
                if mend is None and self._read() is None:
                    self._set(0, 0)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._live_fd = os.open(f"{self._live}/{self._id}", flags, 0o600)
                fcntl.flock(self._live_fd, fcntl.LOCK_EX)
            self._mend = mend
        except BaseException:
            self._let_go()
            raise

    @contextlib.contextmanager
    def locked(self, wait_s: float | None = None) -> Iterator[None]:
        """Alone, among threads and processes. May be nested. Raises `TimeoutError` after `wait_s` (`LOCK_S`)."""
        wait_s = LOCK_S if wait_s is None else wait_s
        deadline = time.monotonic() + wait_s
        if not self._thread_lock.acquire(timeout=wait_s):
            raise _late(wait_s)
        try:
            if not self._open:  # the descriptors may be another file's by now
                raise OSError(errno.EBADF, "the storage is closed")
            if self._depth == 0:
                _flock(self._fd, deadline, wait_s)
            self._depth += 1
            try:
                if self._depth == 1 and self._mend is not None and self._read() is None:
                    self._mend(self)
                yield
            finally:
                self._depth -= 1
                if self._depth == 0 and self._open:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def check_place(self) -> None:
        """Raise `FileNotFoundError` when someone has removed the directory: a new account is needed then."""
        if os.fstat(self._fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the directory was removed")

    @property
    def used(self) -> int:
        """Bytes held and in flight, of all processes."""
        return self.counts()[0]

    def counts(self) -> tuple[int, int]:
        """Bytes held and in flight, and objects held, of all processes."""
        with self.locked():
            return self._read() or (0, 0)

    def recount(self, held: int, objects: int) -> None:
        """Clean up after the dead and set the counts right. Under `locked`; `held`: bytes of all objects, as found."""
        living = self._bury()
        writes = filter(None, map(_WRITE.fullmatch, os.listdir(self._writing)))
        self._set(held + sum(int(write[2]) for write in writes if write[1] in living), objects)

    def begin(self, nbytes: int) -> str:
        """Reserve a write; the path of its file, to be made before the lock is left. Under `locked`."""
        used, objects = self.counts()
        self._set(used + nbytes, objects)
        self._number += 1
        return f"{self._writing}/{self._id}-{self._number}-{nbytes}"

    def cancel(self, path: str) -> None:
        """A write came to nothing: its file goes and its bytes are free. Under `locked`. Harmless when it is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            self.release(int(path.rpartition("-")[2]))

    def published(self) -> None:
        """A write became an object that was not there before. Under `locked`."""
        used, objects = self.counts()
        self._set(used, objects + 1)

    def release(self, nbytes: int, objects: int = 0) -> None:
        """Bytes are free again, and so many objects gone. Under `locked`."""
        used, held = self.counts()
        self._set(max(0, used - nbytes), max(0, held - objects))

    def close(self) -> None:
        """Leave: what was in flight here is removed and given back, and cannot be published any more."""
        with self._thread_lock:
            if not self._open:
                return
            try:
                with self.locked():
                    self._forget(self._id)
            finally:
                self._let_go()

    # -- the dead ----------------------------------------------------------------------------------------------------

    def _bury(self) -> set[str]:
        """Clean up after storages whose process died; who lives."""
        living = {self._id}
        for name in os.listdir(self._live):
            if name != self._id and _LIVE.fullmatch(name):
                if _is_held(f"{self._live}/{name}"):
                    living.add(name)
                else:
                    self._forget(name)
        for file in os.listdir(self._writing):
            write = _WRITE.fullmatch(file)
            if write and write[1] not in living:
                self.cancel(f"{self._writing}/{file}")
        return living

    def _forget(self, name: str) -> None:
        for file in os.listdir(self._writing):
            write = _WRITE.fullmatch(file)
            if write and write[1] == name:
                self.cancel(f"{self._writing}/{file}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._live}/{name}")

    def _let_go(self) -> None:
        self._open = False
        _accounts.discard(self)
        for fd in (self._live_fd, self._fd):
            if fd >= 0:
                os.close(fd)

    def _forked(self) -> None:
        """In the child of a fork: it shares the locks, which would outlive the parent in it, and may not use them."""
        self._thread_lock = threading.RLock()
        self._let_go()

    def _read(self) -> tuple[int, int] | None:
        """Bytes and objects; None when they cannot be believed."""
        raw = os.pread(self._fd, _COUNTS.size, 0)
        if len(raw) < _COUNTS.size:
            return None
        nbytes, objects, *complements = _COUNTS.unpack(raw)
        return (nbytes, objects) if complements == [nbytes ^ _MASK, objects ^ _MASK] else None

    def _set(self, nbytes: int, objects: int) -> None:
        os.pwrite(self._fd, _COUNTS.pack(nbytes, objects, nbytes ^ _MASK, objects ^ _MASK), 0)


_accounts: "weakref.WeakSet[Account]" = weakref.WeakSet()


def _after_fork() -> None:
    for account in list(_accounts):
        account._forked()


os.register_at_fork(after_in_child=_after_fork)


def _flock(fd: int, deadline: float, wait_s: float) -> None:
    """Lock the file, asking again and again: a wait inside the system call could not be ended."""
    pause = 0.0002
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise _late(wait_s) from None
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def _late(wait_s: float) -> TimeoutError:
    text = f"another process or thread has had the lock of {CONTROL}/account for {wait_s:g} s"
    return TimeoutError(errno.ETIMEDOUT, text)


def _is_held(path: str) -> bool:
    """Is there a lock on the file? Its owner lives then."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
