"""Calls to a storage that holds no capacity of its own, kept within one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from kvcore.api import (
    BlockingStorage,
    Entry,
    Item,
    Loaded,
    LoadOutcome,
    Missing,
    ObjectKey,
    Storage,
    StorageError,
    Stored,
    StoreOutcome,
    Usage,
)
from kvcore.l2.blocking import Calls
from kvcore.l2.capacity import Capacity
from kvcore.observe import logger

LISTED_AT_ONCE = 1000
"""Objects per batch of a listing."""
RELIST_S = 600.0
"""How often the account of a shared storage is brought in line with what others did to it."""


class BoundedCalls(Calls):
    """Every store makes room first, by deleting whom the policy names.

    Args:
        capacity: the account and its policy.
        on_evict: told how many objects were deleted.
    """

    def __init__(
        self,
        storage: Storage | BlockingStorage,
        name: str,
        timeout_s: float,
        capacity: Capacity,
        on_evict: Callable[[int], None],
    ) -> None:
        super().__init__(storage, name, timeout_s)
        self._capacity = capacity
        self._on_evict = on_evict
        self._making_room = asyncio.Lock()
        self._counting: asyncio.Task[None] | None = None

    @property
    def max_object_bytes(self) -> int | None:
        return min(super().max_object_bytes or self._capacity.limit, self._capacity.limit)

    async def open(self) -> None:
        if self.storage.evicts:
            raise StorageError("it keeps to a capacity of its own: set `storage.capacity`, not the tier's `capacity`")
        await super().open()
        listing = self.entries(LISTED_AT_ONCE)
        try:
            # The first batch at once, so that a storage that cannot list is found out here.
            with suppress(StopAsyncIteration):
                self._capacity.add(await anext(listing))
        except NotImplementedError:
            raise StorageError("it cannot list what it holds, so the tier cannot keep a `capacity`") from None
        self._counting = asyncio.create_task(self._count(listing))

    async def close(self) -> None:
        if self._counting is not None:
            self._counting.cancel()
        await super().close()

    async def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        outcomes = await super().load(items)
        answered = list(zip(items, outcomes, strict=True))
        self._capacity.touch([i.key for i, o in reversed(answered) if isinstance(o, Loaded)])
        self._capacity.remove([i.key for i, o in answered if isinstance(o, Missing)])
        return outcomes

    async def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        capacity, nbytes = self._capacity, sum(i.nbytes for i in items)
        async with self._making_room:
            victims = capacity.victims(nbytes)
            if victims:
                await self.delete(victims)
                self._on_evict(len(victims))
            capacity.coming += nbytes
        try:
            outcomes = await super().store(items)
        finally:
            capacity.coming -= nbytes
        stored = [i for i, o in zip(items, outcomes, strict=True) if isinstance(o, Stored)]
        capacity.add(Entry(i.key, i.nbytes) for i in reversed(stored))  # the head of a prefix goes last
        return outcomes

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await super().delete(keys)
        self._capacity.remove(keys)

    async def usage(self) -> Usage | None:
        return Usage(self._capacity.used, len(self._capacity), self._capacity.limit)

    async def _count(self, listing: AsyncIterator[Sequence[Entry]]) -> None:
        missing: set[ObjectKey] = set()
        while True:
            try:
                async for entries in listing:
                    self._capacity.add(entries)
                    missing.difference_update(entry.key for entry in entries)
                self._capacity.remove(missing)  # known before the listing began, and not in it
            except Exception as error:
                logger.warning("tier %s: listing failed, its account is not complete: %s", self._name, error)
            if not self.storage.shared:
                return
            await asyncio.sleep(RELIST_S)
            missing = self._capacity.known()
            listing = self.entries(LISTED_AT_ONCE)
