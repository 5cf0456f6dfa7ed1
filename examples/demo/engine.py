"""One real vLLM engine process: asks prompts one after another and reports each answer as a JSON line.

    python engine.py JOB.json

The job names the model, vLLM's `kv_transfer_config` (or null), the output file, and the steps: each a prompt (ids)
and whether vLLM's own prefix cache is emptied before it.
"""

import json
import os
import sys
import time
from pathlib import Path

# Everyone computes on the same one core: left alone, vLLM binds its threads differently with and without a connector.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams, TokensPrompt

    began = time.perf_counter()
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=8192,
        enforce_eager=True,
        seed=0,
        kv_transfer_config=job["transfer"],
        disable_log_stats=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    warm_up = TokensPrompt(prompt_token_ids=job["warm_up"])
    with Path(job["out"]).open("w") as out:
        print(json.dumps({"ready_s": time.perf_counter() - began}), file=out)
        # Whatever an engine does once at its first request must not be counted as anyone's time to first token.
        llm.generate([warm_up], sampling, use_tqdm=False)
        for step in job["steps"]:
            while step["reset"] and not llm.reset_prefix_cache():
                llm.generate([warm_up], SamplingParams(max_tokens=2), use_tqdm=False)
            before = counters()
            result = llm.generate([TokensPrompt(prompt_token_ids=step["prompt"])], sampling, use_tqdm=False)[0]
            time.sleep(1.1)  # the connector reports its numbers once a second, with a step
            llm.generate([warm_up], SamplingParams(max_tokens=2), use_tqdm=False)
            after = counters()
            answer = {
                "ttft_s": result.metrics.first_token_latency,
                "cached_tokens": result.num_cached_tokens,
                "token_ids": list(result.outputs[0].token_ids),
                "text": result.outputs[0].text,
                "counters": {k: v - before.get(k, 0.0) for k, v in after.items() if v != before.get(k, 0.0)},
            }
            print(json.dumps(answer), file=out, flush=True)


def counters() -> dict[str, float]:
    """kvcore's counters as vLLM reports them, labels in the name. Read from prometheus_client: vLLM's own
    `LLM.get_metrics` cuts them to whole numbers."""
    from prometheus_client import REGISTRY

    own = ("model_name", "engine", "engine_index")
    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if "kvcore" in sample.name and not sample.name.endswith("_created"):
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in own)
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


if __name__ == "__main__":
    main()
