"""Where objects lie below the root, and the scan that finds them again.

    ROOT/a/b/NAME      an object; NAME is `ObjectKey.name`, `a/b` comes from a checksum of it: 256 directories, so few
                       that an empty cache is not slow to fill; a million objects make 4,000 in each
    ROOT/.kvcore/      the shared account and the unfinished files (see `account`)

A name found on disk is believed only if a key can have written it, in the directory where it would be looked for.
Everything else is foreign: it is counted for a report and never opened or removed.
"""

import os
import re
import stat
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from kvcore.api import ObjectKey

CONTROL = ".kvcore"
BLOCK_BYTES = 4096
_FAN = re.compile(r"[0-9a-f]\Z")
_NOT_FOREIGN = (CONTROL, "lost+found")


class Found(NamedTuple):
    """An object on disk: its length in bytes and when it was last stored or loaded (ns since the epoch)."""

    key: ObjectKey
    nbytes: int
    used_ns: int


class Foreign:
    """Counts what is not ours and remembers the first path, for one log line."""

    def __init__(self) -> None:
        self.count = 0
        self.example = ""

    def add(self, path: str) -> None:
        self.count += 1
        self.example = self.example or path


def occupied(nbytes: int) -> int:
    """Bytes that a file of `nbytes` takes from the capacity: whole file system blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def bucket(name: str) -> str:
    """The two directories of an object. A checksum, since hashes chosen by a key scheme need not be spread evenly."""
    crc = zlib.crc32(name.encode())
    return f"{crc >> 28:x}/{crc >> 24 & 15:x}"


def object_path(root: str, key: ObjectKey) -> str:
    """The absolute path of a key's object."""
    name = key.name
    return f"{root}/{bucket(name)}/{name}"


def size_on_disk(path: str) -> int:
    """Length in bytes of the regular file at `path`; 0 when there is none, or something that is not ours."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def used_ns(status: os.stat_result) -> int:
    """When the object was last stored or loaded. Loads set the access time themselves, whatever the mount says."""
    return max(status.st_atime_ns, status.st_mtime_ns)


def scan(root: str, foreign: Foreign) -> Iterator[Found]:
    """All objects below `root`, in no order, from names and inodes alone. Those of no bytes are what a power loss has
    left of them."""
    for first in _entries(root):
        if first.name in _NOT_FOREIGN:
            continue
        if not (_FAN.match(first.name) and first.is_dir(follow_symlinks=False)):
            foreign.add(first.path)
            continue
        for second in _entries(first.path):
            if not (_FAN.match(second.name) and second.is_dir(follow_symlinks=False)):
                foreign.add(second.path)
                continue
            where = f"{first.name}/{second.name}"
            for entry in _entries(second.path):
                found = _object(entry, where, foreign)
                if found is not None:
                    yield found


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:  # removed by someone meanwhile
        return []


def _object(entry: os.DirEntry[str], where: str, foreign: Foreign) -> Found | None:
    try:
        key = ObjectKey.from_name(entry.name)
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    except ValueError:
        foreign.add(entry.path)
        return None
    if not stat.S_ISREG(status.st_mode) or bucket(entry.name) != where:
        foreign.add(entry.path)
        return None
    return Found(key, status.st_size, used_ns(status))
