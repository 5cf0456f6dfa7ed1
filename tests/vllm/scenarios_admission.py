"""A tier that is slower than computing: vLLM's own prefill speed decides. Run by `scenarios.py`."""

import time
from pathlib import Path
from typing import Any

from engines import Engine, engine, tokens

LATENCY_S = 1.0
"""Of the tier; the prompt is computed in a tenth of it."""
PROMPT = tokens(21, 400)
ROUNDS = 7


def slow_tier(models: Path, read: str, **modes: str) -> dict[str, Any]:
    """The same prompt again and again, each time only in the tier: cached tokens and seconds of each."""
    storage = {"plugin": "faulty", "storage": "memory", "latency": f"{LATENCY_S:g}s", "operations": ["load"]}
    extra = {
        "kvcore.l2": [{"name": "far", "storage": storage, "read": read}],
        "kvcore.lookup_timeout": "10s",
        **{f"kvcore.{half}": mode for half, mode in modes.items()},
    }
    out: dict[str, Any] = {"cached": [], "seconds": [], "texts": []}
    with engine(str(models / "tiny"), extra) as e:
        for i in range(6):  # vLLM's speed, from prompts of which nothing is known
            e.one(tokens(100 + i, 400), 1)
        _again(e, out, warm_up=True)
        for _ in range(ROUNDS):
            _again(e, out)
        stats = e.half.engine.stats()
        out["speed"] = stats["kvcore_prefill_tokens_per_second"]
        out["refused"] = stats.get('kvcore_miss_chunks_total{reason="slow_tier"}', 0.0)
        e.settle()
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


def _again(e: Engine, out: dict[str, Any], *, warm_up: bool = False) -> None:
    e.half.engine.drain()
    e.half.engine.clear(e.half._spaces.of(None, ""))
    e.forget()
    began = time.perf_counter()
    text, cached = e.one(PROMPT, 4)
    if not warm_up:
        out["seconds"].append(time.perf_counter() - began)
        out["cached"].append(cached)
    out["texts"].append(text)
