"""Calls to a storage that holds no capacity of its own, kept within one."""

import asyncio
from collections.abc import Callable, Sequence

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

DELETED_AT_ONCE = 64
"""Objects per call that makes room."""
RELIST_S = 600.0
"""How often the account of a shared storage is brought in line with what others did to it, and a listing that failed
is tried again."""


class BoundedCalls(Calls):
    """Every store makes room first, by deleting whom the policy names.

    Args:
        capacity: the account and its policy.
        on_evict: told what was deleted.
    """

    def __init__(
        self,
        storage: Storage | BlockingStorage,
        name: str,
        timeout_s: float,
        capacity: Capacity,
        on_evict: Callable[[Sequence[Entry]], None],
    ) -> None:
        super().__init__(storage, name, timeout_s)
        self._capacity = capacity
        self._on_evict = on_evict
        self._making_room = asyncio.Lock()
        self._finished = asyncio.Event()
        self._counting: asyncio.Task[None] | None = None

    @property
    def max_object_bytes(self) -> int | None:
        return min(super().max_object_bytes or self._capacity.limit, self._capacity.limit)

    async def open(self) -> None:
        if self.storage.evicts:
            raise StorageError("it keeps to a capacity of its own: set `storage.capacity`, not the tier's `capacity`")
        if type(self.storage).list in (Storage.list, BlockingStorage.list):
            raise StorageError("it cannot list what it holds, so the tier cannot keep a `capacity`")
        await super().open()
        self._counting = asyncio.create_task(self._count())

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
        nbytes = sum(i.nbytes for i in items)
        if nbytes > self._capacity.limit and len(items) > 1:
            half = len(items) // 2
            return [*await self.store(items[:half]), *await self.store(items[half:])]
        await self._make_room(nbytes)
        try:
            outcomes = await super().store(items)
        except Exception:  # it may have come to be, or come to be later
            self._account(items)
            raise
        finally:
            self._capacity.coming -= nbytes
            self._finished.set()
        self._account([i for i, o in zip(items, outcomes, strict=True) if isinstance(o, Stored)])
        return outcomes

    def _account(self, items: Sequence[Item]) -> None:
        self._capacity.add(Entry(i.key, i.nbytes) for i in reversed(items))  # the head of a prefix goes last

    async def _make_room(self, nbytes: int) -> None:
        """Delete until `nbytes` more fit, and keep them free."""
        capacity = self._capacity
        async with self._making_room:
            while capacity.over(nbytes) > 0:
                victims = capacity.victims(nbytes)[:DELETED_AT_ONCE]
                if victims:
                    gone = capacity.entries(victims)
                    await self.delete(victims)
                    self._on_evict(gone)
                elif capacity.coming:
                    self._finished.clear()
                    await self._finished.wait()
                else:
                    break
            capacity.coming += nbytes

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await super().delete(keys)
        self._capacity.remove(keys)

    async def usage(self) -> Usage | None:
        return Usage(self._capacity.used, len(self._capacity), self._capacity.limit)

    async def _count(self) -> None:
        """Learn what is there, and of a shared storage, from time to time, what others did to it."""
        while True:
            missing = self._capacity.known()
            try:
                async for entries in self.entries():
                    self._capacity.add(entries)
                    missing.difference_update(entry.key for entry in entries)
                self._capacity.remove(missing)  # known before the listing began, and not in it
                await self._make_room(0)
            except Exception as error:
                logger.warning("tier %s: listing failed, its account is not complete: %s", self._name, error)
            else:
                if not self.storage.shared:
                    return
            await asyncio.sleep(RELIST_S)
