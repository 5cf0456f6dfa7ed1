"""Where objects lie below the root, the scan that finds them again, and files that are not finished yet.

    ROOT/ab/NAME            an object; NAME is `ObjectKey.name`, `ab` comes from a checksum of it: 256 directories
    ROOT/.kvcore-nixl/ID    an unfinished file, flock'ed by who writes it; a rename makes an object of it

Everything else is foreign: never opened, never removed.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator

from kvcore.api import Entry, ObjectKey

CONTROL = ".kvcore-nixl"
_FOLDER = re.compile("[0-9a-f]{2}")
_UNFINISHED = re.compile("[0-9]+-[0-9a-f]{12}-[0-9]+")
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def folder(name: str) -> str:
    """The directory of an object. A checksum, since hashes chosen by a key scheme need not be spread evenly."""
    return f"{zlib.crc32(name.encode()) >> 24:02x}"


def object_path(root: str, key: ObjectKey) -> str:
    """The path of a key's object."""
    name = key.name
    return f"{root}/{folder(name)}/{name}"


def size_of(path: str) -> int:
    """Length in bytes of the regular file at `path`; 0 when there is none, or something that is not ours."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def scan(root: str) -> Iterator[Entry]:
    """All objects below `root`, in no order, from names and inodes alone. Raises `OSError`."""
    for place in _entries(root):
        if _FOLDER.fullmatch(place.name) and place.is_dir(follow_symlinks=False):
            for entry in _entries(place.path):
                found = _object(entry, place.name)
                if found is not None:
                    yield found


class Unfinished:
    """A file that is written. A context manager: what was not published by its end is removed.

    Args:
        direct: open it with O_DIRECT.
        room: bytes that are reserved on the file system at once, so that a full disk is known before the first write,
            and so that no write has to make the file longer, which the kernel would not do in the background.
    """

    _id = secrets.token_hex(6)
    _numbers = itertools.count()

    def __init__(self, root: str, room: int, *, direct: bool) -> None:
        self.path = f"{root}/{CONTROL}/{os.getpid()}-{self._id}-{next(self._numbers)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            self.fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:  # some kernels make the file before they refuse
                _remove(self.path)
            raise
        try:
            with contextlib.suppress(OSError):  # without locks nobody is sure who is dead, and leaves it alone
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _reserve(self.fd, room)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Unfinished":
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)
        if self.path:
            _remove(self.path)

    def publish(self, path: str, nbytes: int) -> None:
        """Cut it to `nbytes` and give it its name. Raises `OSError`."""
        if os.fstat(self.fd).st_size != nbytes:
            os.ftruncate(self.fd, nbytes)
        try:
            os.rename(self.path, path)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            os.rename(self.path, path)
        self.path = ""


def remove_orphans(root: str) -> int:
    """Remove the unfinished files whose writer is dead; how many. Raises `OSError`."""
    removed = 0
    for entry in _entries(f"{root}/{CONTROL}"):
        if _UNFINISHED.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(OSError):
                fd = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
                    removed += 1
                finally:
                    os.close(fd)
    return removed


def _reserve(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_RESERVATION:
            raise
        os.ftruncate(fd, nbytes)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:  # removed by someone meanwhile
        return []


def _object(entry: os.DirEntry[str], place: str) -> Entry | None:
    try:
        key = ObjectKey.from_name(entry.name)
        status = entry.stat(follow_symlinks=False)
    except (FileNotFoundError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode) or folder(entry.name) != place or not status.st_size:
        return None
    return Entry(key, status.st_size, max(status.st_atime, status.st_mtime))
