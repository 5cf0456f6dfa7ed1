"""Scenarios of `KVCoreTier`, below the CPU tier of vLLM's own offloading. Run by `scenarios.py`."""

import gc
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import Engine, crowd, engine, tokens
from safetensors.torch import load_file, save_file
from scenarios_basic import LONG, PROMPTS
from scenarios_server import server

from kvcore.api import ConfigError
from kvcore.explain.explain import explain_prompt
from kvcore.explain.models import Question
from kvcore.testing.fault_config import Faults
from kvcore_vllm.tier import KVCoreTier
from vllm import SamplingParams, TokensPrompt

# vLLM ships no copy worker for its CPU backend; the one of the benchmarks stands in for it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

ROW = 256 << 10
"""Bytes of a chunk of `tiny`, and so of a row of vLLM's CPU tier."""
PATIENT = {"kvcore.lookup_timeout": "20s"}
"""A busy machine is no fault of the store."""
_CALLS = (
    "on_new_request",
    "lookup",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "on_schedule_end",
    "on_request_finished",
    "has_pending_work",
    "get_stats",
)


@contextmanager
def offloading(
    model: Path, *tiers: dict[str, Any], memory: str | int = 256 << 20, **kwargs: Any
) -> Iterator[tuple[Engine, Any]]:
    """An engine with vLLM's offloading and these secondary tiers; and the first of them."""
    extra = {
        "cpu_bytes_to_use": memory,
        "spec_name": "CpuOffloadingSpec",
        "spec_module_path": "offload_on_cpu",
        "secondary_tiers": list(tiers),
    }
    with engine(str(model), extra, connector="OffloadingConnector", **kwargs) as e:
        yield e, e.core.connector.connector_scheduler.manager.secondary_tiers[0]


def kvcore(*l2: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The entry of `secondary_tiers`, by the name that the plugin has registered."""
    return {"type": "kvcore", "kvcore.l2": list(l2), **PATIENT, **options}


def counts(e: Engine) -> dict[str, float]:
    """The tier's counters as vLLM shows them, without their prefix; and the reused tokens by source."""
    out = {}
    for m in e.llm.get_metrics():
        if m.name.startswith("vllm:kvcore_tier_"):
            out[m.name.removeprefix("vllm:kvcore_tier_")] = m.value
        elif m.name == "vllm:prompt_tokens_cached_by_source":
            out[m.labels["source"]] = m.value
    return out


def tier_cold(models: Path, model: str, storage: dict[str, Any]) -> dict[str, Any]:
    """A first engine: computed, then from vLLM's own CPU tier. The store is slow: much waits at the shutdown."""
    out: dict[str, Any] = {}
    slow = {"plugin": "faulty", "storage": storage, "latency": "50ms"}
    with offloading(models / model, kvcore({"storage": slow})) as (e, tier):
        out["cold"], out["cold_cached"] = e.run([LONG, *PROMPTS])
        e.forget()
        out["memory"], out["memory_cached"] = e.run([LONG, *PROMPTS])
        e.one([5, 6, 7], 1)
        out["counts"], out["faults"] = counts(e), tier.faults
    return out


def tier_again(models: Path, model: str, storage: dict[str, Any], module_path: bool = False) -> dict[str, Any]:
    """Another engine over the same store."""
    out: dict[str, Any] = {}
    entry = kvcore({"storage": storage})
    if module_path:
        entry |= {"type": "KVCoreTier", "module_path": "kvcore_vllm.tier"}
    with offloading(models / model, entry) as (e, tier), timed() as times:
        out["texts"], out["cached"] = e.run([LONG, *PROMPTS])
        e.forget()
        out["part"], out["part_cached"] = e.one(LONG[:300] + tokens(7, 200))
        e.one([5, 6, 7], 1)
        out["counts"], out["faults"], out["calls"] = counts(e), tier.faults, summary(times)
    return out


def tier_damaged(models: Path, model: str, folder: str) -> dict[str, Any]:
    """An engine over files of which a bit was changed; and then over what it has stored itself."""
    for path in files(folder):
        size = path.stat().st_size
        with path.open("r+b") as stream:
            stream.seek(size // 2)
            byte = stream.read(1)
            stream.seek(size // 2)
            stream.write(bytes([byte[0] ^ 0x40]))
    out = tier_again(models, model, {"plugin": "disk", "path": folder})
    out["repaired"] = tier_again(models, model, {"plugin": "disk", "path": folder})
    return out


def tier_small(models: Path, model: str, folder: str) -> dict[str, Any]:
    """Forty requests, preempted again and again, with a CPU tier that holds few chunks: most come from the store."""
    out: dict[str, Any] = {}
    tier = {"storage": {"plugin": "disk", "path": folder}}
    size = {"memory": 24 * ROW, "num_gpu_blocks_override": 40}
    with offloading(models / model, kvcore(tier), **size) as (e, tier), timed() as times:
        out["cold"], _ = e.run(crowd(), 24)
        e.forget()
        out["hot"], out["hot_cached"] = e.run(crowd(), 24)
        e.one([5, 6, 7], 1)
        out["counts"], out["faults"], out["calls"] = counts(e), tier.faults, summary(times)
    return out


def tier_faulty(models: Path, model: str, folder: str) -> dict[str, Any]:
    """A store of which every part fails now and then."""
    out: dict[str, Any] = {}
    rates = {"error_rate": 0.1, "fail_rate": 0.1, "lost_rate": 0.1, "torn_rate": 0.1, "flip_rate": 0.2}
    storage = {"plugin": "faulty", "storage": {"plugin": "disk", "path": folder}, **rates, "seed": 3}
    with offloading(models / model, kvcore({"storage": storage}), memory=16 * ROW) as (e, tier):
        for name in ("cold", "hot", "again"):
            e.forget()
            out[name], out[name + "_cached"] = e.run([LONG, *PROMPTS])
        e.one([5, 6, 7], 1)
        out["counts"], out["faults"] = counts(e), tier.faults
    return out


def tier_dead(models: Path) -> dict[str, Any]:
    """A store that was never there, and one that stops to answer: requests are computed, and no call waits."""
    out: dict[str, Any] = {}
    nowhere = {"storage": {"plugin": "redis", "url": "redis://127.0.0.1:9", "timeout": "500ms"}, "timeout": "1s"}
    hangs = {"storage": {"plugin": "faulty", "storage": "memory", "hang_rate": 1.0}, "timeout": "1s"}
    for name, tier in (("nowhere", nowhere), ("hangs", hangs)):
        entry = kvcore(tier, **{"kvcore.lookup_timeout": "500ms"})
        with offloading(models / "tiny", entry) as (e, made), timed() as times:
            texts, cached = e.run([LONG, *PROMPTS])
            e.forget()
            again, _ = e.run([LONG, *PROMPTS])
            give_up = time.monotonic() + 60
            while not counts(e).get("unstored_chunks") and time.monotonic() < give_up:
                e.one([5, 6, 7], 1)  # vLLM hears of what stores have come to with a step
            out[name] = {"texts": texts, "cached": cached, "again": again, "counts": counts(e), "faults": made.faults}
            out[name]["calls"] = summary(times)
    return out


def tier_hanging_load(models: Path) -> dict[str, Any]:
    """A store that says what it has, and whose loads hang in its own code until it recovers: rows that it may still
    write cannot be given back. Another request is answered meanwhile."""
    out: dict[str, Any] = {}
    storage = {"plugin": "faulty", "storage": "memory", "operations": ["load"], "hang_rate": 1.0}
    # room for one prompt, so that the second one displaces the first
    with offloading(models / "tiny", kvcore({"storage": storage, "timeout": "1s"}), memory=12 * ROW) as (e, tier):
        out["cold"], _ = e.one(LONG)
        e.one(PROMPTS[3])
        e.forget()
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
        for name, prompt in (("held", LONG), ("other", PROMPTS[2])):
            e.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
        done = answered(e, "other")
        out["held_meanwhile"] = "held" not in done
        tier.store.manager.tiers[0].storage.faults = Faults()
        done |= answered(e, "held")
        out["held"], out["other"] = done["held"], done["other"]
        e.one([5, 6, 7], 1)
        out["counts"], out["faults"] = counts(e), tier.faults
    return out


def answered(e: Engine, name: str) -> dict[str, Any]:
    """Step until a request is answered; the texts of those that are."""
    done: dict[str, Any] = {}
    until = time.monotonic() + 120
    while name not in done:
        assert time.monotonic() < until, f"{name} is not answered"
        for output in e.llm.llm_engine.step():
            if output.finished:
                text = output.outputs[0]
                done[output.request_id] = (list(text.token_ids), text.cumulative_logprob)
    return done


def tier_reset(models: Path, folder: str) -> dict[str, Any]:
    """vLLM forgets everything, as when weights changed in memory."""
    out: dict[str, Any] = {}
    with offloading(models / "tiny", kvcore({"storage": {"plugin": "disk", "path": folder}})) as (e, tier):
        e.one(LONG)
        e.forget(connector=True)
        out["reset"], out["reset_cached"] = e.one(LONG)
        e.forget()
        out["then"], out["then_cached"] = e.one(LONG)
        out["faults"] = tier.faults
    return out


def tier_weights(models: Path, folder: str) -> dict[str, Any]:
    """Two checkpoints of one name, one after the other; then the first, moved."""
    out: dict[str, Any] = {}
    first, second, moved = (Path(folder) / name / "tiny" for name in ("first", "second", "moved"))
    for place in (first, second, moved):
        shutil.copytree(models / "tiny", place)
    weights = load_file(second / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 1.01
    save_file(weights, second / "model.safetensors", metadata={"format": "pt"})
    for name, model in (("first", first), ("second", second), ("moved", moved)):
        with offloading(model, kvcore({"storage": {"plugin": "disk", "path": f"{folder}/kv"}})) as (e, _):
            out[name], out[name + "_cached"] = e.one(LONG)
    return out


def tier_tenants(models: Path, folder: str) -> dict[str, Any]:
    """What one tenant has stored, and what others find of it."""
    out: dict[str, Any] = {}
    entry = kvcore({"storage": {"plugin": "disk", "path": folder}})
    for name, asks in (("first", ["a"]), ("others", ["\n", "b"]), ("again", ["a"])):
        with offloading(models / "tiny", entry) as (e, tier):
            for tenant in asks:
                out[name], out[name + "_cached"] = e.one(LONG, transfer={"tenant": tenant})
                e.forget(connector=True)  # vLLM's own CPU tier knows no tenants
            e.one([5, 6, 7], 1)
            out[name + "_refused"] = counts(e).get("refused_tenants", 0)
            out[name + "_explained"] = explained(tier.store, "a"), explained(tier.store, "a", salt="s")
    return out


def explained(store: Any, tenant: str, **more: str) -> int:
    """How many chunks of the prompt `kvcore explain --prompt` finds for this tenant; -1 where it has none."""
    try:
        (said,) = explain_prompt(store, Question(tokens=LONG, tenant=tenant, **more)).explanations
    except ConfigError:
        return -1
    return said.found.chunks


def tier_served(models: Path, folder: str) -> dict[str, Any]:
    """Over `kvcore serve`: a second engine, while the server is there, while it is not, and when it is back."""
    out: dict[str, Any] = {}
    config = {"l1": {"size": "64MiB"}, "l2": [{"storage": {"plugin": "disk", "path": folder}}], "lookup_timeout": "20s"}
    with server(**config) as served:
        entry = {"type": "kvcore", "kvcore.server": served.url}
        with served:
            for name in ("first", "second"):
                with offloading(models / "tiny", entry) as (e, tier):
                    wait_for_server(tier.store)
                    out[name], out[name + "_cached"] = e.run([LONG, *PROMPTS])
                    out[name + "_faults"] = tier.faults
        with offloading(models / "tiny", entry) as (e, tier):
            out["away"], out["away_cached"] = e.run([LONG, *PROMPTS])
            e.forget(connector=True)
            with served:
                wait_for_server(tier.store)
                out["back"], _ = e.run([LONG, *PROMPTS])
                out["back_faults"] = tier.faults
    return out


def wait_for_server(store: Any) -> None:
    """Until the store is connected."""
    until = time.monotonic() + 60
    while not store.tiers:
        assert time.monotonic() < until
        time.sleep(0.02)


def tier_refused(models: Path) -> dict[str, Any]:
    """Configurations that must stop the start; the error's text of each."""
    out: dict[str, Any] = {}
    memory = {"storage": "memory"}
    for name, entry, settings in (
        ("connectors", kvcore(memory, **{"kvcore.load": "sync"}), {}),
        ("no_tier", kvcore(), {}),
        ("unknown_plugin", kvcore({"storage": "nonesuch"}), {}),
        ("lora", kvcore(memory), {"enable_lora": True}),
    ):
        try:
            # vLLM leaves the file of its CPU tier behind when it does not start: let it be a small one
            with offloading(models / "tiny", entry, memory=16 * ROW, **settings):
                out[name] = "started"
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
        gc.collect()
    out["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("kvcore")]
    return out


def files(folder: str) -> list[Path]:
    """The objects that a disk storage holds."""
    return [p for p in Path(folder).rglob("*") if p.is_file() and p.stat().st_size > 64 << 10]


@contextmanager
def timed() -> Iterator[list[float]]:
    """Seconds that each call of vLLM's scheduler into a tier takes, while this lasts."""
    times: list[float] = []
    originals = {name: getattr(KVCoreTier, name) for name in _CALLS}

    def measure(call: Any) -> Any:
        def measured(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                times.append(time.perf_counter() - began)

        return measured

    for name, call in originals.items():
        setattr(KVCoreTier, name, measure(call))
    try:
        yield times
    finally:
        for name, call in originals.items():
            setattr(KVCoreTier, name, call)


def summary(times: list[float]) -> dict[str, float]:
    """How many calls there were, and how long 99 of 100 took at most."""
    return {"count": len(times), "p99_s": sorted(times)[len(times) * 99 // 100]}
