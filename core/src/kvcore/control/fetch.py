"""The fetch controller: brings objects from the tiers into L1 for a lookup.

All tiers are asked at once; each missing object gets one source, the first tier in order that has it. What that one
does not deliver (`exists` is a hint) the tiers after it are asked for. A tier that does not answer holds up nobody whom
another can serve. Objects are read straight into reserved slots in small batches, front of the prefix first, so that
what has arrived when the time is up is a usable front.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore.api import Failed, Loaded, ObjectKey, ObjectLayout
from kvcore.control.locate import locate
from kvcore.control.loop import LoopThread
from kvcore.control.residents import Residents
from kvcore.control.store import StoreController
from kvcore.l1 import L1, L1Object, ObjectSpace, ReadLease, WriteLease
from kvcore.l2 import Parcel, Tier
from kvcore.observe import Journal, logger

PROBE_BYTES = 32 << 20
"""How much is loaded to see how fast a tier is."""


class Want(NamedTuple):
    """One object that a lookup could use."""

    space: ObjectSpace
    chunk_hash: bytes
    layout: ObjectLayout

    @property
    def key(self) -> ObjectKey:
        """The object's name in the tiers."""
        return ObjectKey(self.space.namespace, self.chunk_hash, self.space.group)


class Fetch:
    """One lookup's loads. Leases arrive through `on_lease` on the loop's thread, together with the tier's name."""

    def __init__(self, on_lease: Callable[[ReadLease, str], None] | None = None) -> None:
        self.on_lease = on_lease or (lambda lease, source: None)
        self.reasons: dict[str, int] = {}
        """Why wanted objects did not arrive: reason -> count."""
        self.why: dict[bytes, tuple[str, str]] = {}
        """The same of those that were somewhere: chunk hash -> reason and tier."""
        self.over = ""
        """Why it ended before everything that was somewhere had arrived."""
        self.silent: list[Tier] = []
        """Tiers that did not say what they have."""

    @classmethod
    def of(cls, reason: str, count: int) -> "Fetch":
        """One that is over before it began."""
        fetch = cls()
        fetch.lost(reason, count)
        return fetch

    def lost(self, reason: str, count: int = 1, want: Want | None = None, tier: Tier | None = None) -> None:
        """Count objects that will not arrive; `want`: the first of them."""
        if count:
            self.reasons[reason] = self.reasons.get(reason, 0) + count
        if want is not None:
            self.why[want.chunk_hash] = (reason, tier.name if tier is not None else "")


class _Delivery:
    """All that one lookup has from one tier: from the first call's beginning to the last one's end."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._begun = float("inf")
        self._ended = 0.0

    @property
    def seconds(self) -> float:
        return self._ended - self._begun

    def add(self, begun: float, nbytes: int) -> None:
        if nbytes:
            self.nbytes += nbytes
            self._begun = min(self._begun, begun)
            self._ended = time.perf_counter()


class Fetcher:
    """Runs fetches on the tiers' loop. Methods are coroutines of that loop.

    Args:
        patience_s: how long tiers are waited for when some objects have no source yet.
        residents: tells observers what was loaded.
        stores: writes it to other tiers that want it.
        journal: told what came of loads.
    """

    def __init__(
        self,
        loop: LoopThread,
        l1: L1,
        tiers: Sequence[Tier],
        *,
        patience_s: float,
        residents: Residents,
        stores: StoreController,
        journal: Journal,
    ) -> None:
        self._loop = loop
        self._l1 = l1
        self._tiers = tiers
        self._patience_s = patience_s
        self._residents = residents
        self._stores = stores
        self._journal = journal
        self._inflight: dict[tuple[ObjectSpace, bytes], asyncio.Future[None]] = {}
        self._awaited = 0
        self.idle = asyncio.Event()
        """Set while no load is under way that somebody waits for."""
        self.idle.set()

    async def locate(
        self, wants: Sequence[Want], after: Tier | None = None, fetch: Fetch | None = None
    ) -> list[Tier | None]:
        """The source of each object: the first tier, of those `after` one or of all, that says it has it.

        Tiers that do not answer in time have nothing; `fetch` is told which those are.
        """
        tiers = list(self._tiers)  # they may change while this waits
        if after in tiers:  # else it has been removed meanwhile
            tiers = tiers[tiers.index(after) + 1 :]
        silent = None if fetch is None else fetch.silent
        return await locate(self._loop, tiers, [w.key for w in wants], patience_s=self._patience_s, silent=silent)

    async def load(
        self, fetch: Fetch, wants: Sequence[Want], sources: Sequence[Tier | None], *, awaited: bool = True
    ) -> None:
        """Load `wants` from their `sources`; ends when the last batch has arrived or failed. No tier makes it raise.

        Args:
            awaited: a request waits for it. It does not for a probe of the tier, nor for what is loaded ahead of it.
        """
        self._awaited += awaited
        if self._awaited:
            self.idle.clear()
        try:
            await self._load(fetch, wants, sources, awaited)
        finally:
            self._awaited -= awaited
            if not self._awaited:
                self.idle.set()

    async def _load(self, fetch: Fetch, wants: Sequence[Want], sources: Sequence[Tier | None], awaited: bool) -> None:
        deliveries: dict[Tier, _Delivery] = {}
        groups: dict[tuple[Tier, ObjectSpace], list[Want]] = {}
        for want, tier in zip(wants, sources, strict=True):
            if tier is not None:
                groups.setdefault((tier, want.space), []).append(want)
        tasks = []
        for (tier, space), members in groups.items():
            delivery = deliveries.setdefault(tier, _Delivery())
            pieces = tier.pieces(members, space.nbytes)
            tasks += [self._loop.spawn(self._batch(fetch, tier, piece, delivery, awaited)) for piece in pieces]
        if tasks:
            await asyncio.wait(tasks)
        for tier, delivery in deliveries.items():
            if delivery.nbytes:
                tier.delivered(delivery.nbytes, delivery.seconds, probe=not awaited)

    def probe(self, tier: Tier, wants: Sequence[Want]) -> None:
        """Load the front of `wants` from `tier`, for at most `PROBE_BYTES`, while nobody waits for it: the tier learns
        how fast it is now."""
        front = wants[: max(1, PROBE_BYTES // wants[0].space.nbytes)]
        self._loop.spawn(self.load(Fetch(self._keep), front, [tier] * len(front), awaited=False))

    def _keep(self, lease: ReadLease, source: str) -> None:
        self._l1.keep(lease)
        self._l1.end_read(lease)

    async def _batch(self, fetch: Fetch, tier: Tier, wants: Sequence[Want], delivery: _Delivery, awaited: bool) -> None:
        space = wants[0].space
        others = [f for w in wants if (f := self._inflight.get((space, w.chunk_hash)))]
        hashes = [w.chunk_hash for w in wants]
        lease, _, no_room = self._l1.reserve_write(space, hashes, temporary=True)
        mine = list(lease.objects)
        own = {o.chunk_hash for o in mine}
        rest = [w for w in wants if w.chunk_hash not in own]
        theirs = [w for w in rest if w.chunk_hash in space.objects or w.chunk_hash in space.staging]
        if no_room:
            fetch.lost("l1_full", no_room, next((w for w in rest if w not in theirs), None))
        joined = self._loop.spawn(self._join(fetch, space, theirs, others)) if theirs else None
        failed: dict[bytes, str] = {}
        if mine:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            for obj in mine:
                self._inflight[space, obj.chunk_hash] = done
            try:
                failed = await self._fill(fetch, tier, lease, mine, wants[0].layout, delivery)
            except Exception:  # ours, such as no memory for a header: another tier may have them
                logger.exception("tier %s: a load failed", tier.name)
                failed = dict.fromkeys(own, "internal")
            finally:
                for obj in mine:
                    self._inflight.pop((space, obj.chunk_hash), None)
                done.set_result(None)
        if joined is not None and (gone := await joined):
            await self.load(fetch, gone, [tier] * len(gone), awaited=awaited)
        if failed:
            again = [w for w in wants if w.chunk_hash in failed]
            sources = await self.locate(again, after=tier)
            for want, source in zip(again, sources, strict=True):
                if source is None:
                    fetch.lost(failed[want.chunk_hash], 1, want, tier)
            await self.load(fetch, again, sources, awaited=awaited)

    async def _join(
        self, fetch: Fetch, space: ObjectSpace, theirs: Sequence[Want], others: Sequence[asyncio.Future[None]]
    ) -> list[Want]:
        """Lease what other requests are loading, or have published meanwhile, as soon as it is there: they may let go
        of it unused. What is gone after all."""
        if others:
            await asyncio.wait(others)
        read, _ = self._l1.reserve_each(space, [w.chunk_hash for w in theirs])
        fetch.on_lease(read, "l1")
        return [w for w in theirs if w.chunk_hash not in space.objects and w.chunk_hash not in space.staging]

    async def _fill(
        self,
        fetch: Fetch,
        tier: Tier,
        lease: WriteLease,
        mine: list[L1Object],
        layout: ObjectLayout,
        delivery: _Delivery,
    ) -> dict[bytes, str]:
        """Load into the slots of `lease` and publish; what did not come, with the reason: chunk hash -> word."""
        begun = time.perf_counter()
        try:
            loads = await tier.load([Parcel(o.key, (self._l1.view(o),), layout) for o in mine])
        except BaseException:
            self._l1.finish_write(lease, ok=False)
            raise
        if loads.settled is not None:
            # The storage hangs and may still write into the slots: they come back when it has let go.
            self._l1.disown(lease)
            self._journal.note(tier.name, "failed", "timeout", mine, "load")
            loads.settled.add_done_callback(lambda _: self._l1.finish_write(lease, ok=False))
            return {obj.chunk_hash: "timeout" for obj in mine}
        reasons = {
            obj: outcome.kind if isinstance(outcome, Failed) else "evicted_from_tier"
            for obj, outcome in zip(mine, loads.outcomes, strict=True)
            if not isinstance(outcome, Loaded)
        }
        if reasons:
            self._journal.outcomes(tier.name, "load", mine, loads.outcomes)
        delivery.add(begun, (len(mine) - len(reasons)) * mine[0].space.nbytes)
        with self._residents.in_order():
            published, read = self._l1.finish_write(lease, failed=reasons.keys(), read=True)
            self._residents.loaded(tier.name, published)
        if len(published) < len(mine) - len(reasons):
            fetch.lost("lease_expired", len(mine) - len(reasons) - len(published))
        if published:
            if not reasons:
                self._journal.note(tier.name, "loaded", "", published)
            self._stores.promote(tier, published, layout)
        fetch.on_lease(read, tier.name)
        return {obj.chunk_hash: reason for obj, reason in reasons.items()}
