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
from kvcore.observe import Metrics, logger


class _Job:
    """Objects under one read lease, on their way to several tiers; the last one ends the lease."""

    __slots__ = ("layout", "lease", "objects", "open_ends")

    def __init__(self, objects: list[L1Object], lease: ReadLease, layout: ObjectLayout, open_ends: int) -> None:
        self.objects = objects
        self.lease = lease
        self.layout = layout
        self.open_ends = open_ends


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
        self.loop = loop
        self.l1 = l1
        self.metrics = metrics
        self.on_stored = on_stored
        self.on_failed = on_failed
        self._queues = [_Queue(self, tier, limit) for tier, limit in zip(tiers, queue_bytes, strict=True)]

    @property
    def active(self) -> bool:
        """There is a tier to write to."""
        return bool(self._queues)

    def offer(self, objects: list[L1Object], lease: ReadLease, layout: ObjectLayout) -> None:
        """Write `objects` to all tiers and then end `lease`. From any thread; returns at once."""
        job = _Job(objects, lease, layout, len(self._queues))
        self.loop.post(self._enqueue, job)

    async def drain(self, timeout_s: float) -> int:
        """Wait until the queues are empty; the number of objects still waiting at the deadline."""
        waiting = [q.idle.wait() for q in self._queues]
        if waiting:
            await asyncio.wait([asyncio.ensure_future(w) for w in waiting], timeout=timeout_s)
        return sum(q.pending for q in self._queues)

    def _enqueue(self, job: _Job) -> None:
        for queue in self._queues:
            queue.put(job)

    def finished(self, job: _Job) -> None:
        """One tier is done with the job."""
        job.open_ends -= 1
        if job.open_ends == 0:
            self.l1.end_read(job.lease)


class _Queue:
    """One tier's queue, served by as many tasks as the storage likes calls at once."""

    def __init__(self, controller: StoreController, tier: Tier, limit: int) -> None:
        self.jobs: deque[tuple[_Job, list[L1Object]]] = deque()
        self.pending = 0
        """Objects queued or being written."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._controller = controller
        self._tier = tier
        self._limit = limit
        self._bytes = 0
        self._running = 0
        self._workers = max(1, tier.storage.preferred_concurrency)

    def put(self, job: _Job) -> None:
        """Queue the front of the job that there is room for; one object always fits an empty queue."""
        nbytes = job.objects[0].space.nbytes
        fits = max((self._limit - self._bytes) // nbytes, int(not self._bytes))
        reason = "queue_full"
        if not self._tier.breaker.closed and self._bytes > 0:
            fits, reason = 0, "tier_down"
        taken = job.objects[: max(0, fits)]
        dropped = len(job.objects) - len(taken)
        self._controller.metrics.add("tier_dropped", dropped, self._tier.name, reason)
        if not taken:
            self._controller.finished(job)
            return
        size = self._tier.batch_size(len(taken), nbytes)
        pieces = [taken[at : at + size] for at in range(0, len(taken), size)]
        job.open_ends += len(pieces) - 1
        self._account(nbytes * len(taken))
        self.pending += len(taken)
        self.jobs.extend((job, piece) for piece in pieces)
        self.idle.clear()
        while self._running < min(self._workers, len(self.jobs)):
            self._running += 1
            self._controller.loop.spawn(self._serve())

    async def _serve(self) -> None:
        try:
            while self.jobs:
                job, objects = self.jobs.popleft()
                try:
                    await self._write(job, objects)
                except Exception:  # a plugin's fault: these objects stay in L1 only, the queue goes on
                    logger.exception("tier %s: a store failed", self._tier.name)
                finally:
                    self.pending -= len(objects)
                    self._account(-objects[0].space.nbytes * len(objects))
        finally:
            self._running -= 1
            if not self.jobs and not self._running:
                self.idle.set()

    async def _write(self, job: _Job, objects: list[L1Object]) -> None:
        l1, tier = self._controller.l1, self._tier
        settled = None
        try:
            if not l1.renew(job.lease):
                self._controller.metrics.add("tier_dropped", len(objects), tier.name, "lease_expired")
                return
            there = await tier.exists([o.key for o in objects])
            absent = [o for o, known in zip(objects, there, strict=True) if not known]
            if absent:
                batch = [Transfer(o.key, l1.view(o), job.layout) for o in absent]
                stores = await tier.store(batch, held=lambda: l1.renew(job.lease))
                settled = stores.settled
                self._report(absent, stores)
        finally:
            if settled is None:
                self._controller.finished(job)
            else:
                settled.add_done_callback(lambda _: self._controller.finished(job))

    def _report(self, batch: Sequence[L1Object], stores: Stores) -> None:
        name = self._tier.name
        stored, failed = [], []
        for obj, outcome in zip(batch, stores.outcomes, strict=True):
            if isinstance(outcome, Stored):
                stored.append(ObjectEvent(obj.key, name, obj.space.nbytes))
            elif isinstance(outcome, Failed):
                failed.append(ObjectEvent(obj.key, name, obj.space.nbytes, outcome.kind))
        if stored:
            self._controller.on_stored(stored)
        if failed:
            self._controller.metrics.add("tier_dropped", len(failed), name, "failed")
            self._controller.on_failed(failed)

    def _account(self, nbytes: int) -> None:
        self._bytes += nbytes
        self._controller.metrics.set("tier_queue_bytes", self._bytes, self._tier.name)
