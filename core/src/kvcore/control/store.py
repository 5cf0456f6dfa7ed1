"""The store controller: writes what L1 published to every tier, in the background, within bounds.

What waits is pinned in L1 by a read lease. A full queue drops the newest objects: the cache then holds them in L1 only.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from kvcore.api import Failed, ObjectEvent, ObjectLayout, Stored
from kvcore.control.loop import LoopThread
from kvcore.l1 import L1, L1Object, ReadLease
from kvcore.l2 import Stores, Tier, Transfer
from kvcore.observe import Metrics


class _Job:
    """Objects under one read lease, on their way to several tiers; the last one ends the lease."""

    __slots__ = ("lease", "layout", "objects", "open_ends")

    def __init__(self, objects: list[L1Object], lease: ReadLease, layout: ObjectLayout, open_ends: int) -> None:
        self.objects = objects
        self.lease = lease
        self.layout = layout
        self.open_ends = open_ends

    @property
    def nbytes(self) -> int:
        return sum(o.space.nbytes for o in self.objects)


class StoreController:
    """Queues of published objects, one per tier.

    Args:
        queue_bytes: per tier, how many bytes may wait.
        on_stored, on_failed: observers' batches.
    """

    def __init__(
        self,
        loop: LoopThread,
        l1: L1,
        tiers: Sequence[Tier],
        queue_bytes: Sequence[int],
        metrics: Metrics,
        on_stored: Callable[[list[ObjectEvent]], None],
        on_failed: Callable[[list[ObjectEvent]], None],
    ) -> None:
        self._loop = loop
        self._l1 = l1
        self._metrics = metrics
        self._on_stored = on_stored
        self._on_failed = on_failed
        self._queues = [_Queue(self, tier, limit) for tier, limit in zip(tiers, queue_bytes, strict=True)]

    @property
    def active(self) -> bool:
        """There is a tier to write to."""
        return bool(self._queues)

    def offer(self, objects: list[L1Object], lease: ReadLease, layout: ObjectLayout) -> None:
        """Write `objects` to all tiers and then end `lease`. From any thread; returns at once."""
        job = _Job(objects, lease, layout, len(self._queues))
        self._loop.post(self._enqueue, job)

    async def drain(self, timeout_s: float) -> int:
        """Wait until the queues are empty; the number of objects still waiting at the deadline."""
        waiting = [q.idle.wait() for q in self._queues]
        if waiting:
            await asyncio.wait([asyncio.ensure_future(w) for w in waiting], timeout=timeout_s)
        return sum(len(job.objects) for q in self._queues for job in q.jobs)

    def _enqueue(self, job: _Job) -> None:
        for queue in self._queues:
            queue.put(job)

    def finished(self, job: _Job) -> None:
        """One tier is done with the job."""
        job.open_ends -= 1
        if job.open_ends == 0:
            self._l1.end_read(job.lease)


class _Queue:
    """One tier's queue, served by as many tasks as the storage likes calls at once."""

    def __init__(self, controller: StoreController, tier: Tier, limit: int) -> None:
        self.jobs: deque[_Job] = deque()
        self.idle = asyncio.Event()
        self.idle.set()
        self._controller = controller
        self._tier = tier
        self._limit = limit
        self._bytes = 0
        self._running = 0
        self._workers = max(1, tier.storage.preferred_concurrency)

    def put(self, job: _Job) -> None:
        if not self._tier.breaker.closed and self._bytes > 0:
            self._drop(job, "tier_down")
        elif self._bytes + job.nbytes > self._limit:
            self._drop(job, "queue_full")
        else:
            self._account(job.nbytes)
            self.jobs.append(job)
            self.idle.clear()
            if self._running < self._workers:
                self._running += 1
                self._controller._loop.spawn(self._serve())

    async def _serve(self) -> None:
        try:
            while self.jobs:
                job = self.jobs.popleft()
                try:
                    await self._write(job)
                finally:
                    self._account(-job.nbytes)
        finally:
            self._running -= 1
            if not self.jobs and not self._running:
                self.idle.set()

    async def _write(self, job: _Job) -> None:
        controller, tier = self._controller, self._tier
        size = tier.batch_size(len(job.objects), job.objects[0].space.nbytes)
        settled = None
        try:
            for at in range(0, len(job.objects), size):
                batch = job.objects[at : at + size]
                if not controller._l1.renew(job.lease):
                    controller._metrics.add("tier_dropped", len(job.objects) - at, tier.name, "lease_expired")
                    return
                there = await tier.exists([o.key for o in batch])
                batch = [o for o, known in zip(batch, there, strict=True) if not known]
                if batch:
                    stores = await tier.store([Transfer(o.key, controller._l1.view(o), job.layout) for o in batch])
                    settled = stores.settled or settled
                    self._report(batch, stores)
        finally:
            if settled is None:
                controller.finished(job)
            else:
                settled.add_done_callback(lambda _: controller.finished(job))

    def _report(self, batch: Sequence[L1Object], stores: Stores) -> None:
        name = self._tier.name
        stored, failed = [], []
        for obj, outcome in zip(batch, stores.outcomes, strict=True):
            if isinstance(outcome, Stored):
                stored.append(ObjectEvent(obj.key, name, obj.space.nbytes))
            elif isinstance(outcome, Failed):
                failed.append(ObjectEvent(obj.key, name, obj.space.nbytes, outcome.kind))
        if stored:
            self._controller._on_stored(stored)
        if failed:
            self._controller._metrics.add("tier_dropped", len(failed), name, "failed")
            self._controller._on_failed(failed)

    def _drop(self, job: _Job, reason: str) -> None:
        self._controller._metrics.add("tier_dropped", len(job.objects), self._tier.name, reason)
        self._controller.finished(job)

    def _account(self, nbytes: int) -> None:
        self._bytes += nbytes
        self._controller._metrics.set("tier_queue_bytes", self._bytes, self._tier.name)
