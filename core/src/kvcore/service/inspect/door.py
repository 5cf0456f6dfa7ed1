"""A Unix socket through which this user's tools ask an open cache, and the one thread behind it.

The thread sleeps in `accept`: while nobody asks, nothing wakes. One asks at a time, each for one answer.
"""

import atexit
import contextlib
import errno
import os
import re
import secrets
import socket
import struct
import threading
import time
import weakref
from pathlib import Path

from kvcore.explain.catalog import Catalog
from kvcore.observe import Throttle, logger
from kvcore.service.inspect import folder
from kvcore.service.inspect.subject import Subject

ASK_S = 5.0
"""A client says all that it wants within so long: nobody else is answered meanwhile."""
TAKE_S = 10.0
"""It takes the answer within so long."""
LAST_S = 1.5
"""Who records asks every second: so long a cache that closes waits for the last question."""
WAITING = 128
"""So many questions wait for their turn; who has one more tries again."""
LACK_S = 1.0
"""After so long it is tried again when there were no more files."""
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_MAX_NAME = 40
_CREDENTIALS = struct.Struct("3i")


def show(subject: Subject) -> "Door | None":
    """Let this user's tools ask about a cache until it is closed. Never raises: one that cannot be asked is a line in
    the log. None, too, where `inspect.requests` is 0."""
    if not subject.shown:
        return None
    try:
        door = Door(subject)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error
        logger.warning("`kvcore top` and `kvcore explain` cannot ask this cache: %s", why)
        return None
    identities = getattr(subject.cache, "identities", None)
    if identities is not None:
        identities.keep(Catalog(door.path.parent))
    return door


class Door:
    """Open from its making on. Raises `OSError` when there is no place for the socket, or no thread.

    Attributes:
        path: of the socket.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._pid = os.getpid()
        self._over = False
        self._read_at = subject.read_at
        self._answered = threading.Event()
        self._log = Throttle()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self.path = _listen(self._socket, folder.made(), subject.name)
            try:
                threading.Thread(target=self._serve, name="kvcore-inspect", daemon=True).start()
            except RuntimeError as error:
                self.path.unlink()
                raise OSError(errno.EAGAIN, str(error)) from error
        except BaseException:
            self._socket.close()
            raise
        _doors.add(self)
        subject.at_end(self.close)
        atexit.register(self.close)

    def close(self) -> None:
        """Nobody can ask any more, once who records has the last requests. Idempotent; in a fork the socket stays the
        parent's."""
        if os.getpid() == self._pid and not self._over:
            self._wait_for_recorder()
            self._over = True
            atexit.unregister(self.close)
            with contextlib.suppress(OSError):  # the folder may be gone
                self.path.unlink()  # first: by this a cache that was closed is told from one that was killed
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread
            self._socket.close()

    def _wait_for_recorder(self) -> None:
        closing = time.monotonic()
        if closing - self._read_at > 2 * LAST_S:
            return  # nobody records
        while (left := closing + LAST_S - time.monotonic()) > 0:
            self._answered.clear()
            if self._read_at >= closing:
                return
            self._answered.wait(left)

    def forked(self) -> None:
        """In the child nobody answers: the socket would seem alive there after the parent's end."""
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._socket.accept()
            except OSError as error:
                if self._over:
                    return
                if error.errno not in _LACKS:
                    logger.warning("this cache can no longer be asked: %s", error.strerror)
                    self.close()
                    return
                self._log.warning("lack", f"this cache cannot be asked now: {error.strerror}")
                time.sleep(LACK_S)
                continue
            with asking:
                _answer(asking, self._subject)
            self._read_at = self._subject.read_at
            self._answered.set()


def _answer(asking: socket.socket, subject: Subject) -> None:
    try:
        if _uid(asking) not in (os.geteuid(), 0):
            return
        from kvcore.service.inspect.answer import answer  # at the first question: most caches are never asked

        answer(asking, subject, ASK_S, TAKE_S)
    except OSError:  # who asked is gone, or there are no more files
        pass
    except Exception:
        logger.exception("a question about this cache failed")


def _uid(asking: socket.socket) -> int:
    """Whose process asks."""
    found = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def _listen(made: socket.socket, place: Path, name: str) -> Path:
    """Listen on a socket in this folder. It gets its name when somebody listens: one that refuses is nobody's."""
    written = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).lstrip(".-")[:_MAX_NAME] or "cache"
    unnamed = place / f".{secrets.token_hex(4)}"
    longest = len(os.fsencode(place)) + len(written) + 24
    if longest > folder.MAX_PATH_BYTES:
        raise OSError(f"the path of its socket in {place} would be too long: set {folder.VARIABLE} to a shorter one")
    made.bind(str(unnamed))
    try:
        unnamed.chmod(0o600)
        made.listen(WAITING)
        for number in range(1, 1000):
            more = "" if number == 1 else f".{number}"
            path = place / f"{written}-{os.getpid()}{more}.sock"
            if path.exists() and not folder.alive(path):
                path.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(unnamed, path)
                return path
        raise OSError(f"{place} is full of sockets")
    finally:
        unnamed.unlink(missing_ok=True)


_doors: "weakref.WeakSet[Door]" = weakref.WeakSet()


def _forked() -> None:
    for door in list(_doors):
        door.forked()


os.register_at_fork(after_in_child=_forked)
