"""The scheduler's half, on rank 0: it opens the cache, or the way to a server's, answers lookups and plans every copy.

TensorRT-LLM's interface cannot be told that a load has failed. So nothing is promised that may still fail for want of
the cache: what is offered is in L1 and leased, the arena is mapped on all ranks, and the plan is made, in ordinals of
the request's blocks, before the answer. A server that dies after that takes nothing away: its arena stays mapped.
"""

import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcore.api import KeySource
from kvcore.engine import Asked, Engine, EngineLookup, GroupSpec, ModelSpec, Space, salt_word, weights_fingerprint
from kvcore.service import open_engine
from kvcore.transfer import Copy
from kvcore_trtllm import _compat
from kvcore_trtllm.faults import Guarded, guarded, logger
from kvcore_trtllm.keys import KEY_SCHEME, Chain
from kvcore_trtllm.link import Link
from kvcore_trtllm.metadata import Attach, Load, Metadata, Save, Tensor
from kvcore_trtllm.reports import Inbox, Report

LOOKUP_WAIT_S = 0.1
"""How long a request's lookup may hold the scheduler, which asks once and waits. What tiers bring later is a miss."""


class Offer(NamedTuple):
    """Blocks that a request was promised: its blocks `[first, last)`, by a plan in ordinals. It may be taken later, in
    part, or never."""

    lookup: EngineLookup
    plan: list[Copy]
    first: int
    last: int


class State:
    """One request from its first question to its end."""

    def __init__(self, request: int, space: Space, salt: str) -> None:
        self.request = request
        self.space = space
        self.chain = Chain(space.spec.block_tokens, salt)
        self.tokens: list[int] = []
        self.block_ids: list[int] = []
        self.offer: Offer | None = None
        self.loading: int | None = None
        self.saved = 0
        """Chunks for which a save was planned, in `arena`."""
        self.arena = ""
        self.saves: set[int] = set()

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """Of the full chunks of these tokens."""
        space = self.space
        block_hashes = self.chain.extend(tokens)
        return space.hashes(
            KeySource(space.chunk_tokens, space.spec.block_tokens, tokens=tokens, block_hashes=block_hashes)
        )


class Plan:
    """A load or a save under way on the ranks. `lookup` is what keeps a load's objects."""

    def __init__(self, state: State, lookup: EngineLookup | None = None) -> None:
        self.state = state
        self.lookup = lookup
        self.ranks: set[int] = set()
        self.ok = True


class SchedulerHalf(Guarded):
    """Opens the cache that `KVCORE_CONFIG` names; raises a `KVCoreError` for a configuration or a model that cannot
    work. After that no method raises. Thread-safe: reports of the ranks come on a thread of their own."""

    def __init__(self, llm_args: Any, link: Link, lookup_wait_s: float = LOOKUP_WAIT_S) -> None:
        super().__init__()
        _compat.check_supported(llm_args)
        self._args = llm_args
        self._link = link
        self._lookup_wait_s = lookup_wait_s
        self._ranks = _compat.ranks(llm_args)
        self._block = _compat.block_tokens(llm_args)
        self._lock = threading.RLock()
        self._tensor: Tensor | None = None
        self._registered: Space | None = None
        self._arena = ""
        self._attach: Attach | None = None
        self._attached: set[int] = set()
        self._states: dict[int, State] = {}
        self._loads: list[Load] = []
        self._loading: dict[int, Plan] = {}
        self._saving: dict[int, Plan] = {}
        self._load_ids = itertools.count(1)
        self.engine: Engine = open_engine(name="trtllm")
        heard, tick = weakref.WeakMethod(self._heard), weakref.WeakMethod(self._tick)
        self._inbox = Inbox(lambda report: _call(heard, report), lambda: _call(tick))
        # TensorRT-LLM does not say when it ends: the end of the object or the process closes the cache.
        self.close = weakref.finalize(self, _end, self._inbox, self.engine)

    # -- a request's load --------------------------------------------------------------------------------------------

    @guarded(lambda: (0, False))
    def matched(self, request: Any, held_tokens: int) -> tuple[int, bool]:
        """Tokens that will be loaded beyond those the engine holds itself, and whether it has to wait for them."""
        with self._lock:
            self._drop(self._states.pop(request.request_id, None))
            space, salt = self._space(), _compat.salt_of(request)
            if space is None or salt is None:
                return 0, False
            state = self._states[request.request_id] = State(request.request_id, space, salt)
            if held_tokens % self._block or not self._ready():
                return 0, False
            tokens = _compat.tokens_of(request)
            hashes = state.hashes(tokens)
            first = held_tokens // space.chunk_tokens
            asked = Asked(str(request.request_id), len(tokens), tokens, salt=salt_word(salt))
            lookup = self.engine.lookup(space, tuple(hashes), first, asked)
            offer = None
            try:
                offer = self._offer(lookup, space, held_tokens, len(tokens))
            finally:
                if offer is None:
                    self.engine.release(lookup)
            if offer is None:
                return 0, False
            state.offer = offer
            return offer.last * self._block - held_tokens, True

    def _offer(self, lookup: EngineLookup, space: Space, held_tokens: int, tokens: int) -> Offer | None:
        lookup.wait(self._lookup_wait_s)
        found = lookup.poll()
        if found is None or lookup.arena != self._arena:
            return None
        first = held_tokens // self._block
        last = min(found * space.chunk_blocks, (tokens - 1) // self._block)  # the engine must compute a token
        if last <= first:
            return None
        plan = self.engine.retrieve(lookup, first, [range(last)])
        there = {block for copy in plan for block in copy.blocks}
        return Offer(lookup, plan, first, last) if there.issuperset(range(first, last)) else None

    @guarded(lambda: None)
    def allocated(self, request: Any, block_ids: Sequence[int]) -> None:
        """The engine has given the request its blocks. Where it has fewer than were promised, it has taken less."""
        with self._lock:
            state = self._states.get(request.request_id)
            if state is None or state.offer is None:
                return
            offer, state.offer = state.offer, None
            copies = _placed(offer.plan, dict(enumerate(block_ids[: offer.last])))
            load = Load(next(self._load_ids), state.request, offer.lookup.arena, copies)
            state.loading = load.id
            self._loading[load.id] = Plan(state, offer.lookup)
            self._loads.append(load)

    @guarded(lambda: None)
    def cancelled(self, request: Any, start: int, end: int) -> None:
        """The engine will not take what it was offered of these tokens. It may wait for the load all the same: where
        nothing is left of that, the engine hears at once that it has ended."""
        with self._lock:
            state = self._states.get(request.request_id)
            if state is None or state.offer is None:
                return
            offer, gone = state.offer, range(-(-start // self._block), end // self._block)
            kept = {b: b for b in range(offer.first, offer.last) if b not in gone}
            state.offer = offer._replace(plan=list(_placed(offer.plan, kept)))
            if not kept:
                self.engine.release(offer.lookup)

    @guarded(lambda: None)
    def reset(self, request: Any) -> None:
        """The engine has released the request's blocks and will begin it again. What is being saved from them may be
        another's by now, and is not published."""
        with self._lock:
            state = self._states.pop(request.request_id, None)
            if state is not None:
                self._forget(state)
                for plan_id in state.saves:
                    self._saving[plan_id].ok = False

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, output: Any) -> Metadata:
        """The orders for the workers in this step."""
        meta = Metadata(reports=self._inbox.address)
        with self._lock:
            self._follow()
            meta.loads, self._loads = self._loads, []
            for record in output.new_requests if output is not None else ():
                self._plan(record, True, meta)
            for record in output.cached_requests if output is not None else ():
                self._plan(record, False, meta)
            meta.arena = self._arena
            meta.offered = frozenset(s.offer.lookup.arena for s in self._states.values() if s.offer is not None)
            meta.attach = self._attach if len(self._attached) < self._ranks else None
        self._tick()
        return meta

    @guarded(lambda: None)
    def _plan(self, record: Any, new: bool, meta: Metadata) -> None:
        state = self._states.get(record.request_id)
        if state is None:
            return
        if new:
            state.tokens, state.block_ids = [], []
        state.tokens += record.new_tokens
        state.block_ids += record.new_block_ids
        if not self._ready():
            return
        if state.arena != self._arena:
            state.arena, state.saved = self._arena, 0
        # What this step computes is written at its end. The first record of a request may leave loaded tokens out.
        written = min(record.computed_position + record.num_scheduled_tokens, len(state.tokens))
        first, last = state.saved, written // state.space.chunk_tokens
        if last <= first:
            return
        hashes, name = state.hashes(state.tokens), str(state.request)
        plan = self.engine.reserve(state.space, hashes, first, last, [state.block_ids], name)
        if plan.arena != self._arena:
            self.engine.publish(plan.id, False)
            return
        state.saved = last
        if plan.copies:
            self._saving[plan.id] = Plan(state)
            state.saves.add(plan.id)
            meta.saves.append(Save(plan.id, state.request, plan.arena, tuple(plan.copies)))

    @guarded(lambda: None)
    def _follow(self) -> None:
        """Notice a new arena: at the start, and after each restart of a server."""
        space, descriptor = self._space(), self.engine.descriptor()
        token = descriptor["token"] if descriptor is not None and space is not None else ""
        if token == self._arena:
            return
        self._arena, self._attach, self._attached = token, None, set()
        if token and descriptor is not None and space is not None and self._tensor is not None:
            self._attach = Attach(token, descriptor, space.groups, self._tensor)

    def _ready(self) -> bool:
        """Have all ranks mapped the arena of now?"""
        return bool(self._arena) and len(self._attached) >= self._ranks

    # -- a request's end ---------------------------------------------------------------------------------------------

    @guarded(lambda: False)
    def finished(self, request: Any) -> bool:
        """The request has ended. Must its blocks stay until copies are done?"""
        with self._lock:
            state = self._states.pop(request.request_id, None)
            if state is None:
                return False
            busy = bool(state.saves) or state.loading is not None
            self._forget(state)
            return busy

    def _forget(self, state: State) -> None:
        """Let go of what no worker knows of yet."""
        self._drop(state)
        for load in [load for load in self._loads if load.request == state.request]:
            self._loads.remove(load)
            self._settle(self._loading.pop(load.id))

    def _drop(self, state: State | None) -> None:
        """Let go of what was offered and not taken."""
        if state is not None and state.offer is not None:
            offer, state.offer = state.offer, None
            self.engine.release(offer.lookup)

    # -- what the ranks report ---------------------------------------------------------------------------------------

    @guarded(lambda: None)
    def _heard(self, report: Report) -> None:
        with self._lock:
            if report.kind == "attached":
                if report.id == self._arena:
                    self._attached.add(report.rank)
                return
            plans = self._loading if report.kind == "loaded" else self._saving
            plan = plans.get(int(report.id))
            if plan is None:
                return
            plan.ranks.add(report.rank)
            plan.ok = plan.ok and report.ok
            if len(plan.ranks) < self._ranks:
                return
            del plans[int(report.id)]
            if report.kind == "saved":
                plan.state.saves.discard(int(report.id))
                self.engine.publish(int(report.id), plan.ok)
            else:
                self._settle(plan)

    def _settle(self, plan: Plan) -> None:
        plan.state.loading = None
        if plan.lookup is not None:
            self.engine.release(plan.lookup)

    @guarded(lambda: None)
    def _tick(self) -> None:
        """Keep what is being loaded, and what was promised."""
        with self._lock:
            for lookup in [plan.lookup for plan in self._loading.values()]:
                if lookup is not None:
                    self.engine.renew(lookup)
            for state in self._states.values():
                if state.offer is not None:
                    self.engine.renew(state.offer.lookup)

    # -- the model ---------------------------------------------------------------------------------------------------

    def _space(self) -> Space | None:
        """The model's space; None until rank 0's worker has been shown the KV cache."""
        tensor = self._link.tensor
        if tensor is not None and tensor != self._tensor:
            self._tensor = tensor
            self._registered = self.engine.register(self._spec(tensor))
            self._arena = ""
            logger.info("kvcore is ready: %d ranks, blocks of %d tokens", self._ranks, self._block)
        return self._registered

    def _spec(self, tensor: Tensor) -> ModelSpec:
        name, revision = _compat.model_of(self._args)
        return ModelSpec(
            engine="trtllm",
            model=name.rstrip("/").rpartition("/")[2],
            weights=weights_fingerprint(name, revision),
            dtype=tensor.dtype,
            element_bytes=tensor.element_bytes,
            layout=tensor.shape,
            backend=str(getattr(self._args, "attn_backend", "")),
            isa="",
            block_tokens=self._block,
            ranks=self._ranks,
            groups=(GroupSpec(("kv",), (tensor.block_bytes,)),),
            parallel={"tp": self._ranks},
            extra={**_compat.computed_from(self._args), "hashes": KEY_SCHEME},
        )


def _placed(plan: Sequence[Copy], place: Mapping[int, int]) -> tuple[Copy, ...]:
    """A plan in ordinals, put where they are; what is nowhere is left out."""
    copies = [c._replace(blocks=tuple(place.get(b, -1) for b in c.blocks)) for c in plan]
    return tuple(c for c in copies if max(c.blocks) >= 0)


def _call(method: "weakref.WeakMethod[Any]", *args: Any) -> None:
    bound = method()
    if bound is not None:
        bound(*args)


def _end(inbox: Inbox, engine: Engine) -> None:
    inbox.close()
    engine.close()
