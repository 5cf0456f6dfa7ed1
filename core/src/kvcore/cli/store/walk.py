"""Passes over all objects of a store: a bounded number of them in memory and of calls in flight."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from kvcore.api import Entry, StorageError
from kvcore.l1.arena import available_memory
from kvcore.l2.frames import Frames

BATCH_OBJECTS = 64
BATCH_BYTES = 16 << 20
MEMORY_BYTES = 128 << 20
"""Bytes of objects in memory at once; a larger object is alone in it."""
FAILURES = 10
"""So many batches in a row of which not one object could be moved, and a storage is given up."""


async def expected(frames: Frames, namespace: bytes | None = None) -> int | None:
    """How many objects a pass will see, for the progress; None where nobody looks or knows."""
    if namespace is not None or not sys.stderr.isatty():
        return None
    usage = await frames.usage()
    return usage.objects if usage is not None else None


async def entries_of(frames: Frames, namespace: bytes | None = None) -> AsyncIterator[Sequence[Entry]]:
    """The store's listing, in bounded batches: all objects, or those of one namespace."""
    async for entries in frames.entries():
        wanted = entries if namespace is None else [e for e in entries if e.key.namespace == namespace]
        if wanted:
            yield wanted


Handle = Callable[[Sequence[Entry]], Coroutine[Any, Any, None]]


async def each_batch(listing: AsyncIterator[Sequence[Entry]], handle: Handle, at_once: int) -> list[Entry]:
    """Hand all objects of `listing` to `handle`, in small batches, `at_once` of them. Raises what `handle` raises.

    Returns the objects that are too large for this machine's memory: they were not handed over.
    """
    most = max(MEMORY_BYTES, available_memory() // 4)
    too_large = []
    window = _Window(at_once)
    try:
        async for entries in listing:
            too_large += [e for e in entries if e.nbytes > most]
            for batch in _cut([e for e in entries if e.nbytes <= most]):
                nbytes = sum(e.nbytes for e in batch)
                await window.room(nbytes)
                window.start(handle(batch), nbytes)
        await window.drain()
    finally:
        await window.cancel()
    return too_large


class _Window:
    """Batches under way: at most `at_once`, and no more than `MEMORY_BYTES` of them unless it is a single one."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._running: dict[asyncio.Task[None], int] = {}

    def start(self, batch: Coroutine[Any, Any, None], nbytes: int) -> None:
        self._running[asyncio.ensure_future(batch)] = nbytes

    async def room(self, nbytes: int) -> None:
        """Wait until a batch of `nbytes` may start. Raises what a batch has raised."""
        while self._running and (
            len(self._running) >= self._at_once or sum(self._running.values()) + nbytes > MEMORY_BYTES
        ):
            await self._one()

    async def drain(self) -> None:
        """Wait for all. Raises what a batch has raised."""
        while self._running:
            await self._one()

    async def cancel(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def _one(self) -> None:
        done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._running[task]
            task.result()


class GiveUp:
    """Counts batches that came to nothing; a storage that answers nothing is not asked a million times."""

    def __init__(self) -> None:
        self._failures = 0

    def note(self, reason: str | None) -> None:
        """A batch is done; `reason` when nothing of it could be done. Raises `StorageError` when that goes on."""
        self._failures = 0 if reason is None else self._failures + 1
        if reason is not None and self._failures >= FAILURES:
            raise StorageError(f"given up after {FAILURES} failures in a row: {reason}")


def _cut(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    begin, nbytes = 0, 0
    for i, entry in enumerate(entries):
        if i > begin and (i - begin == BATCH_OBJECTS or nbytes + entry.nbytes > BATCH_BYTES):
            yield entries[begin:i]
            begin, nbytes = i, 0
        nbytes += entry.nbytes
    if begin < len(entries):
        yield entries[begin:]
