"""The prefetch controller: brings objects from the tiers into L1 for a lookup.

All tiers are asked at once; each missing object gets one source, the first tier in order that has it. Objects are read
straight into reserved slots in small batches, front of the prefix first, so that what has arrived when the time is up
is a usable front.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvcore.api import Failed, Loaded, ObjectEvent, ObjectKey, ObjectLayout
from kvcore.control.loop import LoopThread
from kvcore.l1 import L1, L1Object, ObjectSpace, ReadLease
from kvcore.l2 import Tier, Transfer
from kvcore.observe import Metrics


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

    def __init__(self, on_lease: Callable[[ReadLease, str], None]) -> None:
        self.on_lease = on_lease
        self.reasons: dict[str, int] = {}
        """Why wanted objects did not arrive: reason -> count."""

    def lost(self, reason: str, count: int = 1) -> None:
        """Count objects that will not arrive."""
        if count:
            self.reasons[reason] = self.reasons.get(reason, 0) + count


class Fetcher:
    """Runs fetches on the tiers' loop. Methods are coroutines of that loop.

    Args:
        on_loaded: observers' batch of what was loaded.
    """

    def __init__(
        self,
        loop: LoopThread,
        l1: L1,
        tiers: Sequence[Tier],
        metrics: Metrics,
        on_loaded: Callable[[list[ObjectEvent]], None],
    ) -> None:
        self._loop = loop
        self._l1 = l1
        self._tiers = tiers
        self._metrics = metrics
        self._on_loaded = on_loaded
        self._inflight: dict[tuple[ObjectSpace, bytes], asyncio.Future[None]] = {}

    async def locate(self, wants: Sequence[Want]) -> list[Tier | None]:
        """The source of each object: the first tier that says it has it."""
        keys = [w.key for w in wants]
        answers = await asyncio.gather(*(tier.exists(keys) for tier in self._tiers))
        sources: list[Tier | None] = [None] * len(wants)
        for tier, answer in reversed(list(zip(self._tiers, answers, strict=True))):
            for i, there in enumerate(answer):
                if there:
                    sources[i] = tier
        return sources

    async def load(self, fetch: Fetch, wants: Sequence[Want], sources: Sequence[Tier | None]) -> None:
        """Load `wants` from their `sources`; ends when the last batch has arrived or failed. No tier makes it raise."""
        groups: dict[tuple[int, ObjectSpace], list[Want]] = {}
        tiers = {id(t): t for t in self._tiers}
        for want, source in zip(wants, sources, strict=True):
            if source is not None:
                groups.setdefault((id(source), want.space), []).append(want)
        tasks = []
        for (tier_id, space), members in groups.items():
            tier = tiers[tier_id]
            size = tier.batch_size(len(members), space.nbytes)
            tasks += [self._loop.spawn(self._batch(fetch, tier, batch)) for batch in _chunks(members, size)]
        if tasks:
            await asyncio.wait(tasks)

    async def _batch(self, fetch: Fetch, tier: Tier, wants: Sequence[Want]) -> None:
        space, layout = wants[0].space, wants[0].layout
        others = [f for w in wants if (f := self._inflight.get((space, w.chunk_hash)))]
        hashes = [w.chunk_hash for w in wants]
        lease, _, no_room = self._l1.reserve_write(space, hashes, temporary=True)
        fetch.lost("l1_full", no_room)
        mine = list(lease.objects)
        if mine:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            for obj in mine:
                self._inflight[space, obj.chunk_hash] = done
            try:
                await self._fill(fetch, tier, lease, mine, layout)
            finally:
                for obj in mine:
                    self._inflight.pop((space, obj.chunk_hash), None)
                done.set_result(None)
        if len(mine) < len(wants):
            # Another request is loading the rest, or has published it meanwhile.
            if others:
                await asyncio.wait(others)
            own = {o.chunk_hash for o in mine}
            read, _ = self._l1.reserve_each(space, [h for h in hashes if h not in own])
            fetch.on_lease(read, "l1")

    async def _fill(self, fetch: Fetch, tier: Tier, lease: Any, mine: list[L1Object], layout: ObjectLayout) -> None:
        try:
            loads = await tier.load([Transfer(o.key, self._l1.view(o), layout) for o in mine])
        except BaseException:
            self._l1.finish_write(lease, ok=False)
            raise
        if loads.settled is not None:
            # The storage hangs and may still write into the slots: they come back when it has let go.
            fetch.lost("timeout", len(mine))
            loads.settled.add_done_callback(lambda _: self._l1.finish_write(lease, ok=False))
            return
        failed = set()
        for obj, outcome in zip(mine, loads.outcomes, strict=True):
            if not isinstance(outcome, Loaded):
                failed.add(obj)
                fetch.lost(outcome.kind if isinstance(outcome, Failed) else "evicted_from_tier")
        published, read = self._l1.finish_write(lease, failed=failed, read=True)
        if len(published) < len(mine) - len(failed):
            fetch.lost("lease_expired", len(mine) - len(failed) - len(published))
        fetch.on_lease(read, tier.name)
        self._on_loaded([ObjectEvent(o.key, tier.name, o.space.nbytes) for o in published])


def _chunks(members: Sequence[Want], size: int) -> Iterable[Sequence[Want]]:
    return (members[i : i + size] for i in range(0, len(members), size))
