"""Calls to a storage, kept within a capacity, the quotas of tenants and a time to live that it does not know itself."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from kvcore.api import (
    MISSING,
    BlockingStorage,
    Entry,
    Failed,
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
from kvcore.api.storage import can_list
from kvcore.l2.breaker import FIRST_PAUSE_S
from kvcore.l2.calls import Calls, Then
from kvcore.l2.capacity import Capacity
from kvcore.l2.threads import DeadlineExceeded
from kvcore.observe import logger

DELETED_AT_ONCE = 64
"""Objects per call that makes room."""
RELIST_S = 600.0
"""How often the account of a shared storage is brought in line with what others did to it. A listing that failed is
tried again sooner, after pauses that double up to this, and whenever a ping is answered."""


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
        self._answers = asyncio.Event()
        self._counting: asyncio.Task[None] | None = None

    @property
    def max_object_bytes(self) -> int | None:
        limits = [n for n in (super().max_object_bytes, self._capacity.limit) if n is not None]
        return min(limits, default=None)

    async def open(self) -> None:
        if self.storage.evicts and self._capacity.limit is not None:
            raise StorageError("it keeps to a capacity of its own: set `storage.capacity`, not the tier's `capacity`")
        if not can_list(type(self.storage)):
            raise StorageError(
                "it cannot list what it holds, so the tier cannot keep a `capacity`, a quota or a `ttl`: leave them "
                "out, or implement `list` in the plugin"
            )
        await super().open()

    def opened(self) -> None:
        self._counting = asyncio.create_task(self._count())

    async def ping(self) -> None:
        await super().ping()
        self._answers.set()

    async def close(self) -> None:
        if self._counting is not None:
            self._counting.cancel()
        await super().close()

    async def exists(self, keys: Sequence[ObjectKey], timeout_s: float | None = None) -> list[bool]:
        found = await super().exists(keys, timeout_s)
        return [there and not self._capacity.expired(k) for k, there in zip(keys, found, strict=True)]

    async def load(self, items: Sequence[Item], then: Then | None = None) -> list[LoadOutcome]:
        fresh = [i for i in items if not self._capacity.expired(i.key)]
        if len(fresh) < len(items):
            then = None  # it knows of all of them
        answered = list(zip(fresh, await super().load(fresh, then) if fresh else [], strict=True))
        self._capacity.touch([i.key for i, o in reversed(answered) if isinstance(o, Loaded)])
        self._capacity.remove([i.key for i, o in answered if isinstance(o, Missing)])
        outcomes = {i.key: o for i, o in answered}
        return [outcomes.get(i.key, MISSING) for i in items]

    async def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        capacity, namespace = self._capacity, items[0].key.namespace
        others = [i for i in items if i.key.namespace != namespace]
        if others:  # room is made for one tenant at a time
            outcomes = dict(zip([i.key for i in others], await self.store(others), strict=True))
            first = [i for i in items if i.key.namespace == namespace]
            outcomes |= zip([i.key for i in first], await self.store(first), strict=True)
            return [outcomes[i.key] for i in items]
        nbytes = sum(i.nbytes for i in items)
        if nbytes > capacity.most(namespace):
            if len(items) == 1:
                return [Failed("larger than its tenant's quota of this tier", "too_large")]
            half = len(items) // 2
            return [*await self.store(items[:half]), *await self.store(items[half:])]
        over = [i.key for i in items if capacity.expired(i.key)]
        if over:  # a storage may keep what it has
            await self.delete(over)
        if not await self._make_room(namespace, nbytes):
            return [Failed("its tenant's quota of this tier is in use by what is being written", "full")] * len(items)
        try:
            stored = await super().store(items)
        except Exception as error:  # it may have come to be, or come to be later
            self._account(items)
            if isinstance(error, DeadlineExceeded) and error.settled is not None:
                error.settled.add_done_callback(partial(self._came_late, items))
            raise
        finally:
            capacity.expect(namespace, -nbytes)
            self._finished.set()
        self._account([i for i, o in zip(items, stored, strict=True) if isinstance(o, Stored)])
        return stored

    async def expire(self) -> list[Entry]:
        """Delete objects whose time is over; which those were."""
        gone: list[Entry] = []
        while over := self._capacity.due(DELETED_AT_ONCE):
            entries = self._capacity.entries(over)
            await self.delete(over)
            gone += entries
        return gone

    def _came_late(self, items: Sequence[Item], call: "asyncio.Future[list[StoreOutcome]]") -> None:
        """What was given up has come to be: it may have been deleted meanwhile, when it was not there yet."""
        if not call.cancelled() and call.exception() is None:
            self._account([i for i, o in zip(items, call.result(), strict=False) if isinstance(o, Stored)])

    def _account(self, items: Sequence[Item]) -> None:
        # the head of a prefix goes last
        self._capacity.add((Entry(i.key, i.nbytes) for i in reversed(items)), stored=True)

    async def _make_room(self, namespace: bytes, nbytes: int) -> bool:
        """Delete until `nbytes` more fit, and keep them free. False when the tenant's rights do not reach so far."""
        capacity = self._capacity
        while True:
            async with self._making_room:  # whom one deletes another does not count on; in turns, a batch each
                if capacity.missing(namespace, nbytes) <= 0:
                    break
                victims = capacity.victims(namespace, nbytes, DELETED_AT_ONCE)
                if victims:
                    gone = capacity.entries(victims)
                    try:
                        await self.delete(victims)
                    except BaseException:
                        capacity.kept(victims)
                        raise
                    self._on_evict(gone)
                    continue
            if not capacity.waits(namespace):
                if capacity.divided:
                    return False
                break
            self._finished.clear()
            await self._finished.wait()
        capacity.expect(namespace, nbytes)
        return True

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await super().delete(keys)
        self._capacity.remove(keys)

    async def usage(self) -> Usage | None:
        if self._capacity.limit is None:
            return await super().usage()
        return Usage(self._capacity.used, len(self._capacity), self._capacity.limit)

    async def _count(self) -> None:
        """Learn what is there, and of a shared storage, from time to time, what others did to it."""
        pause_s, said = FIRST_PAUSE_S, ""
        while True:
            missing = self._capacity.known()
            self._answers.clear()
            try:
                async for entries in self.entries():
                    self._capacity.add(entries)
                    missing.difference_update(entry.key for entry in entries)
                self._capacity.remove(missing)  # known before the listing began, and not in it
                await self._shrink()
            except Exception as error:
                if said != (said := str(error)):
                    logger.warning("tier %s: listing failed, its account is not complete: %s", self._name, error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._answers.wait(), pause_s)
                pause_s = min(2 * pause_s, RELIST_S)
            else:
                if not (self.storage.shared or self.storage.evicts):
                    return
                pause_s, said = FIRST_PAUSE_S, ""
                await asyncio.sleep(RELIST_S)

    async def _shrink(self) -> None:
        """Keep to the limit, and each tenant to its quota, also when others have filled the storage."""
        for namespace in self._capacity.namespaces():
            await self._make_room(namespace, 0)
