"""The scheduler's half of the connector: it opens the cache, or the way to a server's, answers lookups and plans every
copy."""

import itertools
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from kvcore.api import LeaseError, ObjectLayout
from kvcore.engine import Asked, CacheEngine, EngineLookup
from kvcore.service import open_engine
from kvcore.service.client import RemoteEngine
from kvcore_vllm import _compat, model_spec, modes
from kvcore_vllm.arrivals import Arrivals
from kvcore_vllm.awaited import FIRST_PAUSE_S
from kvcore_vllm.events import KVEvents
from kvcore_vllm.faults import Guarded, guarded, logger
from kvcore_vllm.handover import Handover
from kvcore_vllm.metadata import Attach, Load, Metadata, Save, WorkerLayout, WorkerMetadata
from kvcore_vllm.options import Options
from kvcore_vllm.pace import Pace
from kvcore_vllm.plans import Plan, settle
from kvcore_vllm.requests import RequestState
from kvcore_vllm.spaces import MAX_TENANT, Spaces, tenant_of
from kvcore_vllm.stats import Deltas, KVCoreStats

IDLE_WAIT_S = 0.005
"""How long a step that computes nothing may wait for a lookup, instead of asking again at once: every empty step costs
all processes a message, on cores that the loads need."""
STATS_EVERY_S = 1.0
HEAR_EVERY_S = 0.2
"""How often a server is asked what has come and gone, where KV events are wanted and nothing was published."""
LOST_PLAN_S = 30.0
"""A plan without an answer for so long does not keep an idle engine stepping any more."""
_COUNTS = (
    "kvcore_load_failures_total",
    "kvcore_save_failures_total",
    "kvcore_refused_tenants_total",
)


class SchedulerHalf(Guarded):
    """Opens the cache; raises a `KVCoreError` at start for a configuration or a model that cannot work.

    After the start no method raises: a fault of the cache is a miss.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        super().__init__()
        model_spec.check_supported(vllm_config, kv_cache_config)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        transfer = vllm_config.kv_transfer_config
        self._loading = bool(transfer.is_kv_consumer)
        self._saving = bool(transfer.is_kv_producer)
        self._ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        self._windowed = tuple(w is not None for w in model_spec.group_windows(kv_cache_config))
        recomputes = _compat.recomputes(vllm_config, options.on_load_failure == "recompute")
        self.modes = modes.resolve(options, vllm_config, len(self._windowed), recomputes)
        self.load_async, self.save_async = self.modes.load_async, self.modes.save_async
        self._block = model_spec.block_tokens(kv_cache_config)
        self._hash_tokens = int(kv_cache_config.hash_block_size or self._block)
        self.engine = open_engine(options.config, flags=options.flags, name="vllm")
        # An engine object that is dropped without a shutdown, or the end of the process, closes the cache too.
        self._close = weakref.finalize(self, self.engine.close)
        self._spaces = Spaces(self.engine, vllm_config, kv_cache_config)
        self._handover = Handover(self.engine, options.pd_timeout, self._saving and not self._loading)
        self._events = self._observe()
        self._published = False
        self._hear_at = 0.0
        self._objects: tuple[ObjectLayout, ...] = ()
        self._arena = ""
        self._told = ""
        self._requests: dict[str, RequestState] = {}
        self._waiting: dict[str, EngineLookup | None] = {}
        """What requests wait for: the answer of a lookup, or None, the time for the next one."""
        self._loads: list[Load] = []
        self._arrivals = Arrivals(self.engine, self.fault, self._arrived)
        self._held: list[str] = []
        self._void: list[int] = []
        self._load_plans: dict[int, Plan] = {}
        self._save_plans: dict[int, Plan] = {}
        self._load_ids = itertools.count(1)
        self._pace = Pace()
        self._deltas = Deltas()
        self._stats_due = 0.0
        self._waited = 0.0
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self._refused: weakref.WeakSet[Any] = weakref.WeakSet()
        """Requests that were refused because of their tenants."""

    # -- start and end -----------------------------------------------------------------------------------------------

    def set_layouts(self, workers: Mapping[int, WorkerLayout]) -> None:
        """What the workers' KV looks like, by tensor-parallel rank. Registers the model; raises `KVCoreError`."""
        # Adapters and tenants have namespaces of their own, but share the arena and the layout.
        self._objects = self._spaces.set_workers(workers).groups
        logger.info("kvcore is ready: %s", self.modes.words())

    def shutdown(self) -> None:
        """Close the cache, writing out what waits. Idempotent."""
        for state in self._requests.values():
            self._drop_lookup(state)
        self._requests.clear()
        self._close()  # which ends the leases of loads under way, too

    # -- a request's load --------------------------------------------------------------------------------------------

    @guarded(lambda: None)
    def queued(self, request: Any) -> None:
        """vLLM has got a request, and looks it up when it is its turn: when there is room to run it."""
        state = self._state(request)
        if state is not None and self._loading and not request.skip_reading_prefix_cache:
            hashes = tuple(state.extend_hashes(self._hash_tokens))
            self.engine.queued(state.space, hashes, self._asked(state))

    @guarded(lambda: (0, False))
    def matched_tokens(self, request: Any, held_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the `held_tokens` of vLLM's own prefix cache; None: ask again later."""
        state = self._state(request)
        if state is None or not self._loading or state.load_failed or request.skip_reading_prefix_cache:
            return 0, False
        space = state.space
        first = held_tokens // space.chunk_tokens
        if state.lookup is not None and state.lookup.first > first:
            self._drop_lookup(state)  # vLLM has lost blocks since it was asked
        if state.lookup is None:
            if state.awaited is not None and state.awaited.due_s > 0:
                return None, False
            hashes = state.extend_hashes(self._hash_tokens)
            if self._events is not None:
                self._events.describe(state, first, len(hashes))
            if any(self._windowed):
                # A hit must end on a chunk and leave a token to compute, or the window before it is not the one loaded.
                hashes = hashes[: (request.num_tokens - 1) // space.chunk_tokens]
            if len(hashes) <= first:
                if not state.noted:  # there is nothing to look up: that is on record, too
                    state.noted = True
                    self.engine.lookup(space, tuple(hashes), first, self._asked(state))
                return 0, False
            state.lookup = self.engine.lookup(space, tuple(hashes), first, self._asked(state))
        chunks = state.lookup.poll()
        state.early = 0
        if chunks is None and self.modes.load_early:
            coming = self.engine.coming(state.lookup)
            if coming is not None:
                chunks, state.early, state.hit_sources = coming.end, coming.end, coming.sources
        if chunks is None:
            self._waiting[request.request_id] = state.lookup
            return None, False
        if self._handover.wait(state, chunks):
            self._drop_lookup(state)
            self._waiting[request.request_id] = None
            return None, False
        self._waiting.pop(request.request_id, None)
        state.base = held_tokens
        tokens = self._end(request, chunks * space.chunk_tokens) - held_tokens
        return (tokens, self.load_async or state.early > 0) if tokens > 0 else (0, False)

    @guarded(lambda: None)
    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """vLLM has given the request its blocks and counts on `tokens` of them being loaded."""
        state = self._requests.get(request.request_id)
        if tokens <= 0:
            if state is not None:
                self._drop_lookup(state)
            return
        ids = blocks.get_block_ids()
        begin = 0
        if state is not None:
            begin = state.base // self._block
            state.loaded = True
        end = begin + -(-tokens // self._block)
        promised = frozenset(b for group in ids for b in group[begin:end] if b)
        copies: tuple[Any, ...] = ()
        arena = ""
        load_id = next(self._load_ids)
        try:
            assert state is not None
            assert state.lookup is not None
            lookup, state.lookup = state.lookup, None
            self._load_plans[load_id] = Plan(state, lookup=lookup)
            arena = lookup.arena
            visible = self._visible([g[:end] for g in ids])
            if state.early:
                unwanted = [-1] * (state.early * state.space.chunk_blocks - end)  # more may be coming
                visible = [[*group, *unwanted] for group in visible]
                self._arrivals.add(load_id, request.request_id, lookup, begin, visible, promised)
                return
            state.hit_sources = dict(lookup.sources)
            copies = tuple(self.engine.retrieve(lookup, begin, visible))
            if self._events is not None:
                self._events.found(state, lookup.first, lookup.answer or 0)
        except LeaseError:  # a pause longer than a lease, or the server is gone
            pass
        except Exception as error:
            self.fault("retrieve", error)
        missing = promised.difference(*(c.blocks for c in copies))
        beside = self.load_async or (state is not None and state.early > 0)
        self._loads.append(Load(load_id, request.request_id, arena, copies, promised, missing, beside))

    def hit_sources(self, request: Any, tokens: int) -> dict[Any, int]:
        """Where the loaded tokens came from, in vLLM's words."""
        state = self._requests.get(request.request_id)
        sources = dict(state.hit_sources) if state is not None else {}
        total = sum(sources.values())
        if not total:
            return _compat.hit_sources(tokens, 0, 0)
        disks = {name for name, plugin in self.engine.tiers.items() if plugin == "disk"}
        disk = tokens * sum(n for s, n in sources.items() if s in disks) // total
        other = tokens * sum(n for s, n in sources.items() if s not in disks and s != "l1") // total
        return _compat.hit_sources(tokens - disk - other, disk, other)

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, output: Any) -> Metadata:
        """The orders of one step."""
        _, save_async, load_layers, save_layers, _ = self.modes
        meta = Metadata(save_async, load_layers, save_layers, want_layout=not self._spaces)
        self._follow(meta)
        meta.loads, self._loads = self._loads + self._arrivals.parts(), []
        self._keep_media(output)
        self._plan_step(output, meta)
        meta.held, self._held = self._held, []
        meta.void, self._void = self._void, []
        meta.idle = not output.total_num_scheduled_tokens
        self._begin_step(output, meta)
        if meta.idle and not meta.loads and (self._waiting or self._arrivals.next_lookup is not None):
            self._rest(self._arrivals.next_lookup or next(iter(self._waiting.values())))
        return meta

    @guarded(lambda: None)
    def _begin_step(self, output: Any, meta: Metadata) -> None:
        self._pace.begin(output, self._requests, loads=not all(load.beside for load in meta.loads))

    @guarded(lambda: None)
    def end_step(self) -> None:
        """vLLM has the result of a step."""
        if (done := self._pace.end()) is not None:
            self.engine.prefilled(*done)

    @guarded(lambda: None)
    def _follow(self, meta: Metadata) -> None:
        """Which arena the workers are to have, and how they reach it, once."""
        descriptor = self.engine.descriptor() if self._spaces else None
        meta.arena = self._arena = descriptor["token"] if descriptor else ""
        if descriptor and self._arena != self._told:
            layers = model_spec.group_layers(self._kv_cache_config)
            meta.attach = Attach(self._arena, descriptor, self._objects, layers)
            self._told = self._arena

    @guarded(lambda: None)
    def _rest(self, lookup: EngineLookup | None) -> None:
        began = time.perf_counter()
        if lookup is not None:
            lookup.wait(IDLE_WAIT_S)
        else:
            time.sleep(FIRST_PAUSE_S)
        rested = time.perf_counter() - began
        self._waited += rested
        self.seconds -= rested

    @guarded(lambda: None)
    def _keep_media(self, output: Any) -> None:
        """vLLM withholds the images that a hit covers from the workers, which need them when a load fails, or after a
        preemption when the hit is gone."""
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            if state is not None and state.loaded:
                new.mm_features = state.request.mm_features

    @guarded(lambda: None)
    def _plan_step(self, output: Any, meta: Metadata) -> None:
        for req_id in output.preempted_req_ids or ():
            state = self._requests.get(req_id)
            if state is not None:
                # The worker ends these saves before the blocks are written again; they are no longer the request's.
                meta.flush += state.saves
                state.saves.clear()
                self._drop_lookup(state)
        if self.save_async and any(self._windowed):
            # A window's blocks go back to vLLM while the request runs on: no save may outlive its step.
            meta.flush += self._save_plans
        if not self._saving or not self._spaces:
            return
        resolve = output.kv_connector_block_state.resolve_block_ids
        for req_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(req_id)
            if state is not None and state.saving:
                self._plan_save(state, scheduled, resolve, meta)

    def _plan_save(self, state: RequestState, scheduled: int, resolve: Any, meta: Metadata) -> None:
        request = state.request
        done = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if not self._options.save_decode:
            done = min(done, request.num_prompt_tokens)
        last = done // state.space.chunk_tokens
        if state.saved_arena != self._arena:
            state.begin_saving(self._arena)
        first = state.saved
        if last <= first or not self._arena:
            return
        hashes = state.extend_hashes(self._hash_tokens)
        last = min(last, len(hashes))
        if last <= first:
            return
        blocks = self._visible(resolve(request.request_id))
        plan = self.engine.reserve(state.space, hashes, first, last, blocks, request.request_id)
        if not plan.arena:
            return  # the server has just gone: once there is one again, all of it is saved there
        state.planned(first, last, plan.skipped)
        if self._events is not None:
            self._events.describe(state, first, last)
        if not plan.copies:
            return
        self._save_plans[plan.id] = Plan(state, first)
        if self.save_async:
            state.saves.add(plan.id)
        meta.saves.append(Save(plan.id, request.request_id, plan.arena, tuple(plan.copies)))

    @guarded(lambda: None)
    def update(self, output: Any) -> None:
        """What the workers reported of this step."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerMetadata):
            return
        for load_id, tally in report.loads.items():
            plan = settle(self._load_plans, load_id, tally, self._ranks)
            if plan is not None:
                self._loaded(plan)
        # Workers drop what was computed in a step with a failed load: that says nothing about saving.
        dropped = any(tally.failed for tally in report.loads.values())
        for plan_id, tally in report.saves.items():
            plan = settle(self._save_plans, plan_id, tally, self._ranks)
            if plan is not None:
                self._saved(plan_id, plan, dropped)
        if report.layouts and not self._spaces:
            self.set_layouts(report.layouts)

    def _saved(self, plan_id: int, plan: Plan, dropped: bool) -> None:
        state = plan.state
        state.saves.discard(plan_id)
        if plan.failed:
            state.save_failed(plan.first)
            if not dropped:
                self._counts["kvcore_save_failures_total"] += 1
                state.save_failures += 1
        try:
            self.engine.publish(plan_id, not plan.failed)
            self._published = True
        except Exception as error:
            self.fault("publish", error)

    @guarded(lambda: None)
    def _arrived(self, req_id: str, lookup: EngineLookup) -> None:
        state = self._requests.get(req_id)
        if state is not None and self._events is not None:
            self._events.found(state, lookup.first, lookup.answer or 0)

    def _loaded(self, plan: Plan) -> None:
        name = plan.state.request.request_id
        if plan.failed and not plan.state.load_failed and self._requests.get(name) is plan.state:  # else it was ended
            plan.state.load_failed = True
            self._counts["kvcore_load_failures_total"] += 1
            logger.warning("request %s: a load failed, vLLM computes it", name)
        if plan.lookup is not None:
            self._release(plan.lookup)

    # -- a request's end ---------------------------------------------------------------------------------------------

    @guarded(lambda: (False, None))
    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Must its blocks stay until its saves are done? And what a router passes on to the
        engine that decodes, where this one only computes prompts."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, None
        self._drop_lookup(state)
        self._arrivals.drop((request.request_id,))
        if state.saves:
            self._held.append(request.request_id)
        return bool(state.saves), self._handover.promise(state)

    def busy(self) -> bool:
        """Must the engine go on stepping to hear of asynchronous saves?"""
        limit = time.monotonic() - LOST_PLAN_S
        return self.save_async and any(p.began > limit for p in self._save_plans.values())

    @guarded(lambda: False)
    def reset(self) -> bool:
        """Nothing that was cached so far may be used again: L1 is cleared, and what the tiers hold is left behind under
        its old namespace, because vLLM asks for this when the weights have changed in memory."""
        for state in self._requests.values():
            self._drop_lookup(state)
            state.load_failed = True
            state.stop_saving()
        self._arrivals.drop(self._requests)
        self._void += self._load_plans
        self._spaces.renew()
        if self._events is not None:
            self._events.clear()
        return True

    @guarded(list)
    def take_events(self) -> list[Any]:
        """vLLM's KV events of what came and went since the last call."""
        if self._events is None:
            return []
        now = time.monotonic()
        if isinstance(self.engine, RemoteEngine) and (self._published or now > self._hear_at):
            self._published, self._hear_at = False, now + HEAR_EVERY_S
            self.engine.hear()
        return self._events.take()

    def stats(self) -> KVCoreStats | None:
        """What was counted since the last call, at most once a second."""
        now = time.monotonic()
        if now < self._stats_due:
            return None
        self._stats_due = now + STATS_EVERY_S
        try:
            totals = {
                **self.engine.stats(),
                **self._counts,
                **self._handover.counts,
                "kvcore_scheduler_seconds_total": self.seconds,
                "kvcore_idle_wait_seconds_total": self._waited,
                **{f'kvcore_faults_total{{where="{k}"}}': float(v) for k, v in self.faults.items()},
            }
        except Exception as error:
            self.fault("stats", error)
            return None
        return KVCoreStats(data=self._deltas.take(totals))

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _observe(self) -> KVEvents | None:
        if not _compat.kv_events_on(self._vllm_config):
            return None
        if not isinstance(self.engine, CacheEngine | RemoteEngine):
            logger.info("with several servers, vLLM's KV events do not tell of kvcore's objects")
            return None
        events = KVEvents(self._kv_cache_config, self._block, self._hash_tokens)
        self.engine.observe("vllm", events)
        return events

    def _state(self, request: Any) -> RequestState | None:
        state = self._requests.get(request.request_id)
        if state is None and self._spaces and not request.resumable:
            # A resumable session may still change the tokens it has shown.
            tenant = tenant_of(request)
            if tenant is None:
                if not self._counts["kvcore_refused_tenants_total"]:
                    logger.warning("a request names no valid tenant (text of at most %d characters): it is not cached "
                                   "(logged once)", MAX_TENANT)  # fmt: skip
                if request not in self._refused:
                    self._refused.add(request)
                    self._counts["kvcore_refused_tenants_total"] += 1
                return None
            state = RequestState(request, self._spaces.of(request.lora_request, tenant), tenant)
            if self._loading:
                self._handover.begin(state, state.extend_hashes(self._hash_tokens))
            self._requests[request.request_id] = state
        return state

    def _asked(self, state: RequestState) -> Asked:
        if state.asked is None:
            state.asked = _compat.asked_of(state.request)
        return state.asked

    def _end(self, request: Any, tokens: int) -> int:
        """Where a hit of `tokens` ends: a load inside the step must leave a token to compute. Where loads are, one of
        what is still coming does so, too: how much is reused is no matter of how fast a tier is."""
        if self.load_async:
            return tokens
        return min(tokens, (int(request.num_tokens) - 1) // self._block * self._block)

    def _visible(self, ids: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Block ids for the engine: vLLM's null block, which stands for what a window has left behind, is -1."""
        return [
            [b or -1 for b in group] if windowed else group for group, windowed in zip(ids, self._windowed, strict=True)
        ]

    def _drop_lookup(self, state: RequestState) -> None:
        lookup, state.lookup = state.lookup, None
        self._waiting.pop(state.request.request_id, None)
        if lookup is not None:
            self._release(lookup)

    def _release(self, lookup: EngineLookup) -> None:
        try:
            self.engine.release(lookup)
        except Exception as error:
            self.fault("release", error)
