"""Hearing of a file's removal without looking for it again and again: Linux's inotify."""

import ctypes
import os
from contextlib import suppress

_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_IN_ATTRIB, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x004, 0x400, 0x800  # unlinking an open file changes its attributes

_libc = ctypes.CDLL(None, use_errno=True)


class Removals:
    """Files that are watched. What it tells is a hint to look; of a folder above that moves it does not tell."""

    def __init__(self) -> None:
        self._fd: int = _libc.inotify_init1(_FLAGS)

    def fileno(self) -> int:
        """The file to poll for reading; -1: this system, or its limit, allows no watching."""
        return self._fd

    def watch(self, path: str) -> bool:
        """Watch one more file. False when that is not possible."""
        mask = _IN_ATTRIB | _IN_DELETE_SELF | _IN_MOVE_SELF
        return self._fd >= 0 and _libc.inotify_add_watch(self._fd, os.fsencode(path), mask) >= 0

    def clear(self) -> None:
        """Forget what was told so far."""
        with suppress(BlockingIOError):
            while os.read(self._fd, 1 << 16):
                pass

    def close(self) -> None:
        """Watch no more. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
