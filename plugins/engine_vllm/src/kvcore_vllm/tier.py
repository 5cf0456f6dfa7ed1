"""`KVCoreTier`: any list of kvcore's tiers below the CPU tier of vLLM's own offloading.

vLLM's `OffloadingConnector` copies between the device and its CPU tier, whose rows this tier stores and loads in place.
It lives in the scheduler's process only, and none of its methods waits: threads of its own wait for the store.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvcore.service import open_store
from kvcore_vllm import _compat, tier_spec
from kvcore_vllm.faults import Guarded, guarded, logger
from kvcore_vllm.options import parse_tier_options
from kvcore_vllm.spaces import tenant_named
from kvcore_vllm.tier_lookups import Lookups, Question
from kvcore_vllm.tier_rows import Key, RowStore
from kvcore_vllm.tier_threads import Lane

THREADS = 2
"""For lookups, for loads and for stores each."""
DRAIN_S = 4.0
"""How long a shutdown waits for stores: outside a server vLLM gives its engine process five seconds to end."""
LET_GO_S = 0.5
"""How long it then waits for calls of the store that hold rows of vLLM's memory."""
MAX_WAITING = 0.5
"""The part of vLLM's CPU tier that may wait to be stored: a chunk that waits cannot be evicted there."""
_PREFIX = "vllm:kvcore_tier_"
_COUNTERS = {
    "late_chunks": "Chunks taken for absent because the store had not answered within lookup_timeout.",
    "loaded_chunks": "Chunks brought from the store into the CPU tier.",
    "lost_chunks": "Chunks that the store had but did not deliver whole: they are computed.",
    "stored_chunks": "Chunks that the store took.",
    "unstored_chunks": "Chunks that the store did not take: it is down, or its `write:` says so.",
    "skipped_chunks": "Chunks not offered to the store because too many waited to be stored.",
    "refused_tenants": "Requests whose tenant is not a valid name: answered, not cached.",
    "faults": "Errors in the tier's calls: logged once each, and vLLM goes on without.",
    "scheduler_seconds": "Time that vLLM's scheduler spent in the tier's calls.",
}
Move = Callable[[str, list[Key], list[int], str], list[bool]]
"""Tenant, chunks and rows -> which of them were moved."""
Ended = Callable[[list[Key], list[bool]], None]
"""Chunks, and which of them were moved."""


class KVCoreTier(Guarded, SecondaryTierManager):  # type: ignore[misc]
    """See vLLM's `SecondaryTierManager`. The constructor raises a `KVCoreError` for a configuration or a model that
    cannot work; afterwards a fault of the store is a miss.

    Args:
        options: `config` (the YAML file), `locality`, and values of kvcore's configuration (`kvcore.l2`).
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        Guarded.__init__(self)
        SecondaryTierManager.__init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        _compat.share_log()
        found = _compat.installed_vllm()
        if found is not None and not _compat.is_tested(found[1]):
            logger.warning("kvcore-vllm was tested with vLLM %s, this is %s %s", _compat.TESTED, *found)
        parsed = parse_tier_options(options)
        self.locality = Locality(parsed.locality) if parsed.locality else None
        configs = _compat.offloading_configs()
        tier_spec.check_supported(*configs)
        spec = tier_spec.build_spec(offloading_spec, *configs)
        places = {group.group_id: i for i, group in enumerate(offloading_spec.config.groups)}
        self.store = open_store(parsed.config, flags=parsed.flags, name="vllm-tier")
        try:
            self._rows = RowStore(self.store, spec, primary_kv_view, places)
        except BaseException:
            self.store.close()
            raise
        # A tier that is dropped without a shutdown, or the end of the process, closes the store too.
        self._close = weakref.finalize(self, self.store.close)
        self._lookups = Lookups(self._ask, lambda: self.store.lookup_timeout_s)
        self._lanes = {kind: Lane(kind, THREADS) for kind in ("lookup", "load", "store")}
        self._finished: deque[JobResult] = deque()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTERS, 0.0)
        self._told_faults = 0.0
        self._waiting = 0
        self._room = int(offloading_spec.num_chunks * MAX_WAITING)

    # -- requests and lookups ----------------------------------------------------------------------------------------

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """See vLLM."""
        self._begin(req_context)
        return RequestOffloadingContext()

    @guarded(lambda: LookupResult.MISS)
    def lookup(self, key: Key, req_context: Any) -> LookupResult:
        """RETRY while the store is asked, at most for `lookup_timeout`."""
        there = self._lookups.look(self._lookups.of(req_context.req_id) or self._begin(req_context), key)
        return LookupResult.RETRY if there is None else LookupResult.HIT if there else LookupResult.MISS

    @guarded(lambda: None)
    def on_schedule_end(self, context: Any) -> None:
        """The end of a step: the store is asked for all that it has looked up."""
        self._lookups.flush()

    @guarded(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        """See vLLM."""
        self._lookups.end(req_context.req_id)

    def _begin(self, req_context: Any) -> Question:
        tenant = tenant_named(req_context.kv_transfer_params)
        if tenant is None:
            self._count("refused_tenants")
        return self._lookups.begin(req_context.req_id, tenant)

    def _ask(self, question: Question, keys: list[Key]) -> None:
        def ask(closed: bool) -> None:
            there = [False] * len(keys)
            try:
                if not closed and question.tenant is not None:
                    there = self._rows.exists(question.tenant, keys, question.request_id)
            except Exception as error:
                self.fault("exists", error)
            question.answer(dict(zip(keys, there, strict=True)))

        self._lanes["lookup"].submit(ask)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit_load(self, job_metadata: Any) -> None:
        """Bring chunks into rows of vLLM's CPU tier. Those that do not arrive, vLLM computes."""
        question = self._lookups.of(job_metadata.req_context.req_id)

        def ended(keys: list[Key], moved: list[bool]) -> None:
            lost = [key for key, arrived in zip(keys, moved, strict=True) if not arrived]
            if question is not None:
                question.lost(lost)
            self._count("loaded_chunks", len(keys) - len(lost))
            self._count("lost_chunks", len(lost))

        self._submit("load", job_metadata, self._rows.load, ended)

    def submit_store(self, job_metadata: Any) -> None:
        """Keep rows of vLLM's CPU tier."""
        chunks = len(job_metadata.keys)
        if self._waiting and self._waiting + chunks > self._room:
            self._count("skipped_chunks", chunks)
            self._finished.append(JobResult(job_metadata.job_id, success=False))
            return
        with self._lock:
            self._waiting += chunks

        def ended(keys: list[Key], moved: list[bool]) -> None:
            with self._lock:
                self._waiting -= chunks
            self._count("stored_chunks", moved.count(True))
            self._count("unstored_chunks", moved.count(False))

        self._submit("store", job_metadata, self._rows.store, ended)

    @guarded(list)
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See vLLM."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def drain_jobs(self) -> None:
        """Wait until no job touches a row.

        vLLM calls it when it forgets all that it has cached, for instance because weights changed in memory: what was
        kept so far is not used by this engine again.
        """
        for kind in ("load", "store"):
            self._lanes[kind].wait()
        self._lookups.forget()
        self._rows.renew()

    def _submit(self, kind: str, job: Any, move: Move, ended: Ended) -> None:
        began = time.perf_counter()
        keys = list(job.keys)
        self._lanes[kind].submit(lambda closed: self._run(kind, job, keys, None if closed else move, ended))
        self.seconds += time.perf_counter() - began

    def _run(self, kind: str, job: Any, keys: list[Key], move: Move | None, ended: Ended) -> None:
        """Do a job, on a thread of its lane. It ends whatever happens: vLLM waits for it."""
        began = time.perf_counter()
        moved = [False] * len(keys)
        try:
            tenant = tenant_named(job.req_context.kv_transfer_params)
            if move is not None and tenant is not None:
                moved = move(tenant, keys, [int(row) for row in job.chunk_ids], job.req_context.req_id)
        except Exception as error:
            self.fault(kind, error)
        ended(keys, moved)
        there = [key for key, ok in zip(keys, moved, strict=True) if ok]
        self._finished.append(
            JobResult(
                job.job_id,
                success=len(there) == len(keys),
                successful_keys=there if kind == "load" and there else None,
                transfer_time=time.perf_counter() - began,
                transfer_bytes=len(there) * self.block_size_bytes,
            )
        )

    # -- numbers and the end -----------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """The tier's own counters. kvcore's numbers are served at `metrics_port`."""
        return _compat.tier_counters({_PREFIX + name: text for name, text in _COUNTERS.items()})

    @guarded(lambda: None)
    def get_stats(self) -> Any:
        """What was counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(_COUNTERS, 0.0)
        counts["late_chunks"], self._lookups.late = self._lookups.late, 0
        counts["scheduler_seconds"], self.seconds = self.seconds, 0.0
        counts["faults"] = sum(self.faults.values()) - self._told_faults
        self._told_faults += counts["faults"]
        return _compat.tier_stats({_PREFIX + name: count for name, count in counts.items() if count})

    def shutdown(self) -> None:
        """Write out what waits, in bounded time, and close the store. Idempotent."""
        if not self._close.alive:
            return
        if not self._lanes["store"].wait(DRAIN_S):
            logger.warning("stores still wait after %g s: given up, and missing after a restart", DRAIN_S)
        for lane in self._lanes.values():
            lane.close()
        for lane in self._lanes.values():
            lane.join(LET_GO_S)
        self._close()
        self._rows.release()

    def _count(self, name: str, increase: float = 1.0) -> None:
        with self._lock:
            self._counts[name] += increase
