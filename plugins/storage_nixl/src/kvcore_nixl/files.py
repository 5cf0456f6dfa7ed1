"""Objects in files, moved by NIXL's POSIX or GDS backend: written under a temporary name, published by a rename."""

import contextlib
import errno
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvcore.api import (
    MISSING,
    STORED,
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
from kvcore_nixl.agent import BACKENDS, Job, Piece
from kvcore_nixl.config import NixlConfig, default_path
from kvcore_nixl.lanes import Lane, Lanes, address
from kvcore_nixl.memory import PAGE, Buffers
from kvcore_nixl.move import Move
from kvcore_nixl.paths import CONTROL, Unfinished, object_path, remove_orphans, scan, size_of

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_KINDS = {errno.EFBIG: "too_large", **dict.fromkeys(_FULL, "full"), **dict.fromkeys(_READ_ONLY, "read_only")}
_SMALL_BYTES = 16 << 10
"""Smaller pieces, such as a frame's header, are copied: it costs no more than to register them, and keeps them few."""
_NOT_OURS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR)


class Files:
    """The file side of the storage. Several processes may use one directory."""

    def __init__(self, config: NixlConfig, context: Context) -> None:
        self._root = os.path.abspath(Path(config.path or default_path()).expanduser())
        self._backend = BACKENDS[config.backend]
        self._lanes = Lanes(self._backend, dict(config.params), context.log)
        self._log: logging.Logger = context.log
        self._passive = context.passive
        self._insists = config.direct == "on"
        self._direct = config.direct != "off"
        self._lock = threading.Lock()
        self._hidden: set[ObjectKey] = set()  # deleted, in a directory that is read-only
        self._objects = self._nbytes = 0

    def open(self) -> None:
        remedy = "name another with `path`, or give this user read and write access to it"
        try:
            if not self._passive:
                os.makedirs(self._root, 0o700, exist_ok=True)
            os.listdir(self._root)
        except OSError as error:
            raise StorageError(f"the directory {self._root} cannot be used ({error.strerror}): {remedy}") from error
        self._lanes.open()
        try:
            if not self._passive:
                self._prepare()
            for entry in scan(self._root):
                self._objects += 1
                self._nbytes += entry.nbytes
        except OSError as error:
            raise StorageError(f"{error.filename or self._root}: {error.strerror}: {remedy}") from error

    def close(self) -> None:
        self._lanes.close()

    def register_memory(self, memory: memoryview) -> None:
        self._lanes.register_arena(memory)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        hidden = self._hidden
        try:
            return [key not in hidden and size_of(object_path(self._root, key)) > 0 for key in keys]
        except OSError as error:
            raise StorageError(f"{self._root}: {error.strerror}") from error

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            try:
                self._unlink(key)
            except OSError as error:
                if error.errno not in _READ_ONLY or self._passive:
                    raise StorageError(f"{self._root}: {error.strerror}") from error
                self._hidden.add(key)

    def entries(self) -> Iterator[Entry]:
        return scan(self._root)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._nbytes, self._objects)

    def ping(self) -> None:
        try:
            os.stat(self._root)
        except OSError as error:
            raise StorageError(f"{self._root}: {error.strerror}") from error

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        """A batch that fits into one lane."""
        now_ns = time.time_ns()
        with contextlib.ExitStack() as files, self._lanes.lane() as lane:
            opened = [self._open_object(item, files) for item in items]
            reads = [found[0] for found in opened if isinstance(found, tuple)]
            self._plan(reads, lane)
            errors = iter(
                lane.agent.move(
                    "READ",
                    [read.job(whole_pages=True) for read in reads],
                    _outside(reads, lane),
                    meanwhile=lambda: _read_tails(reads),
                )
            )
            return [
                self._loaded(*found, next(errors), now_ns - i) if isinstance(found, tuple) else found
                for i, found in enumerate(opened)
            ]

    def _open_object(self, item: Item, files: contextlib.ExitStack) -> tuple[Move, os.stat_result] | LoadOutcome:
        path = object_path(self._root, item.key)
        if item.key in self._hidden:
            return MISSING
        try:
            # a foreign pipe of that name would block for ever, a foreign link lead anywhere
            fd, direct = self._open(path)
        except OSError as error:
            return MISSING if error.errno in _NOT_OURS else Failed(f"{path}: {error.strerror}")
        files.callback(os.close, fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return MISSING
        if status.st_size > item.nbytes:
            return Failed(f"{path} has {status.st_size} bytes, room for {item.nbytes}", "too_large")
        return Move(path, fd, Buffers(item.buffers), status.st_size, PAGE if direct else 1), status

    def _loaded(self, read: Move, status: os.stat_result, error: str, now_ns: int) -> LoadOutcome:
        if error or read.error:
            return Failed(f"{read.path}: {error or read.error}")
        read.unstage()
        used_ns = status.st_atime_ns if self._passive else now_ns  # put back: the kernel may have set it, too
        with contextlib.suppress(OSError):  # keeps the order of use over a restart
            os.utime(read.fd, ns=(used_ns, status.st_mtime_ns))
        return Loaded(read.nbytes)

    def _open(self, path: str) -> tuple[int, bool]:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._no_direct()
        return os.open(path, flags), False

    # -- storing -----------------------------------------------------------------------------------------------------

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        """A batch that fits into one lane."""
        with contextlib.ExitStack() as files, self._lanes.lane() as lane:
            begun = [self._begin(item, files) for item in items]
            writes = [found[0] for found in begun if isinstance(found, tuple)]
            self._plan(writes, lane)
            for write in writes:
                write.stage()
            errors = iter(
                lane.agent.move("WRITE", [write.job(whole_pages=False) for write in writes], _outside(writes, lane))
            )
            return [
                self._stored(item.key, *found, next(errors)) if isinstance(found, tuple) else found
                for item, found in zip(items, begun, strict=True)
            ]

    def _begin(self, item: Item, files: contextlib.ExitStack) -> tuple[Move, Unfinished] | StoreOutcome:
        if not item.nbytes:
            return Failed("an empty object: an empty file is what a power loss leaves", "corrupt")
        buffers, nbytes, page = Buffers(item.buffers), item.nbytes, PAGE if self._direct else 1
        try:
            file = files.enter_context(self._unfinished(-(-nbytes // page) * page, direct=page > 1))
        except OSError as error:
            return Failed(f"{self._root}: {error.strerror}", _KINDS.get(error.errno or 0, "io"))
        return Move(file.path, file.fd, buffers, nbytes, page), file

    def _unfinished(self, room: int, *, direct: bool) -> Unfinished:
        try:
            return Unfinished(self._root, room, direct=direct)
        except FileNotFoundError:  # someone has tidied up
            os.makedirs(self._root, 0o700, exist_ok=True)
            os.makedirs(f"{self._root}/{CONTROL}", 0o700, exist_ok=True)
            return Unfinished(self._root, room, direct=direct)

    def _stored(self, key: ObjectKey, write: Move, file: Unfinished, error: str) -> StoreOutcome:
        if error:
            return Failed(f"{self._root}: {error}")
        path = object_path(self._root, key)
        try:
            with self._lock:
                before = size_of(path)
                file.publish(path, write.nbytes)
                self._count(before, write.nbytes)
        except OSError as caught:
            return Failed(f"{path}: {caught.strerror}", _KINDS.get(caught.errno or 0, "io"))
        self._hidden.discard(key)
        return STORED

    def _unlink(self, key: ObjectKey) -> None:
        path = object_path(self._root, key)
        with self._lock:
            before = size_of(path)
            if before:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                self._count(before, 0)

    def _count(self, before: int, after: int) -> None:
        """Under `_lock`. Other processes' changes are counted at the next open."""
        self._nbytes = max(0, self._nbytes + after - before)
        self._objects = max(0, self._objects + bool(after) - bool(before))

    # -- both --------------------------------------------------------------------------------------------------------

    def _plan(self, moves: Sequence[Move], lane: Lane) -> None:
        """Decide for each byte whether it goes from or to the caller's memory, or through the lane's."""
        any_memory = self._backend.any_memory
        for move in moves:
            move.plan(lambda start, nbytes: nbytes >= _SMALL_BYTES and (any_memory or lane.covers(start, nbytes)))
        staged = lane.stage(sum(move.staged_bytes for move in moves))
        at = 0
        for move in moves:
            move.staging = staged[at : at + move.staged_bytes]
            at += move.staged_bytes

    def _prepare(self) -> None:
        """Clean up, and see whether NIXL can write here. Raises `StorageError` or `OSError`."""
        try:
            os.makedirs(f"{self._root}/{CONTROL}", 0o700, exist_ok=True)
            if removed := remove_orphans(self._root):
                self._log.info("%s: removed %d files that a killed process left unfinished", self._root, removed)
            self._try_out()
        except OSError as error:
            if _KINDS.get(error.errno or 0) not in ("full", "read_only"):
                raise
            self._log.warning("%s is not writable (%s): objects are loaded, none is stored", self._root, error.strerror)

    def _try_out(self) -> None:
        """Write a page and read it again, by O_DIRECT if it should be so."""
        page = secrets.token_bytes(PAGE)
        try:
            error = self._round_trip(page)
        except OSError as caught:
            if not self._direct or caught.errno != errno.EINVAL:
                raise
            error = "O_DIRECT is refused"
        if not error:
            return
        if self._insists:
            raise StorageError(f"{self._root} does not do O_DIRECT ({error}): set `direct: auto`, or another `path`")
        if self._direct:
            self._no_direct()
            error = self._round_trip(page)
        if error:
            raise StorageError(
                f"NIXL's backend {self._backend.plugin} cannot write to {self._root} ({error}; its lines on stderr say "
                "why): choose another `path`, `backend` or `params`"
            )

    def _round_trip(self, page: bytes) -> str:
        with Unfinished(self._root, PAGE, direct=self._direct) as file, self._lanes.lane() as lane:
            memory = lane.stage(2 * PAGE)
            memory[:PAGE] = np.frombuffer(page, np.uint8)
            memory[PAGE:] = 0
            there = Job(file.fd, "", [Piece(address(memory), PAGE, 0)])
            back = Job(file.fd, "", [Piece(address(memory) + PAGE, PAGE, 0)])
            error = lane.agent.move("WRITE", [there])[0] or lane.agent.move("READ", [back])[0]
            return error or ("" if bytes(memory[PAGE:]) == page else "it reads back something else")

    def _no_direct(self) -> None:
        if self._direct:
            self._direct = False
            self._log.warning("%s does not do O_DIRECT: the page cache is used", self._root)


def _outside(moves: Sequence[Move], lane: Lane) -> list[tuple[int, int]]:
    """Memory that must be registered for this call."""
    return [place for move in moves for place in move.in_place() if not lane.covers(*place)]


def _read_tails(reads: Sequence[Move]) -> None:
    for read in reads:
        read.read_tail()
