"""Loads ahead of requests: carried out here, where L1 and the tiers are; what to load, and when, hooks decide."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from kvcore.api import Brought
from kvcore.control import Fetch, StorageManager
from kvcore.control.spill import FREE_SHARE
from kvcore.engine import space as spaces
from kvcore.engine.lookup import Lookup
from kvcore.engine.space import Space
from kvcore.l1 import L1Object, ObjectSpace, ReadLease
from kvcore.observe import logger
from kvcore.observe.spans import CURRENT, OpenSpan, traced

PATIENCE_S = 0.01
"""A request that is looked up within this time needs nothing ahead."""
PIECE_S = 0.02
"""About so long a tier is at work before it is looked whether somebody waits for it."""
SHARE = 4
"""What was brought and is not used takes at most one part in so many of what its tenant can rely on."""
MAX_WANTED = 256
LOOK_S = 0.5
"""How often it is looked what has become of what was brought."""
_MAX_ASKED = 1024


class _Wanted(NamedTuple):
    space: Space
    hashes: tuple[bytes, ...]
    cause: str
    since: float
    span: OpenSpan | None


class Prefetcher:
    """The `Prefetch` of a cache. `bring` and `asked` come from any thread, the rest is done on the tiers' loop.

    Args:
        space_of: what is registered under a namespace.
        table_of: L1's table for one of its groups.
    """

    def __init__(
        self,
        manager: StorageManager,
        space_of: Callable[[bytes], Space | None],
        table_of: Callable[[Space, int], ObjectSpace],
    ) -> None:
        self._manager = manager
        self._l1 = manager.l1
        self._space_of = space_of
        self._table_of = table_of
        self._told = False
        self.listening = False
        """Does `asked` say anything to anyone?"""
        self.watch()
        self._wanted: dict[tuple[bytes, bytes], _Wanted] = {}  # oldest first
        self._unread: dict[L1Object, tuple[str, float]] = {}
        """What was brought and is not used: its cause, and when its load began."""
        self._bytes: dict[str, int] = {}
        """The same in bytes, by tenant."""
        self._asked: deque[tuple[float, Sequence[ObjectSpace], Sequence[bytes]]] = deque(maxlen=_MAX_ASKED)
        self._brought: dict[str, Brought] = {}
        self._serving = False
        self._looking = False

    def watch(self) -> None:
        """See whether there is an observer of `asked` by now."""
        self._told = self._manager.hooks.listens("asked")
        self.listening |= self._told

    def bring(self, namespace: bytes, hashes: Sequence[bytes], cause: str) -> bool:
        """See `Prefetch.bring`."""
        space = self._space_of(namespace)
        if space is None or not hashes or not spaces.can_name_chunks(hashes) or self._manager.closed:
            return False
        wanted = namespace, hashes[-1]
        if wanted in self._wanted:  # since then: who asks again and again is not put off by it, nor who waits behind
            return True
        if len(self._wanted) >= MAX_WANTED:
            self._manager.metrics.add("prefetch_skipped", 1, cause, "queue_full")
            return False
        self.listening = True
        self._wanted[wanted] = _Wanted(space, tuple(hashes), cause, time.monotonic(), CURRENT.get())
        self._manager.loop.post(self._wake)
        return True

    def brought(self, cause: str) -> Brought:
        """See `Prefetch.brought`."""
        return self._brought.get(cause, Brought())

    def room(self, namespace: bytes) -> int:
        """See `Prefetch.room`."""
        space = self._space_of(namespace)
        return 0 if space is None or self._manager.closed else self._room(self._table_of(space, 0))

    @property
    def free(self) -> float:
        """See `Prefetch.free`."""
        return float(self._l1.free_bytes / self._l1.arena.size)

    def asked(self, space: Space, tables: Sequence[ObjectSpace], hashes: Sequence[bytes]) -> None:
        """A request was looked up."""
        if hashes:
            wanted = self._wanted.pop((space.namespace, hashes[-1]), None)
            if wanted is not None:
                self._manager.metrics.add("prefetch_skipped", 1, wanted.cause, "asked")
            if self._unread or self._serving:
                self._asked.append((time.perf_counter(), tables, hashes))
            if self._told:
                self._manager.hooks.asked(space.namespace, hashes)

    # -- on the loop -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._serving:
            self._serving = True
            self._manager.loop.spawn(self._serve())

    async def _serve(self) -> None:
        try:
            for wanted in iter(lambda: next(iter(list(self._wanted.values())), None), None):  # asked for: it is gone
                early = wanted.since + PATIENCE_S - time.monotonic()
                if early > 0:
                    await asyncio.sleep(early)
                elif self._wanted.pop((wanted.space.namespace, wanted.hashes[-1]), None) is not None:
                    try:
                        with traced(self._manager.spans, "kvcore.prefetch", wanted.span) as span:
                            if span is not None:
                                span.attributes |= {"kvcore.cause": wanted.cause, "kvcore.chunks": len(wanted.hashes)}
                            await self._bring(wanted)
                    except Exception:
                        logger.exception("a load ahead of its request failed")
        finally:
            self._serving = False

    async def _bring(self, wanted: _Wanted) -> None:
        space, hashes, cause, *_ = wanted
        tables = [self._table_of(space, g) for g in range(len(space.groups))]
        here = [self._l1.reserve_each(table, hashes)[0] for table in tables]  # what is there must not go meanwhile
        try:
            await self._load(space, tables, hashes, cause)
        finally:
            for lease in here:
                self._l1.end_read(lease)
            for table in tables:  # as a lookup would: the head outlives the tail, whatever came first
                self._l1.end_read(self._l1.reserve_each(table, hashes)[0])

    async def _load(self, space: Space, tables: Sequence[ObjectSpace], hashes: Sequence[bytes], cause: str) -> None:
        lookup = Lookup(self._manager, space, tables, hashes, 0, lambda *_: None)
        here = [{i for i, h in enumerate(hashes) if h in t.objects or h in t.staging} for t in tables]
        missing = [(g, i) for g, there in enumerate(here) for i in range(len(hashes)) if i not in there]
        loads = (await lookup.located(missing, here))[0]
        loads.sort(key=lambda load: load[0])  # what has come is then a front in every group
        at, count = 0, 1
        manager, fetcher = self._manager, self._manager.fetcher
        while at < len(loads) and not manager.closed:
            while not fetcher.idle.is_set():
                await fetcher.idle.wait()
            piece = [(w, tier) for _, w, tier in loads[at : at + count] if w.chunk_hash not in w.space.objects]
            at += count
            if not piece:
                continue
            wants, tiers = [want for want, _ in piece], [tier for _, tier in piece]
            room = self._room(wants[0].space)
            while wants and sum(want.space.nbytes for want in wants) > room:
                wants.pop()
            begun = time.perf_counter()
            fetch = Fetch(partial(self._arrived, cause, begun))
            await fetcher.load(fetch, wants, tiers[: len(wants)], awaited=False)
            seconds = time.perf_counter() - begun
            if fetch.reasons or len(wants) < len(piece):
                reason = "failed" if fetch.reasons else "no_room"
                manager.metrics.add("prefetch_skipped", 1, cause, reason)
                return
            count = max(1, min(2 * count, int(len(wants) * PIECE_S / seconds)))
            if any(nbytes for _, nbytes in manager.stores.waiting().values()):
                await asyncio.sleep(seconds)

    def _room(self, table: ObjectSpace) -> int:
        """Bytes that may still be brought. What L1 alone has is never given up for it."""
        most = self._l1.share(table) // SHARE - self._bytes.get(table.tenant, 0)
        stores = self._manager.stores
        if not stores.active:  # else a tier has what goes
            kept_free = FREE_SHARE * self._l1.arena.size if stores.spill_tiers else 0.0  # they are to have it first
            most = min(most, int(self._l1.free_bytes - kept_free))
        return max(0, most)

    def _arrived(self, cause: str, begun: float, lease: ReadLease, source: str) -> None:
        if source != "l1":
            for obj in lease.objects:
                self._unread[obj] = (cause, begun)
                self._account(obj, 1)
            self._count(cause, "brought", len(lease.objects))
        self._l1.keep(lease)
        self._l1.end_read(lease)
        if self._unread and not self._looking:
            self._looking = True
            self._manager.loop.spawn(self._look())

    async def _look(self) -> None:
        """See what has become of what was brought, until nothing of it is left."""
        unread = self._unread
        try:
            while unread:
                await asyncio.sleep(LOOK_S)
                while self._asked:
                    at, tables, hashes = self._asked.popleft()
                    asked = [o for table in tables for h in hashes if (o := table.objects.get(h)) in unread]
                    self._end([o for o in asked if o is not None and unread[o][1] <= at], "used")
                self._end([o for o in unread if o.space.objects.get(o.chunk_hash) is not o], "wasted")
        finally:
            self._looking = False

    def _end(self, objects: Iterable[L1Object], became: str) -> None:
        for obj in dict.fromkeys(objects):
            cause, _ = self._unread.pop(obj)
            self._account(obj, -1)
            self._count(cause, became, 1)

    def _account(self, obj: L1Object, sign: int) -> None:
        tenant = obj.space.tenant
        self._bytes[tenant] = self._bytes.get(tenant, 0) + sign * obj.space.nbytes
        if not self._bytes[tenant]:
            del self._bytes[tenant]

    def _count(self, cause: str, became: str, count: int) -> None:
        so_far = self.brought(cause)
        self._brought[cause] = so_far._replace(**{became: getattr(so_far, became) + count})
        self._manager.metrics.add("prefetch_objects", count, cause, became)
