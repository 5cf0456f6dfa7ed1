"""Runs a `BlockingStorage` on threads behind the asyncio interface, with a deadline on every call."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kvcore.api import BlockingStorage, Entry, Item, LoadOutcome, ObjectKey, Storage, StorageError, StoreOutcome, Usage
from kvcore.l2.threads import PoolExhausted, Threads


class DeadlineExceeded(StorageError):
    """A storage call overran its deadline. `settled` ends when the storage no longer touches the call's buffers;
    None when it already does not."""

    def __init__(self, text: str, settled: "asyncio.Future[Any] | None" = None) -> None:
        super().__init__(text)
        self.settled = settled


class Calls:
    """Calls one storage's methods, blocking or not, each with a deadline."""

    def __init__(self, storage: Storage | BlockingStorage, name: str, timeout_s: float) -> None:
        self.storage = storage
        self._name = name
        self._timeout_s = timeout_s
        self._threads: Threads | None = None
        if isinstance(storage, BlockingStorage):
            self._threads = Threads(f"kvcore-{name}", max(1, storage.preferred_concurrency))

    async def open(self) -> None:
        await self._call(self.storage.open)

    async def close(self) -> None:
        try:
            await self._call(self.storage.close)
        finally:
            if self._threads is not None:
                self._threads.close()

    async def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return _one_each(await self._call(self.storage.exists, keys), keys, "exists")

    async def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        return _one_each(await self._call(self.storage.load, items), items, "load")

    async def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        return _one_each(await self._call(self.storage.store, items), items, "store")

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await self._call(self.storage.delete, keys)

    async def list(self) -> Sequence[Entry]:
        return list(await self._call(self._list))

    async def usage(self) -> Usage | None:
        found: Usage | None = await self._call(self.storage.usage)
        return found

    async def ping(self) -> None:
        await self._call(self.storage.ping)

    def _list(self) -> Any:
        entries = self.storage.list()
        return entries if asyncio.iscoroutine(entries) else list(entries)  # type: ignore[call-overload]

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        name = method.__name__
        if self._threads is None:
            try:
                return await asyncio.wait_for(method(*args), self._timeout_s)
            except TimeoutError:
                raise DeadlineExceeded(f"{self._name}: {name} took more than {self._timeout_s:g} s") from None
        try:
            call = self._threads.submit(method, *args)
        except PoolExhausted as error:
            raise DeadlineExceeded(str(error)) from None
        await asyncio.wait((call.settled,), timeout=self._timeout_s)
        if not call.settled.done():
            self._threads.abandon(call)
            raise DeadlineExceeded(f"{self._name}: {name} took more than {self._timeout_s:g} s", call.settled)
        return call.settled.result()


def _one_each(outcomes: Any, asked: Sequence[Any], method: str) -> list[Any]:
    if not isinstance(outcomes, list) or len(outcomes) != len(asked):
        raise StorageError(
            f"{method} returned {outcomes!r:.100} for {len(asked)} keys: one outcome per key is required"
        )
    return outcomes
