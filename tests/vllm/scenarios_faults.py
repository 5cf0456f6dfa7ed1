"""Scenarios with faults: loads that fail, a slow storage, an engine that breaks, wrong configurations."""

import time
from pathlib import Path
from typing import Any

from engines import Engine, engine, tokens
from scenarios_basic import LONG, PROMPTS


def failed_loads(models: Path, model: str = "tiny", extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """Slots that change hands between the plan and the end of the copy."""
    out: dict[str, Any] = {}
    with engine(str(models / model), extra or {}, num_gpu_blocks_override=40) as e:
        e.run(PROMPTS)
        e.forget()
        cache = e.half.engine
        retrieve = cache.retrieve

        def stolen(*args: Any) -> Any:
            copies = retrieve(*args)
            cache.l1.arena.bump([c.slot for c in copies[1:]])
            return copies

        cache.retrieve = stolen
        out["stolen"], _ = e.run(PROMPTS)
        out["failures"] = e.stat("kvcore_load_failures_total")
        cache.retrieve = retrieve
        e.forget()
        out["after"], out["after_cached"] = e.run(PROMPTS)
        e.settle()
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


def broken(models: Path) -> dict[str, Any]:
    """Every call into the cache raises, one after another: nothing but misses."""
    out: dict[str, Any] = {}
    with engine(str(models / "tiny"), {}) as e:
        e.one(LONG)
        for name in ("lookup", "retrieve", "reserve", "publish", "release"):
            e.forget()
            before = e.faults()
            setattr(e.half.engine, name, _break)
            texts, _ = e.run([LONG, *PROMPTS, tokens(len(out) + 900, 300)])
            delattr(e.half.engine, name)
            faults = {k: n - before.get(k, 0) for k, n in e.faults().items() if n != before.get(k, 0)}
            out[name] = {"long": texts[0], "prompts": texts[1:-1], "faults": faults}
        e.forget()
        out["healed"], out["healed_cached"] = e.one(LONG)
    return out


def _break(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("broken on purpose")


def detached(models: Path) -> dict[str, Any]:
    """A worker that cannot map the arena: loads fail and are computed, saves are abandoned."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    out: dict[str, Any] = {}
    with engine(str(models / "tiny"), {}) as e:
        e.one(LONG)
        e.forget()
        descriptor = e.half.engine.descriptor()
        e.half.engine.descriptor = lambda: {**descriptor, "fd": 999_999}
        e.half._told = ""
        get_kv_transfer_group().worker._arenas.follow("", None)
        out["long"], _ = e.one(LONG)
        out["prompts"], _ = e.run(PROMPTS)
        out["failures"] = e.stat("kvcore_load_failures_total"), e.stat("kvcore_save_failures_total")
        out["faults"] = get_kv_transfer_group().worker.faults
        del e.half.engine.descriptor
        e.half._told = ""
        e.forget()
        out["again"], out["again_cached"] = e.one(LONG)
        out["leaks"] = e.leaks()
    return out


def slow(models: Path) -> dict[str, Any]:
    """A storage far slower than the patience of a lookup: no request waits longer than that, none gets other text."""
    out: dict[str, Any] = {}
    tier = {"storage": {"plugin": "slow", "store_delay": "50ms"}}
    with engine(str(models / "tiny"), {"kvcore.l2": [tier]}) as e:
        e.run([LONG, *PROMPTS])
    tier["storage"]["load_delay"] = "3s"
    with engine(str(models / "tiny"), {"kvcore.l2": [tier], "kvcore.lookup_timeout": "200ms"}) as e:
        began = time.monotonic()
        out["long"], out["long_cached"] = e.one(LONG)
        out["seconds"] = time.monotonic() - began
        out["prompts"], _ = e.run(PROMPTS)
        out["timeouts"] = e.stat('kvcore_miss_chunks_total{reason="lookup_timeout"')
        out["faults"] = e.faults()
    tier["storage"]["load_delay"] = "50ms"
    with engine(str(models / "tiny"), {"kvcore.l2": [tier]}) as e:
        out["patient"], out["patient_cached"] = e.one(LONG)
    return out


def refused(models: Path) -> dict[str, Any]:
    """Configurations that must stop the start; the error's text of each."""
    out: dict[str, Any] = {}
    for name, model, extra in (
        ("chunk_tokens", "tiny", {"kvcore.chunk_tokens": 200}),
        ("mode", "tiny", {"kvcore.load": "maybe"}),
        ("no_prefix", "tiny", {"config": "kvcore.yaml"}),
        ("unknown_field", "tiny", {"kvcore.l1.sise": "1GiB"}),
        ("no_unit", "tiny", {"kvcore.l1.size": "many"}),
        ("unknown_plugin", "tiny", {"kvcore.keys": "nonesuch"}),
        ("no_file", "tiny", {"kvcore.config": "/nonexistent/kvcore.yaml"}),
        ("sync_hybrid", "swa", {"kvcore.load": "sync"}),
    ):
        try:
            Engine(str(models / model), extra)
            out[name] = "started"
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out
