"""Scenarios without faults: what is reused, and that the text never changes. Run by `scenarios.py`."""

from pathlib import Path
from typing import Any

from engines import Engine, crowd, engine, make_adapter, tokens

from kvcore.explain.explain import explain_prompt, explain_request
from kvcore.explain.keys import chunk_hashes
from kvcore.explain.models import Question

SYNC = {"kvcore.load": "sync", "kvcore.save": "sync"}
ASYNC = {"kvcore.load": "async", "kvcore.save": "async"}
PROMPTS = [tokens(1, 549), tokens(2, 512), tokens(3, 60), tokens(4, 1500)]
LONG = tokens(5, 1500)
SHORT = tokens(6, 140)


def plain(models: Path, model: str = "tiny") -> dict[str, Any]:
    """vLLM without kvcore: what every other scenario's text is compared to."""
    made = Engine(str(models / model), None, enable_prefix_caching=False)
    texts: dict[str, Any] = {
        "prompts": made.run(PROMPTS)[0],
        "long": made.one(LONG)[0],
        "partial": made.one(LONG[:300] + tokens(7, 200))[0],
        "short": made.one(SHORT, 200)[0],
        "crowd": made.run(crowd(), 24)[0],
    }
    texts["turn"] = made.one(SHORT + texts["short"][0][:190])[0]
    made.close()
    return texts


def hot(models: Path, model: str = "tiny", extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """Cold, vLLM's own hit, hot, partial hits, a hit beyond vLLM's own, generated tokens, forgetting everything."""
    out: dict[str, Any] = {}
    with engine(str(models / model), extra or {}) as e:
        out["cold"], out["cold_cached"] = e.run(PROMPTS)
        out["own"], out["own_cached"] = e.run(PROMPTS)
        e.forget()
        out["hot"], out["hot_cached"] = e.run(PROMPTS)
        out["long"], out["long_cached"] = e.one(LONG)
        e.forget()
        out["partial"], out["partial_cached"] = e.one(LONG[:300] + tokens(7, 200))
        out["beyond"], out["beyond_cached"] = e.one(LONG)
        out["short"], _ = e.one(SHORT, 200)
        e.forget()
        out["turn"], out["turn_cached"] = e.one(SHORT + out["short"][0][:190])
        metrics = {}
        for metric in e.llm.get_metrics():
            labels = {k: v for k, v in metric.labels.items() if k in ("source", "state", "reason")}
            if hasattr(metric, "value"):
                metrics[metric.name + str(sorted(labels.values()))] = metric.value
        out["metrics"] = metrics
        out["record"] = [
            (d.asked.tokens, d.chunks, d.first, d.answer, d.broke, d.retrieved, d.stored, d.asked.ids)
            for d in e.half.engine.decisions.since()
        ]
        e.forget(connector=True)
        out["reset"], out["reset_cached"] = e.one(LONG)
        e.settle()
        out["leaks"], out["faults"] = e.leaks(), e.faults()
        out["chunk_tokens"] = e.half._spaces.of(None, "").chunk_tokens
    return out


def many(models: Path, model: str = "tiny", extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """40 requests at once in a paged cache of 40 blocks: preemptions, shared prefixes, three times over."""
    out: dict[str, Any] = {"rounds": [], "cached": []}
    with engine(str(models / model), extra or {}, num_gpu_blocks_override=40) as e:
        for _ in range(3):
            texts, cached = e.run(crowd(), 24)
            out["rounds"].append(texts)
            out["cached"].append(sum(cached))
            e.forget()
        out["preemptions"] = next(m.value for m in e.llm.get_metrics() if m.name == "vllm:num_preemptions")
        out["twice"] = e.stat("kvcore_stored_chunks_total")
        e.settle()
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


def aborts(models: Path, model: str = "tiny", extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """Requests aborted in the queue, while loading, while computing and while saving."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    out: dict[str, Any] = {}
    with engine(str(models / model), extra or {}, num_gpu_blocks_override=40) as e:
        e.one(LONG)
        e.forget()
        for steps in (0, 1, 2, 4, 8):
            names = [f"{steps}-{i}" for i in range(6)]
            for i, name in enumerate(names):
                prompt = LONG[: 700 + i] if i % 2 else tokens(50 + 10 * steps + i, 700)
                e.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
            for _ in range(steps):
                e.llm.llm_engine.step()
            e.llm.llm_engine.abort_request(names)
        e.settle()
        e.forget()
        out["long"], out["long_cached"] = e.one(LONG)
        e.settle()
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


def salts(models: Path, tokens_kept: bool = False, extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """The same tokens under another `cache_salt`, and what `kvcore explain` says of them."""
    out: dict[str, Any] = {}
    with engine(str(models / "tiny"), {"kvcore.inspect": {"tokens": tokens_kept}, **(extra or {})}) as e:
        e.one(LONG)
        for name, salt in (("a", "a"), ("again", "a"), ("b", "b"), ("none", None)):
            e.forget()
            out[name], out[name + "_cached"] = e.one(LONG, salt=salt)
        e.forget()
        e.one(LONG[:700] + tokens(8, 300))
        e.one(SHORT[:100])
        out["explained"] = explained(e)
        for name, salt in (("salted", "a"), ("plain", "")):
            asked = Question(tokens=LONG, model="tiny", salt=salt)
            (said,) = explain_prompt(e.half.engine, asked).explanations
            out[f"prompt_{name}"] = (said.found.chunks, said.chunks)
        out["named"] = named(e, LONG, "a") + named(e, LONG)
        out["kept"] = [d.asked.ids or d.ids for d in e.half.engine.decisions.since()]
    return out


def explained(e: Engine) -> list[Any]:
    """Of every request on record, in order: where and why its prefix ended, the token, the fields, tokens saved."""
    found = []
    for decision in e.half.engine.decisions.since():
        said = explain_request(e.half.engine, decision.asked.id).explanations[0]
        broke, near = said.broke, said.nearest
        why = (broke.reason, broke.chunk, [d.field for d in broke.differences]) if broke else None
        found.append((why, near.tokens if near else None, said.saved.tokens, said.tokens))
    return found


def named(e: Engine, prompt: list[int], salt: str = "", adapter: str = "") -> int:
    """For how many namespaces `kvcore explain --prompt` names the chunks of a prompt as vLLM has."""
    cache = e.half.engine
    seen = {d.namespace: list(d.hashes) for d in cache.decisions.since() if d.asked.tokens == len(prompt)}
    known = cache.identities.all()
    return sum(chunk_hashes(cache.manager, known[n], prompt, salt, adapter) == hashes for n, hashes in seen.items())


def adapters(models: Path, folder: str, extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """Two adapters that bear the same name, one after the other: vLLM's block hashes cannot tell them apart."""
    paths = {name: make_adapter(Path(folder) / name, models / "tiny", seed) for name, seed in (("x", 1), ("y", 2))}
    tier = {"storage": {"plugin": "slow"}}
    out: dict[str, Any] = {}
    for name, path, options in (
        ("plain_x", "x", None), ("plain_y", "y", None),
        ("cold_x", "x", extra or {}), ("cold_y", "y", extra or {}), ("hot_x", "x", extra or {}),
    ):  # fmt: skip
        options = options if options is None else {"kvcore.l2": [tier], **options}
        made = Engine(str(models / "tiny"), options, enable_lora=True, max_lora_rank=8)
        out[name], out[name + "_cached"] = made.one(LONG, adapter=paths[path])
        out[name + "_base"], out[name + "_base_cached"] = made.one(LONG)
        if options is not None:
            out[name + "_explained"] = explained(made)
            out[name + "_named"] = named(made, LONG, adapter=f"adapter={paths[path]}") + named(made, LONG)
        made.close()
    return out


def inside_multi_connector(models: Path) -> dict[str, Any]:
    """As the only child of vLLM's MultiConnector, which does not bring the workers' layouts at start."""
    out: dict[str, Any] = {}
    child = {"kv_connector": "KVCoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"kvcore.l2": []}}
    made = Engine(str(models / "tiny"), {"connectors": [child]}, connector="MultiConnector")
    made.one(PROMPTS[2])  # the first step brings the layouts
    out["recomputes"] = made.core.recompute_kv_load_failures
    out["cold"], _ = made.one(LONG)
    made.forget()
    out["hot"], out["cached"] = made.one(LONG)
    made.close()
    return out
