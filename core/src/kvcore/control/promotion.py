"""What one tier had and others want, too: copied while the caller lends its memory, and written in the background.

For stores without L1. Where there is one, what was loaded lies there, and `StoreController.promote` writes it on.
"""

import asyncio
import mmap
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from kvcore.api import ObjectKey, StorageError
from kvcore.control.loop import LoopThread
from kvcore.l2 import Parcel, Threads, Tier
from kvcore.observe import Journal, Metrics

ROOM_BYTES = 256 << 20
"""So much may wait to be written; more is dropped and counted."""
_PAGE = mmap.PAGESIZE


class Promotion:
    """Copies on their way to tiers. Used on the loop.

    Args:
        write: writes objects to a tier.
    """

    def __init__(
        self,
        loop: LoopThread,
        metrics: Metrics,
        write: Callable[[Tier, Sequence[Parcel]], Coroutine[Any, Any, object]],
        journal: Journal,
    ) -> None:
        self._loop = loop
        self._metrics = metrics
        self._journal = journal
        self._write = write
        self._room_bytes = ROOM_BYTES
        self._waiting_bytes = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._threads = Threads("kvcore-copy", 1)

    async def offer(self, found: Sequence[Parcel], wanting: Sequence[tuple[Tier, Sequence[Parcel]]]) -> None:
        """Copy those objects that tiers want, of those `found`, and have them written. When it ends, the payloads are
        the caller's again."""
        fits = (self._room_bytes - self._waiting_bytes) // found[0].nbytes
        chosen = {t.key for _, wanted in wanting for t in wanted}
        taken = [t for t in found if t.key in chosen][: max(0, fits)]
        copies: dict[ObjectKey, Parcel] = {}
        nbytes = len(taken) * found[0].nbytes
        self._waiting_bytes += nbytes
        with suppress(StorageError, OSError, MemoryError):  # no thread, or no memory: dropped and counted
            copies = {t.key: t for t in await self._threads.run(_copies, taken)} if taken else {}
        writes = []
        for tier, wanted in wanting:
            ours = [copies[t.key] for t in wanted if t.key in copies]
            self._metrics.add("tier_promoted", len(ours), tier.name)
            if len(ours) < len(wanted):
                self._metrics.add("tier_dropped", len(wanted) - len(ours), tier.name, "queue_full")
                self._journal.note(tier.name, "dropped", "queue_full", [t.key for t in wanted if t.key not in copies])
            if ours:
                writes.append((tier, ours))
        if writes:
            task = self._loop.spawn(self._run(writes, nbytes))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._waiting_bytes -= nbytes

    async def drain(self, timeout_s: float) -> None:
        """Wait until all is written, so long at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        self._threads.close()

    async def _run(self, writes: Sequence[tuple[Tier, list[Parcel]]], nbytes: int) -> None:
        try:
            await asyncio.gather(*(self._write(tier, ours) for tier, ours in writes), return_exceptions=True)
        finally:
            self._waiting_bytes -= nbytes


def _copies(objects: Sequence[Parcel]) -> list[Parcel]:
    """The same objects in memory of our own, each page-aligned, so that a direct write needs no copy of its own."""
    spans = [-(-t.nbytes // _PAGE) * _PAGE for t in objects]
    memory = memoryview(mmap.mmap(-1, sum(spans)))
    copied, at = [], 0
    for parcel, span in zip(objects, spans, strict=True):
        room, end = memory[at : at + parcel.nbytes], 0
        for part in parcel.payload:
            room[end : end + len(part)] = part
            end += len(part)
        copied.append(parcel._replace(payload=(room,)))
        at += span
    return copied
