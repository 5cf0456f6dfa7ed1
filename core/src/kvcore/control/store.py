"""The store controller: writes objects of L1 to the tiers, in the background, within bounds.

What waits is pinned in L1 by a read lease. A full queue drops the newest objects: the cache then holds them in L1 only.
Loads have no queue, so backpressure never costs a load.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from kvcore.api import ObjectKey, ObjectLayout, StoreOutcome
from kvcore.control.events import sort_events
from kvcore.control.loop import LoopThread
from kvcore.control.reuse import Reuse
from kvcore.control.waiting import Waiting
from kvcore.l1 import L1, L1Object, ObjectSpace, ReadLease
from kvcore.l2 import Moved, Parcel, Tier
from kvcore.observe import Journal, Metrics, logger
from kvcore.observe.spans import CURRENT
from kvcore.plugins import Hooks

_LEAST_PART = 16
"""However small a tenant's share of L1 is, it may have waiting one part in so many of the queue."""


class WritePolicy(NamedTuple):
    """What a tier is written.

    Args:
        queue_bytes: how much may wait.
        write: `all`, `reused`, `evicted` or `none`.
        promote: objects that a later tier had, too.
        divided: tenants have quotas: none of them may take all of the queue.
    """

    queue_bytes: int
    write: str
    promote: bool
    divided: bool


class _Job:
    """Objects under one read lease, on their way to several tiers; the last one ends the lease."""

    __slots__ = ("cause", "layout", "lease", "objects", "open_ends", "since")

    def __init__(self, objects: list[L1Object], lease: ReadLease, layout: ObjectLayout, open_ends: int) -> None:
        self.objects = objects
        self.lease = lease
        self.layout = layout
        self.open_ends = open_ends
        self.since = time.perf_counter()
        self.cause = CURRENT.get()


class StoreController:
    """Queues of published objects, one per tier.

    Args:
        policies: per tier.
        journal: told what became of objects.
    """

    def __init__(
        self,
        loop: LoopThread,
        l1: L1,
        tiers: Sequence[Tier],
        policies: Sequence[WritePolicy],
        metrics: Metrics,
        hooks: Hooks,
        journal: Journal,
    ) -> None:
        self.loop = loop
        self.l1 = l1
        self.metrics = metrics
        self.hooks = hooks
        self.journal = journal
        self._use([_Queue(self, tier, policy) for tier, policy in zip(tiers, policies, strict=True)])

    def _use(self, queues: "list[_Queue]") -> None:
        """Other threads read these lists: they are replaced, never changed."""
        self._queues = queues
        self._all = [q for q in queues if q.policy.write == "all"]
        self._evicted = [q for q in queues if q.policy.write == "evicted"]
        self._reused = [q for q in queues if q.reuse is not None]

    def add(self, tier: Tier, policy: WritePolicy, at: int) -> None:
        """Write to one more tier, which stands at `at` in their order. On the loop."""
        self._use([*self._queues[:at], _Queue(self, tier, policy), *self._queues[at:]])

    async def remove(self, tier: Tier, timeout_s: float) -> int:
        """Write to a tier no more, once it has what waits, for at most `timeout_s`; how many objects were dropped."""
        (queue,) = (q for q in self._queues if q.tier is tier)
        self._use([q for q in self._queues if q is not queue])
        return await queue.end(timeout_s)

    def waiting(self) -> dict[str, tuple[int, int]]:
        """By tier, the objects and bytes that wait to be written or are being written."""
        return {q.tier.name: (q.pending, q.waiting_bytes) for q in self._queues}

    @property
    def active(self) -> bool:
        """There is a tier that takes all that is published."""
        return bool(self._all)

    @property
    def selective(self) -> bool:
        """There is a tier that takes what is asked for again: `published` and `asked` are for it."""
        return bool(self._reused)

    @property
    def spill_tiers(self) -> list[Tier]:
        """The tiers that take what L1 gives up."""
        return [q.tier for q in self._evicted]

    @property
    def spill_bytes(self) -> int:
        """Bytes that L1 is giving up and that wait to be written."""
        return max((q.waiting_bytes for q in self._evicted), default=0)

    @property
    def spill_room(self) -> int:
        """Bytes that every tier which takes what L1 gives up has room for in its queue."""
        return min((q.policy.queue_bytes - q.waiting_bytes for q in self._evicted), default=0)

    def offer(self, objects: list[L1Object], lease: ReadLease, layout: ObjectLayout) -> None:
        """Write `objects` to the tiers that take everything, and then end `lease`. From any thread; returns at once."""
        self.loop.post(self._enqueue, self._all, objects, lease, layout)

    def spill(self, objects: list[L1Object], lease: ReadLease, layout: ObjectLayout) -> None:
        """Write `objects`, which L1 gives up, to the tiers that take those, and then end `lease`."""
        self.loop.post(self._enqueue, self._evicted, objects, lease, layout)

    def published(self, objects: Sequence[L1Object], layout: ObjectLayout) -> None:
        """These objects are new in L1. From any thread; returns at once."""
        self.loop.post(self._published, objects[0].space, [o.chunk_hash for o in objects], layout)

    def asked(self, space: ObjectSpace, hashes: Sequence[bytes], layout: ObjectLayout) -> None:
        """Somebody asks for these objects, in L1 or not. From any thread; returns at once."""
        self.loop.post(self._asked, self._reused, space, hashes, layout)

    def promote(self, source: Tier, objects: list[L1Object], layout: ObjectLayout) -> None:
        """`source` had these objects: write them to the tiers before it that want that, and to those that want what is
        asked for again. On the loop."""
        at = next((i for i, q in enumerate(self._queues) if q.tier is source), len(self._queues))
        if self._reused:
            before = [q for q in self._queues[:at] if q.policy.promote]
            wanting = [q for q in (*before, *self._queues[at + 1 :]) if q.reuse is not None]
            self._asked(wanting, objects[0].space, [o.chunk_hash for o in objects], layout)
        targets = [
            q for q in self._queues[:at] if q.policy.promote and q.policy.write == "all" and q.tier.breaker.closed
        ]
        if not targets:
            return
        lease, found = self.l1.reserve_each(objects[0].space, [o.chunk_hash for o in objects])
        resident = [o for o in found if o is not None]
        for queue in targets:
            self.metrics.add("tier_promoted", len(resident), queue.tier.name)
        self._enqueue(targets if resident else [], resident, lease, layout)

    async def written(self, timeout_s: float) -> bool:
        """Wait for what is being written just now, not for what comes after it; False when that took too long."""
        now = {done for queue in self._queues for done in queue.writing}
        return not now or not (await asyncio.wait(now, timeout=timeout_s))[1]

    async def drain(self, timeout_s: float) -> int:
        """Wait until the queues are empty; the number of objects still waiting at the deadline."""
        waiting = [q.idle.wait() for q in self._queues]
        if waiting:
            await asyncio.wait([asyncio.ensure_future(w) for w in waiting], timeout=timeout_s)
        return sum(q.pending for q in self._queues)

    def _published(self, space: ObjectSpace, hashes: Sequence[bytes], layout: ObjectLayout) -> None:
        for queue in self._reused:
            assert queue.reuse is not None
            again = queue.reuse.published(space, hashes)
            self.metrics.add("tier_held_back", len(hashes) - len(again), queue.tier.name)
            if len(again) < len(hashes) and self.journal.most:
                new = dict.fromkeys(hashes)
                for chunk_hash in again:
                    new.pop(chunk_hash, None)
                keys = [ObjectKey(space.namespace, h, space.group) for h in new]
                self.journal.note(queue.tier.name, "held_back", "", keys)
            self._write(queue, space, again, layout)

    def _asked(
        self, queues: "Sequence[_Queue]", space: ObjectSpace, hashes: Sequence[bytes], layout: ObjectLayout
    ) -> None:
        resident = [h for h in hashes if h in space.objects]
        for queue in queues:
            assert queue.reuse is not None
            self._write(queue, space, queue.reuse.asked(space, resident), layout)

    def _write(self, queue: "_Queue", space: ObjectSpace, hashes: Sequence[bytes], layout: ObjectLayout) -> None:
        if hashes:
            lease, found = self.l1.reserve_each(space, hashes)
            objects = [o for o in found if o is not None]
            self._enqueue([queue] if objects else [], objects, lease, layout)

    def _enqueue(
        self, queues: "Sequence[_Queue]", objects: list[L1Object], lease: ReadLease, layout: ObjectLayout
    ) -> None:
        if not queues:
            self.l1.end_read(lease)
            return
        job = _Job(objects, lease, layout, len(queues))
        for queue in queues:
            queue.put(job)

    def finished(self, job: _Job) -> None:
        """One tier is done with the job."""
        job.open_ends -= 1
        if job.open_ends == 0:
            self.l1.end_read(job.lease)


class _Queue:
    """One tier's queue, served by as many tasks as the storage likes calls at once."""

    def __init__(self, controller: StoreController, tier: Tier, policy: WritePolicy) -> None:
        self.tier = tier
        self.policy = policy
        self.reuse = Reuse() if policy.write == "reused" else None
        self.jobs: Waiting[tuple[_Job, Sequence[L1Object]]] = Waiting(policy.queue_bytes, policy.divided)
        self.pending = 0
        """Objects queued or being written."""
        self.idle = asyncio.Event()
        self.idle.set()
        self.writing: set[asyncio.Future[None]] = set()
        """One for each store that is under way."""
        self._controller = controller
        self._ended = False
        self._running = 0
        self._workers = tier.concurrency

    @property
    def waiting_bytes(self) -> int:
        """Bytes queued or being written."""
        return self.jobs.nbytes

    def put(self, job: _Job) -> None:
        """Queue the front of the job that there is room for; one object always fits an empty queue."""
        space = job.objects[0].space
        nbytes = space.nbytes
        # what waits is leased: a tenant's lookups and stores need the rest of its share
        most = max(self._controller.l1.share(space) // 2, self.policy.queue_bytes // _LEAST_PART)
        fits = self.jobs.room(space.tenant, most) // nbytes
        fits = max(fits, int(not self.waiting_bytes))
        reason = "queue_full"
        if not self.tier.breaker.closed and self.waiting_bytes > 0:
            fits, reason = 0, "tier_down"
        if self._ended:
            fits, reason = 0, "removed"
        taken = job.objects[: max(0, fits)]
        self._dropped(reason, job.objects[len(taken) :])
        if not taken:
            self._controller.finished(job)
            return
        pieces = self.tier.pieces(taken, nbytes)
        job.open_ends += len(pieces) - 1
        self._account(taken, 1)
        self.pending += len(taken)
        for piece in pieces:
            self.jobs.put(space.tenant, (job, piece))
        self.idle.clear()
        while self._running < min(self._workers, len(self.writing) + len(self.jobs)):  # who writes takes none of these
            self._running += 1
            self._controller.loop.spawn(self._serve())

    async def end(self, timeout_s: float) -> int:
        """Take nothing more; what is not written within `timeout_s` is dropped and counted. How many objects."""
        self._ended = True  # offers may be on their way from other threads
        dropped = 0
        if timeout_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.idle.wait(), timeout_s)
        while self.jobs:
            job, objects = self.jobs.take()
            dropped += len(objects)
            self._dropped("removed", objects)
            self.pending -= len(objects)
            self._account(objects, -1)
            self._controller.finished(job)
        if not self._running:
            self.idle.set()
        return dropped

    async def _serve(self) -> None:
        try:
            while self.jobs:
                job, objects = self.jobs.take()
                done = asyncio.get_running_loop().create_future()
                self.writing.add(done)
                try:
                    await self._write(job, objects)
                except Exception:  # a plugin's fault: these objects stay in L1 only, the queue goes on
                    logger.exception("tier %s: a store failed", self.tier.name)
                finally:
                    self.writing.discard(done)
                    done.set_result(None)
                    self.pending -= len(objects)
                    self._account(objects, -1)
        finally:
            self._running -= 1
            if not self.jobs and not self._running:
                self.idle.set()

    async def _write(self, job: _Job, objects: Sequence[L1Object]) -> None:
        l1, tier = self._controller.l1, self.tier
        CURRENT.set(job.cause)  # this task serves many
        settled = None
        try:
            if not l1.renew(job.lease):
                self._dropped("lease_expired", objects)
                return
            table = objects[0].space.objects
            if gone := [o for o in objects if table.get(o.chunk_hash) is not o]:  # while it waited
                self._dropped("cleared", gone)
                objects = [o for o in objects if table.get(o.chunk_hash) is o]
            if not objects:
                return
            there = await tier.exists([o.key for o in objects])
            absent = [o for o, known in zip(objects, there, strict=True) if not known]
            if absent:
                batch = [Parcel(o.key, (l1.view(o),), job.layout) for o in absent]
                with tier.told.storing([t.key for t in batch]):
                    stores = await tier.store(batch, lambda: l1.renew(job.lease), job.since)
                    settled = stores.settled
                    self._report(absent, stores)
        finally:
            if settled is None:
                self._controller.finished(job)
            else:
                settled.add_done_callback(lambda _: self._controller.finished(job))

    def _dropped(self, reason: str, objects: Sequence[L1Object]) -> None:
        """These are not written."""
        name = self.tier.name
        self._controller.metrics.add("tier_dropped", len(objects), name, reason)
        self._controller.journal.note(name, "dropped", reason, objects)
        if self.reuse is not None:
            self.reuse.refused(o.key for o in objects)

    def _report(self, batch: Sequence[L1Object], stores: Moved[StoreOutcome]) -> None:
        name = self.tier.name
        self._controller.journal.outcomes(name, "store", batch, stores.outcomes)
        stored, failed = sort_events(name, [(o.key, o.space.nbytes) for o in batch], stores.outcomes)
        self._controller.hooks.stored(stored)
        self._controller.hooks.failed(failed)
        if failed:
            self._controller.metrics.add("tier_dropped", len(failed), name, "failed")
            if self.reuse is not None:
                self.reuse.refused(event.key for event in failed)

    def _account(self, objects: Sequence[L1Object], sign: int) -> None:
        space = objects[0].space
        self.jobs.account(space.tenant, sign * space.nbytes * len(objects))
        if not self._ended:  # a gauge that has ended must not come back
            self._controller.metrics.set("tier_queue_bytes", self.waiting_bytes, self.tier.name)
