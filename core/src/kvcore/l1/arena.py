"""The arena: one range of anonymous shared memory that the owner cuts into slots and workers map.

It is a memfd, so it has no name, is not bounded by the size of `/dev/shm`, and is gone with its last user, however
that ended. A worker attaches through `/proc/<pid>/fd/<fd>`, which needs the same user and the same PID namespace, or is
handed the file by a server.

The file holds a header page, a table of slot generations (8 bytes per page of payload) and, from a multiple of 2 MiB
on, the payload.
"""

import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcore.api import ArenaError, format_size
from kvcore.l1.allocator import ALIGN, round_up
from kvcore.l1.memory import HUGE, map_shared, populate

_MAGIC = b"KVARENA1"
_HEADER = struct.Struct("<8s16sQQ")  # magic, token, payload start, payload size
_STEP = 64 << 20


class ArenaView:
    """A mapped arena. `buffer` is the whole payload region, writable; slots are offsets into it.

    A descriptor's `header` is the token in the arena's header, where its `token` is another name of the arena.
    """

    def __init__(self, fd: int, descriptor: dict[str, Any], *, fresh: bool) -> None:
        self.descriptor = descriptor
        start, size = descriptor["start"], descriptor["size"]
        self.size = size
        try:
            whole, base = map_shared(fd, start + size)
        except OSError as error:
            raise ArenaError(f"cannot map the arena of {format_size(size)}: {error}") from error
        header = (_MAGIC, bytes.fromhex(descriptor.get("header", descriptor["token"])), start, size)
        if fresh:
            _HEADER.pack_into(whole, 0, *header)
        elif _HEADER.unpack_from(whole, 0) != header:
            raise ArenaError("the arena found is not the one described: its owner has been replaced; attach anew")
        self._generations = whole[ALIGN : ALIGN + size // ALIGN * 8].cast("Q")
        self.buffer = whole[start:]
        self.address = base + start

    @classmethod
    def attach(cls, descriptor: dict[str, Any]) -> "ArenaView":
        """Map the arena that `Arena.descriptor` describes, in this or another process. Raises `ArenaError`."""
        fd = open_arena(descriptor)
        try:
            return cls(fd, descriptor, fresh=False)
        finally:
            os.close(fd)

    def generation(self, slot: int) -> int:
        """A number that changes whenever the slot at this offset is freed. Compare it before and after a copy."""
        return int(self._generations[slot // ALIGN])

    def generations(self, slots: Iterable[int]) -> list[int]:
        """The generation of each slot."""
        table = self._generations
        return [table[slot // ALIGN] for slot in slots]

    def watch(self, lost: Callable[[], None]) -> None:
        """Have `lost` called once, from another thread, when a server whose arena this is has gone: close it then, or
        its memory stays taken as long as this process does nothing. Not after `close`."""

    def close(self) -> None:
        """Let go of the memory. Views handed out keep it mapped until they are gone."""
        for view in (self._generations, self.buffer):
            with suppress(BufferError):  # someone still looks through it; the mapping ends with them
                view.release()


def open_arena(descriptor: dict[str, Any]) -> int:
    """A file descriptor of the arena of another process, through `/proc`. Raises `ArenaError`."""
    path = f"/proc/{descriptor['pid']}/fd/{descriptor['fd']}"
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ArenaError(
            f"cannot attach the arena of process {descriptor['pid']} ({path}: {error.strerror}): workers must run "
            "on the owner's machine, as its user and in its PID namespace"
        ) from error


class Arena(ArenaView):
    """The owner's side: creates the memory and bumps generations."""

    def __init__(self, size: int) -> None:
        size = round_up(size)
        available = available_memory()
        if size > available:
            raise ArenaError(
                f"l1.size is {format_size(size)}, but {format_size(available)} of memory are available: "
                "lower l1.size or free memory"
            )
        table = round_up(size // ALIGN * 8)
        start = -(-(ALIGN + table) // HUGE) * HUGE
        self._fd = -1
        try:
            self._fd = os.memfd_create("kvcore-arena", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, start + size)
        except OSError as error:
            if self._fd >= 0:
                os.close(self._fd)
            raise ArenaError(f"cannot create an arena of {format_size(size)}: {error.strerror}") from error
        descriptor = {
            "pid": os.getpid(),
            "fd": self._fd,
            "start": start,
            "size": size,
            "token": secrets.token_hex(16),
        }
        try:
            super().__init__(self._fd, descriptor, fresh=True)
        except ArenaError:
            os.close(self._fd)
            raise
        self._epoch = 0
        self._closing = threading.Event()
        self._prefault: threading.Thread | None = None

    def bump(self, slots: list[int]) -> None:
        """Change the generation of each slot: whatever was copied from or to it must not be believed any more."""
        generations = self._generations
        self._epoch += 1
        for slot in slots:
            generations[slot // ALIGN] = self._epoch

    def prefault(self) -> None:
        """Fault the memory in from a background thread: a first touch inside a copy is ten times slower."""
        self._prefault = threading.Thread(target=self._populate, name="kvcore-prefault", daemon=True)
        self._prefault.start()

    def close(self) -> None:
        """Unmap and let go of the memory. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._prefault is not None:
            self._prefault.join()
        super().close()
        os.close(self._fd)

    def _populate(self) -> None:
        for at in range(0, self.size, _STEP):
            if self._closing.is_set() or not populate(self.address + at, min(_STEP, self.size - at)):
                return


def available_memory() -> int:
    """Bytes this process may still take: the machine's available memory, or its cgroup's where that is less."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(available, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue  # no such controller, or "max"
    return max(0, available)
