"""The disk storage: one file per object, written under a temporary name and published by a rename.

Without `fsync` a power loss may cost what was stored last; the frame's checksum, which the core verifies, keeps a torn
file from being served either way. A killed process loses only what it was writing.
"""

import contextlib
import errno
import os
import stat
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
from kvcore_disk.account import OPEN_LOCK_S, Account
from kvcore_disk.config import DiskConfig, capacity_bytes
from kvcore_disk.paths import BLOCK_BYTES, CONTROL, Foreign, Found, object_path, occupied, scan, size_on_disk
from kvcore_disk.transfer import read_object, write_object

_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_KINDS = {
    errno.EFBIG: "too_large",
    errno.ETIMEDOUT: "timeout",
    errno.ENOTEMPTY: "corrupt",  # a directory in an object's place: the storage works
    **dict.fromkeys(_FULL, "full"),
    **dict.fromkeys(_READ_ONLY, "read_only"),
}
_SPARE_BYTES = 8 << 20  # given up at once when the file system is full before the capacity is reached,
_SPARE_PART = 16  # but no more than one part in so many of what is held
_ATTEMPTS = 4  # to write one object into a file system that others fill, too


class DiskStorage(BlockingStorage):
    """Objects in a directory of a local file system. Several processes may use one directory.

    Locks: the account's first (stores, deletes and evictions of all processes, for microseconds; never held while an
    object is written), then this instance's own over index and policy. Loads take only the latter, once per batch.
    """

    persistent = True
    evicts = True
    preferred_concurrency = 4

    def __init__(self, config: DiskConfig, context: Context) -> None:
        self._config = config
        self._root = os.path.abspath(Path(config.path).expanduser())
        self._log = context.log
        self._passive = context.passive
        self._direct = config.direct != "off"
        self._policy = context.make_eviction(config.eviction)
        self._on_evict = context.on_evict
        self._lock = threading.Lock()
        self._renewing = threading.Lock()  # held while the account is made anew
        self._index: dict[ObjectKey, int] = {}  # bytes taken from the capacity
        self._hidden: set[ObjectKey] = set()  # deleted, in a directory that is read-only
        self._kept: list[
            set[ObjectKey]
        ] = []  # of each `store` under way, what it has: that is not evicted for the rest
        self._folders: set[str] = set()
        self._account: Account | None = None  # None: read-only, or not open
        self._capacity = 0

    # -- the storage interface ---------------------------------------------------------------------------------------

    def open(self) -> None:
        remedy = "name another with `path`, or give this user read and write access to it"
        try:
            if not self._passive:
                os.makedirs(self._root, 0o700, exist_ok=True)
            found = os.listdir(self._root)
        except OSError as error:
            raise StorageError(f"the directory {self._root} cannot be used ({error.strerror}): {remedy}") from error
        try:
            if CONTROL in found or not self._passive:
                self._account = Account(self._root, self._rescan)
        except OSError as error:
            if _KINDS.get(error.errno or 0) not in ("full", "read_only"):
                raise StorageError(f"{self._root}: {error.strerror}: {remedy}") from error
            self._log.warning("%s is not writable (%s): objects are loaded, none is stored", self._root, error.strerror)
        try:
            if self._passive:  # no index, and nobody waits for the lock
                self._set_capacity(self._counts()[0])
                return
            with self._account.locked(OPEN_LOCK_S) if self._account is not None else contextlib.nullcontext():
                self._set_capacity(self._rescan(self._account, report=True))
                if self._account is not None:
                    self._insist_on_direct(self._account)
                    self._make_room(0, self._account)
        except OSError as error:
            raise StorageError(f"{error.filename or self._root}: {error.strerror}: {remedy}") from error

    def close(self) -> None:
        account, self._account = self._account, None
        if account is not None:
            self._close_account(account)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        index = self._index
        return [key in index or self._found(key) for key in keys]

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        now_ns = time.time_ns()
        outcomes = [self._load(item, now_ns - i) for i, item in enumerate(items)]
        used = [i.key for i, o in zip(items, outcomes, strict=True) if isinstance(o, Loaded)]
        for key in used:
            if key not in self._index:  # another process's object, or one that is gone by now
                self._found(key)
        with self._lock:
            self._policy.touch(used[::-1])  # policies want the tail of a prefix before its head
        return outcomes

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        """Where not all of a batch fits its front is kept, for of a prefix the tail is useless without its head."""
        now_ns = time.time_ns()
        outcomes: list[StoreOutcome] = []
        kept: set[ObjectKey] = set()
        with self._lock:
            self._kept.append(kept)
        try:
            for i, item in enumerate(items):
                outcome = self._store(item, now_ns - i, kept)
                outcomes.append(outcome)
                if isinstance(outcome, Failed) and outcome.kind == "full":
                    behind = Failed(f"{self._root}: there was no room for an object before it in its batch", "full")
                    return [*outcomes, *[behind] * (len(items) - i - 1)]
            return outcomes
        finally:
            with self._lock:
                self._kept = [other for other in self._kept if other is not kept]
                self._policy.touch([i.key for i, o in zip(items, outcomes, strict=False) if o is STORED][::-1])

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        account = self._account
        if account is None:
            if self._passive:
                raise StorageError(f"{self._root} is not writable, or has never been opened by an engine")
            with self._lock:
                self._hidden.update(keys)
                self._forget(keys)
            return
        try:
            with account.locked():
                for key in keys:
                    self._unlink(key, account)
        except OSError as error:
            raise StorageError(f"{self._root}: {error.strerror}") from error

    def list(self) -> Iterator[Entry]:
        foreign = Foreign()
        for found in scan(self._root, foreign):
            if found.nbytes:
                yield Entry(found.key, found.nbytes, found.used_ns / 1e9)
        if self._passive:
            self._report(foreign)

    def usage(self) -> Usage:
        nbytes, objects = self._counts()
        try:  # others may leave less of the file system than the capacity
            space = os.statvfs(self._root)
        except OSError:
            return Usage(nbytes, objects, self._capacity)
        return Usage(nbytes, objects, min(self._capacity, nbytes + space.f_bavail * space.f_frsize))

    def ping(self) -> None:
        try:
            os.stat(self._root)
        except OSError as error:
            raise StorageError(f"{self._root}: {error.strerror}") from error

    # -- loading -----------------------------------------------------------------------------------------------------

    def _load(self, item: Item, now_ns: int) -> LoadOutcome:
        path = object_path(self._root, item.key)
        try:
            # a foreign pipe of that name would block for ever, a foreign link lead anywhere
            fd, direct = self._open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR):
                with self._lock:
                    self._forget([item.key])
                return MISSING
            return Failed(f"{path}: {error.strerror}")
        try:
            status = os.fstat(fd)
            if not (stat.S_ISREG(status.st_mode) and status.st_size) or item.key in self._hidden:
                with self._lock:
                    self._forget([item.key])
                return MISSING
            if status.st_size > item.nbytes:
                return Failed(f"{path} has {status.st_size} bytes, room for {item.nbytes}", "too_large")
            done, went_direct = read_object(fd, item.buffers, status.st_size, direct=direct)
            if direct and not went_direct:
                self._no_direct()
            used_ns = status.st_atime_ns if self._passive else now_ns  # put back: the kernel may have set it, too
            with contextlib.suppress(OSError):  # keeps the order of use over a restart
                os.utime(fd, ns=(used_ns, status.st_mtime_ns))
            return Loaded(done)
        except OSError as error:
            return Failed(f"{path}: {error.strerror}")
        finally:
            os.close(fd)

    def _found(self, key: ObjectKey) -> bool:
        """Is there a file that another process has put there?"""
        if key in self._hidden:
            return False
        try:
            nbytes = size_on_disk(object_path(self._root, key))
        except OSError:
            return False
        if nbytes:
            self._know(key, occupied(nbytes))
        return nbytes > 0

    # -- storing -----------------------------------------------------------------------------------------------------

    def _store(self, item: Item, now_ns: int, kept: set[ObjectKey]) -> StoreOutcome:
        account, need = self._account, occupied(item.nbytes)
        if account is None:
            return Failed(f"{self._root} is not writable", "read_only")
        if need == 0:
            return Failed("an empty object: an empty file is what a power loss leaves", "corrupt")
        if need > self._capacity:
            return Failed(f"an object of {item.nbytes} bytes, a capacity of {self._capacity}", "too_large")
        try:
            try:
                with account.locked():
                    begun = self._begin(need, account)
            except FileNotFoundError:
                self._start_anew(account)
                raise
            if begun is None:
                return Failed(f"{self._root}: all {self._capacity} bytes are taken by what is being stored", "full")
            path, fd, direct = begun
            try:
                try:
                    self._write(fd, item, now_ns, direct, account)
                finally:
                    os.close(fd)
                kept.add(item.key)
                self._publish(path, item.key, need, account)
            except BaseException:
                with contextlib.suppress(OSError), account.locked():
                    account.cancel(path)
                raise
        except OSError as error:
            where = error.filename2 or error.filename or self._root
            return Failed(f"{where}: {error.strerror}", _KINDS.get(error.errno or 0, "io"))
        return STORED

    def _begin(self, need: int, account: Account) -> tuple[str, int, bool] | None:
        """Make and reserve room, and the unfinished file; its path, its descriptor, whether that is O_DIRECT.

        None: there is no room.
        """
        account.check_place()
        if not self._make_room(need, account):
            return None
        path = account.begin(need)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            try:
                return path, *self._open(path, flags)
            except OSError as error:  # a file system can be out of inodes with bytes to spare
                if error.errno not in _FULL or not self._evict(_spare(need, account), account):
                    raise
                return path, *self._open(path, flags)
        except OSError:
            account.release(need)
            raise

    def _start_anew(self, account: Account) -> None:
        """Someone has removed the directory: make it again, for the next object. Not under the old account's lock,
        which may be the same file."""
        self._folders.clear()
        if not self._renewing.acquire(blocking=False):
            return  # another thread does
        try:
            if self._account is not account:
                return  # another thread has
            self._close_account(account)
            self._account = Account(self._root, self._rescan)
            with self._account.locked():
                self._rescan(self._account)
        finally:
            self._renewing.release()

    def _write(self, fd: int, item: Item, now_ns: int, direct: bool, account: Account) -> None:
        went_direct = False
        for attempt in range(_ATTEMPTS):
            try:
                went_direct = write_object(fd, item.buffers, direct=direct)
                break
            except OSError as error:
                if error.errno not in _FULL or attempt + 1 == _ATTEMPTS:
                    raise
                with account.locked():  # the file system is fuller than the capacity knows
                    if not self._evict(_spare(occupied(item.nbytes), account), account):
                        raise
                os.ftruncate(fd, 0)
        if direct and not went_direct:
            self._no_direct()
        os.utime(fd, ns=(now_ns, now_ns))
        if self._config.fsync:
            os.fsync(fd)

    def _publish(self, path: str, key: ObjectKey, nbytes: int, account: Account) -> None:
        final = object_path(self._root, key)
        folder = os.path.dirname(final)
        if folder not in self._folders:
            self._make_folder(folder)
        with account.locked():
            replaced = occupied(size_on_disk(final))
            try:
                os.rename(path, final)
            except FileNotFoundError:  # someone has tidied up
                self._make_folder(folder)
                os.rename(path, final)
            except IsADirectoryError:
                os.rmdir(final)  # nothing is in it, or `OSError`
                os.rename(path, final)
            self._know(key, nbytes)
            if replaced:
                account.release(replaced)
            else:
                account.published()
        if self._config.fsync:
            _sync_folder(folder)

    def _close_account(self, account: Account) -> None:
        try:
            account.close()
        except OSError as error:
            self._log.warning("%s: %s; whoever opens it next cleans up", self._root, error.strerror)

    def _make_folder(self, folder: str) -> None:
        parent = os.path.dirname(folder)
        for path in (parent, folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
                if self._config.fsync:
                    _sync_folder(os.path.dirname(path))
        self._folders.add(folder)

    # -- room: under the account's lock ------------------------------------------------------------------------------

    def _make_room(self, nbytes: int, account: Account) -> bool:
        """Evict until `nbytes` more fit."""
        over = account.used + nbytes - self._capacity
        if over > 0 and self._evict(over, account) < over:
            self._rescan(account)  # other processes' objects are not in this one's index
            over = account.used + nbytes - self._capacity
            return over <= 0 or self._evict(over, account) >= over
        return True

    def _evict(self, nbytes: int, account: Account) -> int:
        """Give up at least `nbytes`, or all there is; how many bytes that freed."""
        freed = 0
        gone: list[Entry] = []
        try:
            while freed < nbytes:
                with self._lock:
                    named = self._policy.evict(nbytes - freed, self._is_kept)
                    victims = [k for k in named if isinstance(k, ObjectKey)]
                if not victims:
                    break
                for i, key in enumerate(victims):
                    try:
                        size = self._unlink(key, account)
                    except OSError:
                        with self._lock:
                            self._policy.insert(victims[i:], [self._index.get(k, BLOCK_BYTES) for k in victims[i:]])
                        raise
                    freed += size
                    gone.append(Entry(key, size))
        finally:
            if gone:
                self._on_evict(gone)
        return freed

    def _is_kept(self, key: object) -> bool:
        """Under `_lock`."""
        return any(key in kept for kept in self._kept)

    def _unlink(self, key: ObjectKey, account: Account) -> int:
        """Remove an object; how many bytes that gave back."""
        path = object_path(self._root, key)
        freed = occupied(size_on_disk(path))
        if freed:
            os.unlink(path)
        with self._lock:
            self._forget([key])
        if freed:
            account.release(freed, objects=1)
        return freed

    def _rescan(self, account: Account | None, *, report: bool = False) -> int:
        """Bring index and account in line with the directory; the bytes it holds. Under the account's lock."""
        foreign = Foreign()
        found = sorted(scan(self._root, foreign), key=lambda f: f.used_ns)
        if account is not None:
            self._remove_empty(found)
        found = [f for f in found if f.nbytes]
        if report:
            self._report(foreign)
        sizes = {f.key: occupied(f.nbytes) for f in found}
        with self._lock:
            gone = [k for k in self._index if k not in sizes]
            new = [k for k in sizes if k not in self._index]
            self._policy.remove(gone)
            self._policy.insert(new, [sizes[k] for k in new])
            self._index = sizes
        held = sum(sizes.values())
        if account is not None:
            account.recount(held, len(sizes))
        return held

    def _remove_empty(self, found: Sequence[Found]) -> None:
        """What a power loss has left of objects is no object, and takes an inode. Nobody is writing it: what is
        unfinished has another name."""
        for key in (f.key for f in found if not f.nbytes):
            path = object_path(self._root, key)
            with contextlib.suppress(OSError):
                if os.stat(path, follow_symlinks=False).st_size == 0:
                    os.unlink(path)

    def _report(self, foreign: Foreign) -> None:
        if foreign.count:
            self._log.warning(
                "%d foreign files in %s are left alone, such as %s", foreign.count, self._root, foreign.example
            )

    def _counts(self) -> tuple[int, int]:
        """Bytes and objects held."""
        if self._account is not None:
            return self._account.counts()
        if self._passive:
            nbytes = objects = 0
            for found in scan(self._root, Foreign()):
                nbytes, objects = nbytes + occupied(found.nbytes), objects + (found.nbytes > 0)
            return nbytes, objects
        with self._lock:
            return sum(self._index.values()), len(self._index)

    def _set_capacity(self, held: int) -> None:
        space = os.statvfs(self._root)
        self._capacity = capacity_bytes(self._config.capacity, space.f_bavail * space.f_frsize, held)

    # -- the index ---------------------------------------------------------------------------------------------------

    def _know(self, key: ObjectKey, nbytes: int) -> None:
        if self._passive:
            return
        with self._lock:
            self._index[key] = nbytes
            self._policy.insert([key], [nbytes])

    def _forget(self, keys: Sequence[ObjectKey]) -> None:
        """Under `_lock`."""
        self._policy.remove(keys)
        for key in keys:
            self._index.pop(key, None)

    # -- files -------------------------------------------------------------------------------------------------------

    def _open(self, path: str, flags: int) -> tuple[int, bool]:
        """Open a file, by O_DIRECT where that goes; the descriptor and whether it is so."""
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                with contextlib.suppress(FileNotFoundError):
                    if flags & os.O_EXCL:  # some kernels make the file before they refuse
                        os.unlink(path)
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            if stat.S_ISREG(os.fstat(fd).st_mode):  # what is no file of ours does not say what files can do
                self._no_direct()
            return fd, False
        return os.open(path, flags | os.O_CLOEXEC, 0o600), False

    def _no_direct(self) -> None:
        if self._direct:
            self._direct = False
            self._log.warning("%s does not do O_DIRECT: the page cache is used", self._root)

    def _insist_on_direct(self, account: Account) -> None:
        """With `direct: on`, write a page to see."""
        if self._config.direct != "on":
            return
        begun = self._begin(BLOCK_BYTES, account)
        if begun is None:
            return
        path, fd, went_direct = begun
        try:
            went_direct = went_direct and write_object(fd, [memoryview(bytes(BLOCK_BYTES))], direct=True)
        except OSError as error:
            if error.errno not in _FULL:  # a full disk is no reason not to start
                raise
        finally:
            os.close(fd)
            account.cancel(path)
        if not went_direct:
            raise StorageError(f"{self._root} does not do O_DIRECT: set `direct: auto`, or name another `path`")


def _spare(need: int, account: Account) -> int:
    """Bytes to give up for an object of `need` bytes on a file system that is full: some more, lest the next has to."""
    return max(need, min(_SPARE_BYTES, account.used // _SPARE_PART))


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
