"""Loads that begin before their lookups are answered: requests have their blocks, and objects come one by one."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvcore_slow
from engines import Engine, engine, tokens
from scenarios_basic import LONG, PROMPTS

from vllm import SamplingParams, TokensPrompt

TIER = {"storage": {"plugin": "slow"}}


class Parts:
    """Counts the loads that workers are told to make, and in how many parts each of them comes."""

    def __init__(self, e: Engine) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        copier = get_kv_transfer_group().worker._copier
        self._submit = copier.submit
        self.parts: dict[int, list[tuple[bool, bool]]] = {}
        self.missing: set[int] = set()
        copier.submit = self._count

    def _count(self, kind: str, job: Any, *args: Any, **kwargs: Any) -> Any:
        if kind == "load":
            self.parts.setdefault(job.id, []).append((job.first, job.last))
            self.missing |= job.missing
        return self._submit(kind, job, *args, **kwargs)


class Slowly:
    """The storage of this engine: each load waits until it is let through."""

    def __init__(self, e: Engine) -> None:
        self._storage = e.half.engine.manager.tiers[0].storage
        self._real = self._storage.load
        self._gate = threading.Semaphore(0)
        self.lose: Callable[[Any], bool] = lambda key: False
        self._storage.load = self._load

    def let(self, calls: int) -> None:
        self._gate.release(calls)

    def _load(self, items: Any) -> Any:
        self._gate.acquire()
        for item in items:
            if self.lose(item.key):
                kvcore_slow.OBJECTS.pop(item.key, None)
        return self._real(items)


@contextmanager
def started(models: Path, extra: "dict[str, Any] | None" = None) -> Iterator[tuple[Engine, Slowly, Parts]]:
    """An engine whose L1 has the first 512 tokens of LONG, and its slow tier all of it."""
    with engine(str(models / "tiny"), {"kvcore.l2": [TIER]}) as e:
        e.run([LONG, *PROMPTS])
    with engine(str(models / "tiny"), {"kvcore.l2": [TIER], **(extra or {})}) as e:
        e.one(LONG[:512] + tokens(77, 30), 1)
        e.forget()
        tier = Slowly(e)
        try:
            yield e, tier, Parts(e)
        finally:
            tier.let(1000)


def add(e: Engine, name: str, prompt: list[int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    e.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)


def steps(e: Engine, until: Callable[[], Any], texts: "dict[str, Any] | None" = None) -> None:
    for _ in range(20_000):
        if until():
            return
        for output in e.llm.llm_engine.step():
            if output.finished and texts is not None:
                found = output.outputs[0]
                texts[output.request_id] = (list(found.token_ids), found.cumulative_logprob), output.num_cached_tokens
    raise AssertionError("not within 20,000 steps")


def whole(models: Path, extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """A prompt of whole chunks, all of which the tier has."""
    texts: dict[str, Any] = {}
    prompt = LONG[:1408]
    with started(models, extra) as (e, tier, _):
        add(e, "whole", prompt)
        steps(e, lambda: e.half._arrivals.next_lookup is not None or texts, texts)
        out: dict[str, Any] = {"waiting": e.half._arrivals.next_lookup is not None}
        tier.let(1000)
        steps(e, lambda: "whole" in texts, texts)
        e.settle()
        out["text"], out["cached"] = texts["whole"]
        out["failures"] = e.stat("kvcore_load_failures_total")
        e.forget(connector=True)
        out["computed"], out["computed_cached"] = e.one(prompt)
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


def arriving(models: Path, extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """One request that waits for its tier with its blocks, and others that go on meanwhile."""
    texts: dict[str, Any] = {}
    with started(models, extra) as (e, tier, counted):
        add(e, "long", LONG)
        steps(e, lambda: e.half._arrivals.next_lookup is not None or texts, texts)
        add(e, "other", tokens(991, 200))
        steps(e, lambda: "other" in texts, texts)
        out: dict[str, Any] = {"before": sorted(texts), "waiting": e.half._arrivals.next_lookup is not None}
        tier.let(1)
        steps(e, lambda: any(len(parts) > 1 for parts in counted.parts.values()), texts)
        tier.let(1000)
        steps(e, lambda: "long" in texts, texts)
        e.settle()
        (out["long"], out["cached"]), out["parts"] = texts["long"], counted.parts
        out["failures"] = e.stat("kvcore_load_failures_total")
        out["sources"] = {
            m.labels["source"]: m.value
            for m in e.llm.get_metrics()
            if m.name == "vllm:prompt_tokens_cached_by_source" and m.value
        }
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


def undelivered(models: Path, extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """A tier that loses, after it was asked what it has, one object of two requests."""
    texts: dict[str, Any] = {}
    with started(models, extra) as (e, tier, _):
        lost: list[Any] = []

        def lose(key: Any) -> bool:
            if len(lost) < 1:
                lost.append(key)
            return key in lost

        tier.lose = lose
        add(e, "a", LONG)
        add(e, "b", LONG)
        steps(e, lambda: e.half._arrivals.next_lookup is not None or texts, texts)
        tier.let(1000)
        steps(e, lambda: len(texts) == 2, texts)
        e.settle()
        out: dict[str, Any] = {name: text for name, (text, _) in texts.items()}
        out["cached"] = {name: cached for name, (_, cached) in texts.items()}
        out["failures"] = e.stat("kvcore_load_failures_total")
        e.forget()
        out["again"], out["again_cached"] = e.one(LONG)
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


def ended(models: Path, how: str) -> dict[str, Any]:
    """What waits with its blocks is aborted, is forgotten by the cache, or finds it broken."""
    texts: dict[str, Any] = {}
    with started(models) as (e, tier, counted):
        add(e, "long", LONG)
        steps(e, lambda: e.half._arrivals.next_lookup is not None or texts, texts)
        free = e.core.kv_cache_manager.block_pool.get_num_free_blocks()
        if how == "abort":
            e.llm.llm_engine.abort_request(["long"])
            add(e, "other", tokens(991, 200))
            steps(e, lambda: "other" in texts, texts)
        elif how == "reset":
            tier.let(1)
            steps(e, lambda: any(len(parts) > 1 for parts in counted.parts.values()), texts)
            e.half.reset()
            steps(e, lambda: "long" in texts, texts)
        elif how == "broken":
            e.half.engine.arrived = _break
            steps(e, lambda: "long" in texts, texts)
        tier.let(1000)
        e.settle()
        out: dict[str, Any] = {"texts": {name: text for name, (text, _) in texts.items()}}
        out["failures"], out["missing"] = e.stat("kvcore_load_failures_total"), len(counted.missing)
        out["held"] = free, e.core.kv_cache_manager.block_pool.get_num_free_blocks()
        until = time.monotonic() + 10  # what was under way comes to its end
        while e.half.engine.l1.usage()["staging"] and time.monotonic() < until:
            time.sleep(0.01)
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


def _break(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("broken on purpose")
