"""TensorRT-LLM's side of the connector interface, as documented: its call order, its rules, and a model to be wrong.

The order of a step: new requests are asked about (once each), given blocks and told of them; one set of metadata is
built, pickled and bound on every rank; loads start; requests that load are left out; layers run, with their hooks;
saves; finished requests; `get_finished` on every rank. Whatever breaks a rule is an `AssertionError`. As under KV cache
manager V2, a request may get its blocks some steps after it was asked about (`later`), take only some of the tokens it
was offered (`takes`), and lose its blocks and begin again (`reset`).

KV of a token is a hash of the tokens before it, the layer and the rank. The next token is a hash of all KV of the
request as it stands in the tensors, so one wrong byte changes the text. Freed blocks are filled with poison, and must
still be full of it when they are given away again.
"""

import functools
import hashlib
import pickle
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from tensorrt_llm import _utils
from tensorrt_llm._torch.pyexecutor.kv_cache_connector import RequestData, SchedulerOutput

from kvcore_trtllm.connector import KVCoreScheduler, KVCoreWorker

BLOCK = 8
LAYERS = 2
TOKEN_BYTES = 16
POISON = 0xEE


def arguments(ranks: int = 1, model: str = "standin-model", **more: Any) -> SimpleNamespace:
    cache = SimpleNamespace(tokens_per_block=BLOCK, dtype="auto", max_attention_window=None)
    return SimpleNamespace(
        model=model, revision=None, tensor_parallel_size=ranks, pipeline_parallel_size=1, max_beam_width=1,
        speculative_config=None, dtype="bfloat16", attn_backend="TRTLLM", kv_cache_config=cache, **more,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def chain(tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """For each token, a hash of it and those before it."""
    before = chain(tokens[:-1]) if tokens else ()
    return (*before, hashlib.sha256(b"".join(before[-1:]) + str(tokens[-1]).encode()).digest()) if tokens else ()


def kv_of(tokens: list[int], position: int, layer: int, rank: int) -> bytes:
    """The KV of one token in one layer."""
    seed = chain(tuple(tokens))[position] + bytes([layer, rank])
    return hashlib.blake2b(seed, digest_size=TOKEN_BYTES).digest()


def next_token(kv: bytes) -> int:
    return 3 + int.from_bytes(hashlib.sha256(kv).digest()[:2], "little")


def expected(prompt: list[int], count: int, ranks: int = 1) -> list[int]:
    """What the model says, by itself."""
    tokens = list(prompt)
    for _ in range(count):
        parts = [
            kv_of(tokens, p, layer, r) for r in range(ranks) for p in range(len(tokens)) for layer in range(LAYERS)
        ]
        tokens.append(next_token(b"".join(parts)))
    return tokens[len(prompt) :]


@dataclass
class Request:
    request_id: int
    prompt: list[int]
    count: int
    held: int = 0
    cache_salt: str | None = None
    is_generation_only_request: bool = False
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    position: int = 0
    matched: int = 0
    later: int = 0
    takes: int | None = None
    offer: tuple[int, bool] = (0, False)
    state: str = "new"  # new, asked, loading, context, generating, over, saving, freed
    told_tokens: int = 0
    told_blocks: int = 0
    shown: bool = False

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


class Runtime:
    """One engine.

    Args:
        ranks: tensor-parallel ranks. blocks: of the KV cache. context: most prompt tokens computed in a step.
        scheduler: the connector's class, for one with another patience.
    """

    def __init__(
        self,
        ranks: int = 1,
        blocks: int = 128,
        context: int = 10_000,
        scheduler: type[KVCoreScheduler] = KVCoreScheduler,
        args: Any = None,
    ) -> None:
        self.ranks, self.context = ranks, context
        self.args = args or arguments(ranks)

        def worker(rank: int) -> KVCoreWorker:
            _utils.set_rank(rank)
            return KVCoreWorker(self.args)

        with ThreadPoolExecutor(ranks + 1) as pool:  # TensorRT-LLM makes both halves at the same time
            workers = [pool.submit(worker, rank) for rank in range(ranks)]
            self.scheduler = pool.submit(scheduler, self.args).result()
            self.workers = [made.result() for made in workers]
        self.ended = [made.register_forward_pass_callable() for made in self.workers]
        self.tensors = [
            torch.full((blocks, LAYERS, BLOCK, TOKEN_BYTES), POISON, dtype=torch.uint8) for _ in range(ranks)
        ]
        for made, tensor in zip(self.workers, self.tensors, strict=True):
            made.register_kv_caches(tensor)
        self.memory = [tensor.numpy() for tensor in self.tensors]
        self.free = list(range(blocks))
        self.requests: dict[int, Request] = {}
        self.new_loading: set[int] = set()
        self.new_saving: set[int] = set()
        self.pending = [(set[int](), set[int]()) for _ in range(ranks)]
        self.local = [(set[int](), set[int]()) for _ in range(ranks)]
        self.external: dict[int, int] = {}
        self.steps = 0

    # -- what a user does --------------------------------------------------------------------------------------------

    def submit(self, prompt: list[int], count: int = 4, **more: Any) -> Request:
        request = Request(len(self.requests) + 1, prompt, count, tokens=list(prompt), **more)
        self.requests[request.request_id] = request
        return request

    def run(self, prompt: list[int], count: int = 4, **more: Any) -> Request:
        """One request to its end, its saves included. Its text must be right."""
        request = self.submit(prompt, count, **more)
        self.until(lambda: request.state == "freed")
        assert request.tokens[len(prompt) :] == expected(prompt, count, self.ranks)
        return request

    def until(self, true: Any, timeout_s: float = 60.0) -> None:
        give_up = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < give_up, [(r.request_id, r.state) for r in self.requests.values()]
            self.step()

    def cancel(self, request: Request) -> None:
        if request.state == "asked":
            self.scheduler.cancel_load(request, request.held, request.held + request.offer[0])
        self._terminate(request)

    def reset(self, request: Request) -> None:
        """Its blocks are lost, and it begins again. Not while it loads."""
        assert request.state in ("asked", "context", "generating")
        self.scheduler.request_reset(request)
        self._free_blocks(request)
        request.tokens, request.blocks, request.state, request.shown = list(request.prompt), [], "new", False
        request.position = request.told_tokens = request.told_blocks = request.later = 0
        self.external.pop(request.request_id, None)

    def faults(self) -> dict[str, int]:
        """Errors that the connector kept from the engine."""
        return {**self.scheduler.half.faults, **{k: n for w in self.workers for k, n in w.half.faults.items()}}

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.steps += 1
        batch = [r for r in self.requests.values() if r.state in ("new", "asked", "context", "generating")]
        if batch:
            for request in batch:
                self._allocate(request)
            output = self._output(batch)
            batch = [r for r in batch if r.state not in ("asked", "loading")]
            meta = pickle.dumps(self.scheduler.build_connector_meta(output))
            for worker in self.workers:
                worker.bind_connector_meta(pickle.loads(meta))
                worker.start_load_kv(None)
        if batch:
            self._forward(batch)
            for request in batch:
                self._advance(request)
        else:
            time.sleep(0.001)  # nothing to compute: the copies have the core
        self._collect()

    def _allocate(self, request: Request) -> None:
        if request.state == "new":
            self._ask(request)
        if request.state != "asked":
            self._grow(request, len(request.tokens))
        elif request.later:
            request.later -= 1
        else:
            self._place(request)

    def _ask(self, request: Request) -> None:
        self._compute_held(request)
        matched, wait = request.offer = self.scheduler.get_num_new_matched_tokens(request, request.held)
        assert type(matched) is int
        assert type(wait) is bool
        assert matched > 0 or not wait, "load_kv_async must be False when num_tokens is 0"
        assert 0 <= matched <= len(request.prompt) - 1 - request.held, "a token must be left to compute"
        request.state = "asked"

    def _place(self, request: Request) -> None:
        matched, wait = request.offer
        taken = matched if request.takes is None else min(matched, request.takes)
        if taken < matched:
            self.scheduler.cancel_load(request, request.held + taken, request.held + matched)
        request.matched = taken
        request.position = request.held + taken
        self._grow(request, len(request.prompt))
        self.scheduler.update_state_after_alloc(request, list(request.blocks))
        self.external[request.request_id] = taken
        request.state = "context"
        if wait:  # also where nothing is taken
            request.state = "loading"
            self.new_loading.add(request.request_id)

    def _compute_held(self, request: Request) -> None:
        """What the engine's own prefix cache has."""
        self._grow(request, request.held)
        self._write(request, 0, request.held)

    def _grow(self, request: Request, tokens: int) -> None:
        while len(request.blocks) * BLOCK < tokens:
            block = self.free.pop(0)
            for memory in self.memory:
                assert bool((memory[block] == POISON).all()), f"block {block} was written after it was freed"
            request.blocks.append(block)

    def _output(self, batch: list[Request]) -> SchedulerOutput:
        output = SchedulerOutput()
        for r in batch:
            if r.state in ("asked", "loading"):
                continue
            scheduled = min(len(r.prompt) - r.position, self.context) if r.state == "context" else 1
            position = r.position if r.state == "context" else len(r.tokens) - 1
            position -= self.external.pop(r.request_id, 0)
            record = RequestData(
                r.request_id, r.tokens[r.told_tokens :], r.blocks[r.told_blocks :], position, scheduled
            )
            r.told_tokens, r.told_blocks = len(r.tokens), len(r.blocks)
            (output.cached_requests if r.shown else output.new_requests).append(record)
            r.shown = True
        self.external.clear()
        return output

    def _forward(self, batch: list[Request]) -> None:
        for rank, worker in enumerate(self.workers):
            for layer in range(LAYERS):
                worker.wait_for_layer_load(layer, None)
                for r in batch:
                    start = r.position
                    end = min(len(r.prompt), start + self.context) if r.state == "context" else len(r.tokens)
                    self._write(r, start, end, [rank], [layer])
                worker.save_kv_layer(layer, None)
            self.ended[rank]()
            worker.wait_for_save(None)

    def _write(self, r: Request, start: int, end: int, ranks: Any = None, layers: Any = None) -> None:
        for rank in ranks if ranks is not None else range(self.ranks):
            for layer in layers if layers is not None else range(LAYERS):
                for p in range(start, end):
                    row = memoryview(kv_of(r.tokens, p, layer, rank))
                    self.memory[rank][r.blocks[p // BLOCK], layer, p % BLOCK] = row

    def _advance(self, r: Request) -> None:
        if r.state == "context":
            r.position = min(len(r.prompt), r.position + self.context)
            if r.position < len(r.prompt):
                return
            r.state = "generating"
        r.position = len(r.tokens)
        parts = [
            self.memory[rank][r.blocks[p // BLOCK], layer, p % BLOCK].tobytes()
            for rank in range(self.ranks)
            for p in range(len(r.tokens))
            for layer in range(LAYERS)
        ]
        r.tokens.append(next_token(b"".join(parts)))
        if len(r.tokens) - len(r.prompt) >= r.count:
            self._terminate(r)

    def _terminate(self, request: Request) -> None:
        assert request.state not in ("over", "saving", "freed")
        loading = request.state == "loading"
        if self.scheduler.request_finished(request, list(request.blocks)):
            request.state = "saving"
            self.new_saving.add(request.request_id)
        else:
            assert not loading, "its blocks are being written"
            self._release(request)

    def _release(self, request: Request) -> None:
        self._free_blocks(request)
        request.state = "freed"

    def _free_blocks(self, request: Request) -> None:
        for block in request.blocks:
            for memory in self.memory:
                memory[block] = POISON
        self.free += request.blocks

    def _collect(self) -> None:
        saving, loading = self.new_saving, self.new_loading
        self.new_saving, self.new_loading = set(), set()
        for rank, worker in enumerate(self.workers):
            self.pending[rank][0].update(saving)
            self.pending[rank][1].update(loading)
            answer = worker.get_finished(sorted(saving), sorted(loading))
            for which, name in enumerate(("saving", "loading")):
                ids = answer[which]
                assert len(ids) == len(set(ids))
                assert self.pending[rank][which].issuperset(ids), f"rank {rank} returned {name} ids it was not given"
                self.pending[rank][which].difference_update(ids)
                self.local[rank][which].update(ids)
        for which in (1, 0):
            done = set.intersection(*[local[which] for local in self.local])
            for local in self.local:
                local[which].difference_update(done)
            for request_id in done:
                request = self.requests[request_id]
                if which == 1 and request.state == "loading":
                    self._check_loaded(request)
                    request.state = "context"
                elif which == 0:
                    self._release(request)

    def _check_loaded(self, r: Request) -> None:
        for rank in range(self.ranks):
            for layer in range(LAYERS):
                for p in range(r.position):
                    found = self.memory[rank][r.blocks[p // BLOCK], layer, p % BLOCK].tobytes()
                    assert found == kv_of(r.tokens, p, layer, rank), f"token {p} was called loaded and is not"


# -- for tests -------------------------------------------------------------------------------------------------------

Start = Callable[..., Runtime]
Replace = Callable[[str, Any], None]


class Patient(KVCoreScheduler):
    """The machine may be busy."""

    lookup_wait_s = 20.0


def warm(engine: Runtime) -> None:
    """Requests until all ranks have mapped the arena: before that, nothing is offered or saved."""
    give_up = time.monotonic() + 30
    while not engine.scheduler.half._ready():
        assert time.monotonic() < give_up
        engine.run([7, 8, 9], 1)


def prompt(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 60_000), k=count)


def saved(engine: Runtime) -> None:
    """Wait until what the ranks have reported is published."""
    half = engine.scheduler.half
    give_up = time.monotonic() + 30
    while half._saving or half._loading:
        assert time.monotonic() < give_up
        engine.step()
