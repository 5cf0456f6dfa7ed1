"""Waking a thread that sleeps in `poll`, from any other thread."""

import os
import threading
from contextlib import suppress


class Wake:
    """An eventfd. Once closed, `set` does nothing: its number may be another file's by then, such as an arena's, and
    what is written to it would stand there."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()  # a signal's handler may call `set` in the midst of one

    def fileno(self) -> int:
        """The file to poll for reading; -1 when closed."""
        return self._fd

    def set(self) -> None:
        """Wake who sleeps, or will. From any thread, and from a signal's handler."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Let the next `poll` sleep again. By the sleeper."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Free the file. By the sleeper. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
