"""A storage's frames as they are: listed, read and checked, written, deleted. For moving and examining stores.

Nothing is decoded: a frame's header and checksums say whether it is whole, whatever serdes made its payload.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Literal, NamedTuple, TypeVar

from kvcore.api import (
    BlockingStorage,
    Entry,
    Failed,
    FrameError,
    Item,
    KVCoreError,
    Loaded,
    LoadOutcome,
    Missing,
    ObjectKey,
    Storage,
    StorageError,
    StoreOutcome,
    Usage,
)
from kvcore.l2 import frame
from kvcore.l2.buffers import StagingPool
from kvcore.l2.calls import Calls
from kvcore.l2.frame import HEADER_BYTES
from kvcore.l2.threads import DeadlineExceeded, Threads

SAMPLE = 16
"""Objects of a deleted batch that are asked for."""
_ALIGN = 4096

State = Literal["whole", "gone", "corrupt", "version", "failed"]
"""whole: header and checksums are right. gone: no longer there. corrupt: not a frame of this key. version: a frame of
another format version, which this release cannot check. failed: it could not be read."""
T = TypeVar("T")


class CannotList(StorageError):
    """The storage cannot enumerate its objects."""


class Found(NamedTuple):
    """One object that was read: its size in bytes as stored, its state and why, the tags of the serdes that made it.

    `data`: its stored bytes, which are there until the batch ends.
    """

    key: ObjectKey
    nbytes: int
    state: State
    reason: str
    tags: tuple[str, ...]
    data: memoryview


class Batch:
    """What `Frames.read` has read. `busy`: a hung call may still touch the memory, which is then not used again."""

    def __init__(self, found: list[Found], busy: bool) -> None:
        self.found = found
        self.busy = busy


class Frames:
    """One storage, its calls with a deadline each. Used from one event loop.

    Every method raises `StorageError`, with the tier's name, for whatever a storage raises.

    Args:
        name: the tier's.
        threads: where checksums are made.
        timeout_s: the deadline of every storage call.
    """

    def __init__(self, name: str, storage: Storage | BlockingStorage, *, threads: Threads, timeout_s: float) -> None:
        self.name = name
        self.storage = storage
        self._calls = Calls(storage, name, timeout_s)
        self.concurrency = self._calls.concurrency
        self._timeout_s = timeout_s
        self._threads = threads
        self._pool = StagingPool(self.concurrency)

    async def open(self) -> None:
        """Open the storage; one that does not open is closed again."""
        try:
            await self._told("open", self._calls.open())
        except BaseException:
            with suppress(Exception):
                await self._calls.close()
            raise

    async def close(self) -> None:
        """Close the storage."""
        await self._told("close", self._calls.close())

    async def ping(self) -> None:
        """Prove that the storage answers."""
        await self._told("ping", self._calls.ping())

    async def usage(self) -> Usage | None:
        """What the storage says it holds, or None."""
        return await self._told("usage", self._calls.usage())

    async def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Whether each object is there."""
        return await self._told("exists", self._calls.exists(keys))

    async def delete(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Delete objects; those that are still there afterwards. A sample is looked at first, and the others only when
        one of it is: asking can cost as much as deleting."""
        await self._told("delete", self._calls.delete(keys))
        if not any(await self.exists(keys[:: -(-len(keys) // SAMPLE)])):
            return []
        return [key for key, there in zip(keys, await self.exists(keys), strict=True) if there]

    async def entries(self) -> AsyncIterator[Sequence[Entry]]:
        """All objects, in bounded batches. Raises `CannotList` where the storage cannot enumerate."""
        batches = self._calls.entries()
        while True:
            try:
                entries = await anext(batches)
                if wrong := [e for e in entries if not isinstance(e, Entry)]:
                    raise StorageError(f"gave {wrong[0]!r:.100}, not an Entry")
            except StopAsyncIteration:
                return
            except NotImplementedError:
                raise CannotList(f"tier {self.name}: its storage cannot list what it holds") from None
            except Exception as error:
                raise self._error("list", error) from error
            yield entries

    @asynccontextmanager
    async def read(self, entries: Sequence[Entry]) -> AsyncIterator[Batch]:
        """Read and check objects. Their memory is used again when the context ends."""
        spans = [-(-max(0, entry.nbytes) // _ALIGN) * _ALIGN for entry in entries]
        buffer = self._pool.take(max(1, sum(spans)))
        whole, views, at = memoryview(buffer), [], 0
        for entry, span in zip(entries, spans, strict=True):
            views.append(whole[at : at + max(0, entry.nbytes)])
            at += span
        batch = Batch([], busy=True)  # until the call that was given the memory has answered
        try:
            busy, outcomes = await self._load(entries, views)
            batch.found = await self._threads.run(
                _check_all, entries, views, outcomes, timeout_s=self._timeout_s, what=f"{self.name}: checking"
            )
            batch.busy = busy
            yield batch
        except asyncio.CancelledError:
            batch.busy = True
            raise
        finally:
            if not batch.busy:
                with suppress(BufferError):
                    for view in (*views, *(f.data for f in batch.found), whole):
                        view.release()
                    self._pool.give(buffer)

    async def write(self, batch: Batch, chosen: Sequence[Found]) -> list[StoreOutcome]:
        """Store objects of a batch that another storage has read; one outcome each."""
        limit = self.storage.max_object_bytes
        fits = [f for f in chosen if limit is None or f.nbytes <= limit]
        outcomes: list[StoreOutcome] = []
        if fits:
            items = [Item(f.key, (f.data[:HEADER_BYTES], f.data[HEADER_BYTES:])) for f in fits]
            try:
                outcomes = await self._calls.store(items)
            except DeadlineExceeded as error:
                batch.busy = batch.busy or error.settled is not None
                outcomes = [Failed(str(error), "timeout")] * len(fits)
            except Exception as error:
                outcomes = [Failed(_text(error))] * len(fits)
        answers = iter(outcomes)
        large = Failed(f"larger than the limit of {limit} bytes of tier {self.name}", "too_large")
        return [large if limit is not None and f.nbytes > limit else next(answers) for f in chosen]

    async def _load(self, entries: Sequence[Entry], views: Sequence[memoryview]) -> tuple[bool, list[LoadOutcome]]:
        try:
            items = [Item(e.key, (v,)) for e, v in zip(entries, views, strict=True)]
            return False, await self._calls.load(items)
        except DeadlineExceeded as error:
            return error.settled is not None, [Failed(str(error), "timeout")] * len(entries)
        except Exception as error:
            return False, [Failed(_text(error))] * len(entries)

    async def _told(self, op: str, call: Awaitable[T]) -> T:
        try:
            return await call
        except Exception as error:
            raise self._error(op, error) from error

    def _error(self, op: str, error: Exception) -> StorageError:
        text = _text(error)
        return StorageError(text if text.startswith(f"{self.name}: ") else f"tier {self.name}: {op}: {text}")


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, KVCoreError) else f"{type(error).__name__}: {error}"


def _check_all(entries: Sequence[Entry], views: Sequence[memoryview], outcomes: Sequence[LoadOutcome]) -> list[Found]:
    return [_check(e, v, o) for e, v, o in zip(entries, views, outcomes, strict=True)]


def _check(entry: Entry, view: memoryview, outcome: LoadOutcome) -> Found:
    def found(state: State, reason: str, tags: tuple[str, ...] = (), nbytes: int = entry.nbytes) -> Found:
        return Found(entry.key, nbytes, state, reason, tags, view[:nbytes])

    if isinstance(outcome, Missing):
        return found("gone", "")
    if isinstance(outcome, Failed):
        changed = outcome.kind == "too_large"
        return found("failed", "became larger while it was read: try again" if changed else outcome.reason)
    if not (isinstance(outcome, Loaded) and 0 <= outcome.nbytes <= len(view)):
        return found("failed", f"the storage answered {outcome} for a room of {len(view)} bytes")
    stored = view[: outcome.nbytes]
    try:
        header = frame.unpack(entry.key, stored[:HEADER_BYTES], len(stored))
        if frame.checksum(stored[HEADER_BYTES:]) != header.checksum:
            raise FrameError("checksum", "the payload's checksum does not match")
    except FrameError as error:
        state: State = "version" if error.reason == "version" else "corrupt"
        return found(state, f"{error.reason}: {error}", nbytes=outcome.nbytes)
    return found("whole", "", tuple(stage.tag for stage in header.stages), outcome.nbytes)
