"""Calls to one storage, blocking or not: each has a deadline, and blocking ones run on threads."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from kvcore.api import BlockingStorage, Entry, Item, LoadOutcome, ObjectKey, Storage, StorageError, StoreOutcome, Usage
from kvcore.l2.threads import DeadlineExceeded, Threads

CANCEL_S = 0.2
"""How long a cancelled coroutine may take to let go of its buffers."""

OPEN_S = 120.0
"""An open may rebuild an index, which takes longer than a transfer is allowed to."""

LISTED_AT_ONCE = 1000
"""Objects per batch of a listing."""

Then = Callable[[Sequence[LoadOutcome]], None]


class Calls:
    """Calls one storage's methods, blocking or not, each with a deadline."""

    def __init__(self, storage: Storage | BlockingStorage, name: str, timeout_s: float) -> None:
        self.storage = storage
        self._name = name
        self._timeout_s = timeout_s
        self.concurrency = max(1, storage.preferred_concurrency)
        """So many calls may be under way at once."""
        blocks = isinstance(storage, BlockingStorage)
        self._threads = Threads(f"kvcore-{name}", self.concurrency) if blocks else None
        self._used = False
        self._hung: dict[asyncio.Future[Any], float] = {}

    @property
    def stuck_since(self) -> float | None:
        """When (monotonic) a call overran its deadline that has not ended since; None: there is none."""
        if self._threads is not None:
            return self._threads.stuck_since
        return min(self._hung.values(), default=None)

    @property
    def max_object_bytes(self) -> int | None:
        """Larger objects are not even offered to the storage."""
        return self.storage.max_object_bytes

    async def open(self) -> None:
        await self._call(self.storage.open, timeout_s=max(OPEN_S, self._timeout_s))

    def opened(self) -> None:
        """The storage is open by now, be it later than `open` waited for it."""

    async def close(self) -> None:
        """Close the storage, unless nothing of it was ever called, not even `open`. On a thread of its own: calls that
        are under way may hang, and are not waited for."""
        try:
            if self._used:
                if self._threads is not None:
                    self._threads.close()
                    self._threads = Threads(f"kvcore-{self._name}", 1)
                await self._call(self.storage.close)
        finally:
            if self._threads is not None:
                self._threads.close()

    async def exists(self, keys: Sequence[ObjectKey], timeout_s: float | None = None) -> list[bool]:
        return _one_each(await self._call(self.storage.exists, keys, timeout_s=timeout_s), keys, "exists", object)

    async def load(self, items: Sequence[Item], then: Then | None = None) -> list[LoadOutcome]:
        """`then` is called with the outcomes, on the storage's thread, which spares going to another. Where the storage
        has none it is not called."""
        load = self.storage.load
        if then is not None and isinstance(self.storage, BlockingStorage):
            load = partial(_load_then, self.storage.load, then)
        return _one_each(await self._call(load, items), items, "load", LoadOutcome)

    async def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        return _one_each(await self._call(self.storage.store, items), items, "store", StoreOutcome)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await self._call(self.storage.delete, keys)

    async def entries(self, batch: int = LISTED_AT_ONCE) -> AsyncIterator[Sequence[Entry]]:
        """What the storage lists, `batch` objects at a time, each batch within the deadline; what is listed all at once
        gets the time of an open. Raises `NotImplementedError` where the storage cannot list."""
        listed = await self._call(self.storage.list, timeout_s=max(OPEN_S, self._timeout_s))
        if self._threads is None:
            for at in range(0, len(listed), batch):
                yield listed[at : at + batch]
            return
        found = iter(listed)
        while entries := await self._call(_take, found, batch):
            yield entries

    async def usage(self) -> Usage | None:
        found: Usage | None = await self._call(self.storage.usage)
        return found

    async def ping(self) -> None:
        await self._call(self.storage.ping)

    async def _call(self, method: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        self._used = True
        name = getattr(method, "__name__", "load").strip("_")
        limit = self._timeout_s if timeout_s is None else timeout_s
        what = f"{self._name}: {name}"
        if self._threads is not None:
            return await self._threads.run(method, *args, timeout_s=limit, what=what)
        return await self._call_async(method, args, limit, what)

    async def _call_async(self, method: Callable[..., Any], args: Sequence[Any], limit: float, what: str) -> Any:
        task = asyncio.ensure_future(method(*args))
        try:
            await asyncio.wait((task,), timeout=limit)
            if not task.done():
                task.cancel()
                await asyncio.wait((task,), timeout=CANCEL_S)
                if not task.done():
                    self._hung[task] = time.monotonic()
                    task.add_done_callback(self._hung.pop)
                elif not task.cancelled():
                    task.exception()  # nobody's: keep asyncio from logging it
                raise DeadlineExceeded(f"{what} took more than {limit:g} s", None if task.done() else task)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.cancelled() and isinstance(task.exception(), SystemExit | KeyboardInterrupt):
            raise StorageError(f"{self._name}: {task.exception()!r} from the storage")
        if task.cancelled():
            raise StorageError(f"{self._name}: the call was cancelled by the storage itself")
        return task.result()


def _load_then(load: Callable[..., Any], then: Then, items: Sequence[Item]) -> list[LoadOutcome]:
    outcomes = _one_each(load(items), items, "load", LoadOutcome)
    then(outcomes)
    return outcomes


def _take(entries: Iterator[Entry], count: int) -> list[Entry]:
    return list(islice(entries, count))


def _one_each(outcomes: Any, asked: Sequence[Any], method: str, kind: Any) -> list[Any]:
    if (
        not isinstance(outcomes, list)
        or len(outcomes) != len(asked)
        or not all(isinstance(outcome, kind) for outcome in outcomes)
    ):
        raise StorageError(
            f"{method} returned {outcomes!r:.100} for {len(asked)} keys: one outcome per key is required"
        )
    return outcomes
