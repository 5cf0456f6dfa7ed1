"""The disk storage: one file per object, written under a temporary name and published by a rename.

Without `fsync` a power loss may cost what was stored last; the frame's checksum, which the core verifies, keeps a torn
file from being served either way. A killed process loses only what it was writing.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcore.api import (
    MISSING,
    STORED,
    BlockingStorage,
    Context,
    Entry,
    Failed,
    Item,
    Loaded,
    LoadOutcome,
    ObjectKey,
    StorageError,
    StoreOutcome,
    Usage,
)
from kvcore_disk.account import Account
from kvcore_disk.config import DiskConfig, capacity_bytes
from kvcore_disk.paths import Foreign, Found, object_path, occupied, scan
from kvcore_disk.transfer import read_object, write_object

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class DiskStorage(BlockingStorage):
    """Objects in a directory of a local file system. Several processes may use one directory."""

    persistent = True
    preferred_concurrency = 4

    def __init__(self, config: DiskConfig, context: Context) -> None:
        self._config = config
        self._root = str(Path(config.path).expanduser())
        self._log = context.log
        self._direct = config.direct != "off"
        self._policy = context.make_eviction(config.eviction)
        self._lock = (
            threading.Lock()
        )  # guards the policy and the index; taken inside the account's lock, never around it
        self._index: dict[ObjectKey, int] = {}  # bytes taken from the capacity
        self._folders: set[str] = set()
        self._account: Account | None = None  # None: read-only
        self._capacity = 0

    # -- the storage interface ---------------------------------------------------------------------------------------

    def open(self) -> None:
        try:
            os.makedirs(self._root, 0o700, exist_ok=True)
            os.listdir(self._root)
        except OSError as error:
            raise StorageError(
                f"the directory {self._root} cannot be used ({error.strerror}): name another with `path`, or give this "
                "user read and write access to it"
            ) from error
        try:
            self._account = Account(self._root)
        except OSError as error:
            if error.errno not in (*_READ_ONLY, *_FULL):
                raise StorageError(f"{self._root}: {error.strerror}") from error
            self._log.warning("%s is not writable (%s): objects are loaded, none is stored", self._root, error.strerror)
        held = self._rescan()
        stat = os.statvfs(self._root)
        self._capacity = capacity_bytes(self._config.capacity, stat.f_bavail * stat.f_frsize, held)
        if self._account is not None:
            self._account.start(lambda: sum(self._index.values()))
            self._probe_direct()
            with self._account.locked():
                self._make_room(0)

    def close(self) -> None:
        if self._account is not None:
            account, self._account = self._account, None
            account.close()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        index = self._index
        return [key in index or self._found(key) for key in keys]

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        outcomes = [self._load(item) for item in items]
        with self._lock:  # from the tail of the prefix to its head, as policies expect
            self._policy.touch([i.key for i, o in zip(items, outcomes, strict=True) if isinstance(o, Loaded)][::-1])
        return outcomes

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        return [self._store(item) for item in items]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        with self._exclusively() as account:
            with self._lock:
                self._policy.remove(keys)
            for key in keys:
                self._unlink(key, account)

    def list(self) -> Iterator[Entry]:
        for found in scan(self._root, Foreign()):
            yield Entry(found.key, found.nbytes)

    def usage(self) -> Usage:
        nbytes = self._account.used if self._account is not None else sum(self._index.values())
        return Usage(nbytes, len(self._index), self._capacity)

    def ping(self) -> None:
        try:
            os.statvfs(self._root)
        except OSError as error:
            raise StorageError(f"{self._root}: {error.strerror}") from error

    # -- loading -----------------------------------------------------------------------------------------------------

    def _load(self, item: Item) -> LoadOutcome:
        path = object_path(self._root, item.key)
        try:
            fd, direct = self._open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            self._lost(item.key)
            return MISSING
        except OSError as error:
            return Failed(f"{path}: {error.strerror}")
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes == 0:
                self.delete([item.key])
                return MISSING
            if nbytes > item.nbytes:
                return Failed(f"{path} has {nbytes} bytes, room for {item.nbytes}", "too_large")
            done, _ = read_object(fd, item.buffers, nbytes, direct=direct)
            with contextlib.suppress(OSError):  # keeps the order of use over a restart
                os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))
            return Loaded(done)
        except OSError as error:
            return Failed(f"{path}: {error.strerror}")
        finally:
            os.close(fd)

    def _found(self, key: ObjectKey) -> bool:
        """Is there a file that another process has put there?"""
        try:
            nbytes = os.stat(object_path(self._root, key), follow_symlinks=False).st_size
        except OSError:
            return False
        if nbytes:
            self._know(key, occupied(nbytes))
        return nbytes > 0

    # -- storing -----------------------------------------------------------------------------------------------------

    def _store(self, item: Item) -> StoreOutcome:
        account, need = self._account, occupied(item.nbytes)
        if account is None:
            return Failed(f"{self._root} is not writable", "read_only")
        if need > self._capacity:
            return Failed(f"an object of {item.nbytes} bytes, a capacity of {self._capacity}", "too_large")
        with account.locked():
            if not self._make_room(need):
                return Failed(f"{self._root}: all {self._capacity} bytes are taken by writes in flight", "full")
            account.reserve(need)
        temporary = account.temporary()
        try:
            try:
                self._write(temporary, item)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                with account.locked():  # the file system is fuller than the capacity knows
                    self._evict(max(need, 8 << 20))
                self._write(temporary, item)
            self._publish(temporary, item.key, need, account)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            with account.locked():
                account.cancel(need)
            if error.errno in _FULL:
                return Failed(f"{self._root}: {error.strerror}", "full")
            return Failed(f"{self._root}: {error.strerror}", "read_only" if error.errno in _READ_ONLY else "io")
        return STORED

    def _write(self, path: str, item: Item) -> None:
        fd, direct = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            if not write_object(fd, item.buffers, direct=direct) and direct:
                self._no_direct()
            if self._config.fsync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _publish(self, temporary: str, key: ObjectKey, nbytes: int, account: Account) -> None:
        path = object_path(self._root, key)
        folder = os.path.dirname(path)
        if folder not in self._folders:
            os.makedirs(folder, 0o700, exist_ok=True)
            self._folders.add(folder)
        with account.locked():
            replaced = _size(path)
            account.commit(nbytes)
            try:
                os.rename(temporary, path)
            except OSError:
                account.reserve(nbytes)
                account.release(nbytes)
                raise
            account.release(replaced)
            self._know(key, nbytes)
        if self._config.fsync:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    # -- room --------------------------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> bool:
        """Evict until `nbytes` more fit. Under the account's lock."""
        assert self._account is not None
        for attempt in range(2):
            over = self._account.used + nbytes - self._capacity
            if over <= 0:
                return True
            self._evict(over)
            if self._account.used + nbytes <= self._capacity:
                return True
            if attempt == 0:
                self._rescan()  # other processes' objects are not in this one's index
        return False

    def _evict(self, nbytes: int) -> None:
        assert self._account is not None
        freed = 0
        while freed < nbytes:
            with self._lock:
                victims = self._policy.evict(nbytes - freed, _never)
            if not victims:
                return
            for key in victims:
                assert isinstance(key, ObjectKey)
                freed += self._unlink(key, self._account)

    def _unlink(self, key: ObjectKey, account: Account) -> int:
        """Remove an object; how many bytes that gave back. Under the account's lock."""
        path = object_path(self._root, key)
        freed = _size(path)
        with self._lock:
            self._index.pop(key, None)
        try:
            os.unlink(path)
        except OSError:
            return 0
        account.release(freed)
        return freed

    # -- the index ---------------------------------------------------------------------------------------------------

    def _rescan(self) -> int:
        """Bring the index in line with the directory; the bytes it holds."""
        foreign = Foreign()
        found: list[Found] = sorted(scan(self._root, foreign), key=lambda f: f.used_ns)
        if foreign.count:
            self._log.warning(
                "%d foreign files in %s are left alone, such as %s", foreign.count, self._root, foreign.example
            )
        sizes = {f.key: occupied(f.nbytes) for f in found}
        with self._lock:
            gone = [k for k in self._index if k not in sizes]
            new = [f.key for f in found if f.key not in self._index]
            self._policy.remove(gone)
            self._policy.insert(new, [sizes[k] for k in new])
            self._index = sizes
        return sum(sizes.values())

    def _know(self, key: ObjectKey, nbytes: int) -> None:
        with self._lock:
            self._index[key] = nbytes
            self._policy.insert([key], [nbytes])

    def _lost(self, key: ObjectKey) -> None:
        """Another process has removed the object."""
        with self._lock:
            if self._index.pop(key, None) is not None:
                self._policy.remove([key])

    # -- files -------------------------------------------------------------------------------------------------------

    def _open(self, path: str, flags: int) -> tuple[int, bool]:
        """Open a file, by O_DIRECT where that goes; the descriptor and whether it is so."""
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._no_direct()
        return os.open(path, flags | os.O_CLOEXEC, 0o600), False

    def _no_direct(self) -> None:
        if self._direct:
            self._direct = False
            self._log.info("%s does not do O_DIRECT: the page cache is used", self._root)

    def _probe_direct(self) -> None:
        if self._config.direct != "on":
            return
        assert self._account is not None
        path = self._account.temporary()
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StorageError(f"{self._root} does not do O_DIRECT ({error.strerror}): set `direct: auto`") from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[Account]:
        account = self._account
        if account is None:
            raise StorageError(f"{self._root} is not writable")
        with account.locked():
            yield account


def _never(key: object) -> bool:
    return False


def _size(path: str) -> int:
    """Bytes that the file at `path` takes from the capacity; 0 when there is none."""
    try:
        return occupied(os.stat(path, follow_symlinks=False).st_size)
    except OSError:
        return 0
