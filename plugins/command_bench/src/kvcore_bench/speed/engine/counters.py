"""What an engine counts itself, in the Prometheus text of its `/metrics`."""

import re
from collections.abc import Mapping

from kvcore_bench.speed.engine.client import Api

_KEPT = re.compile(r"prefix_cache|prompt_tokens|cached_tokens|kvcore_|lmcache|kv_offload")
_HISTOGRAM = re.compile(r"_(bucket|created)$")
_OWN = ("engine", "model_name")
"""Labels that every sample of a server has alike."""
_PROMPT = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_CACHED = ("vllm:prompt_tokens_cached_total", "sglang:cached_tokens_total")
_SOURCES = ("local_cache_hit", "external_kv_transfer")

Counts = dict[str, float]
"""Sample -> value. Names with their labels, but for those that all samples have alike."""


def counts(api: Api) -> Counts:
    """What has to do with reuse. Empty when the server has no such page."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        status, body = api.read("/metrics")
        if status != 200:
            return {}
        found: Counts = {}
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                if _KEPT.search(sample.name) and not _HISTOGRAM.search(sample.name) and family.type != "gauge":
                    name = _named(sample.name, sample.labels)
                    found[name] = found.get(name, 0.0) + sample.value
        return found
    except (OSError, ValueError):  # it has none, or it is no such text
        return {}


def increase(before: Mapping[str, float], after: Mapping[str, float]) -> Counts:
    """What has changed, and by how much."""
    changes = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: round(change, 6) for name, change in changes.items() if change}


def reused_share(increases: Mapping[str, float]) -> float | None:
    """Tokens not computed of all tokens of prompts, by the engine's counters; None when it has none."""
    for prompt, cached in zip(_PROMPT, _CACHED, strict=True):
        if total := _sum(increases, prompt):
            return _sum(increases, cached) / total
    return None


def behind_share(increases: Mapping[str, float]) -> float | None:
    """Of the tokens that vLLM reused, those from a cache behind its own; None where it does not tell."""
    own, behind = (increases.get(f'vllm:prompt_tokens_by_source_total{{source="{s}"}}', 0.0) for s in _SOURCES)
    return behind / (own + behind) if own + behind else None


def _sum(increases: Mapping[str, float], metric: str) -> float:
    """Of all its samples."""
    return sum(value for name, value in increases.items() if name.partition("{")[0] == metric)


def _named(name: str, labels: Mapping[str, str]) -> str:
    kept = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()) if k not in _OWN)
    return f"{name}{{{kept}}}" if kept else name
