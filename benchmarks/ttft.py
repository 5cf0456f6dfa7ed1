"""Time to first token in real vLLM on a CPU: kvcore beside vLLM's own prefix cache and vLLM's own offloading.

    python benchmarks/ttft.py --model DIR [--out DIR] [--prompts 3] [--tokens 6000]

Several prompts, each asked cold, hot, and hot in a new process with the page cache emptied. Everything runs on one core
of the engine in every process, so that the rows can be compared. Prints JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "demo"))

from runs import counter, documents, forget_page_cache, kvcore_transfer, own_seconds, run_engine, say  # noqa: E402


def main() -> None:
    arguments = argparse.ArgumentParser(description="Time to first token in real vLLM.")
    arguments.add_argument("--model", required=True, type=Path)
    arguments.add_argument("--out", default=Path("build/ttft"), type=Path)
    arguments.add_argument("--prompts", default=3, type=int)
    arguments.add_argument("--tokens", default=6000, type=int)
    arguments.add_argument("--dtype", default="bfloat16")
    arguments.add_argument("--no-offloading", action="store_true", help="leave vLLM's own offloading out")
    options = arguments.parse_args()
    out: Path = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    tokenizer, prompts = documents(options.model, options.tokens, options.prompts)
    warm_up = tokenizer("Good morning!", add_special_tokens=False)["input_ids"]
    job = {"model": str(options.model.resolve()), "dtype": options.dtype, "max_tokens": 8, "warm_up": warm_up}

    def steps(*resets: bool) -> list[dict[str, Any]]:
        return [{"prompt": p, "reset": r} for p in prompts for r in resets]

    rows: list[dict[str, Any]] = []

    def report(name: str, answers: list[dict[str, Any]]) -> None:
        times = [a["ttft_s"] for a in answers]
        rows.append(
            {
                "name": name,
                "ttft_s": round(statistics.median(times), 4),
                "min_s": round(min(times), 4),
                "max_s": round(max(times), 4),
                "cached_tokens": [a["cached_tokens"] for a in answers],
                "own_s": [round(own_seconds(a), 4) for a in answers],
                "load_s": [round(counter(a, "kvcore_load_seconds"), 4) for a in answers],
                "idle_wait_s": [round(counter(a, "kvcore_idle_wait_seconds"), 4) for a in answers],
            }
        )
        say(f"{name}: {rows[-1]['ttft_s']:.3f} s")

    say("vLLM alone: cold, then its own prefix cache")
    answers = run_engine({**job, "steps": steps(True, False), "transfer": None}, out)
    report("vllm.cold", answers[0::2])
    report("vllm.own_hit", answers[1::2])

    for name, serde in (("kvcore", "[]"), ("kvcore_zstd", "[zstd]")):
        cache = out / name
        config = out / f"{name}.yaml"
        config.write_text(
            f"l1: {{size: 2GiB}}\nl2:\n  - storage: {{plugin: disk, path: {cache}, capacity: 8GiB}}\n    serde: {serde}\n"
        )
        transfer = kvcore_transfer({"config": str(config)})
        say(f"{name}: cold, then from host memory")
        answers = run_engine({**job, "steps": steps(True, True), "transfer": transfer}, out)
        report(f"{name}.cold", answers[0::2])
        report(f"{name}.hot_memory", answers[1::2])
        forget_page_cache(cache)
        say(f"{name}: a new process, from disk")
        answers = run_engine({**job, "steps": steps(True), "transfer": transfer}, out)
        report(f"{name}.hot_disk", answers)

    if not options.no_offloading:
        files = out / "offload"
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 1 << 30,
                "spec_name": "CpuOffloadingSpec",
                "spec_module_path": "offload_on_cpu",
                "secondary_tiers": [{"type": "fs", "root_dir": str(files), "n_read_threads": 2, "n_write_threads": 2}],
            },
        }
        env = {"PYTHONPATH": str(ROOT / "benchmarks")}
        say("vLLM's own offloading: cold, then from host memory")
        answers = run_engine({**job, "steps": steps(True, True), "transfer": transfer}, out, env)
        report("vllm_offloading.cold", answers[0::2])
        report("vllm_offloading.hot_memory", answers[1::2])
        forget_page_cache(files)
        say("vLLM's own offloading: a new process, from its file tier")
        report("vllm_offloading.hot_disk", run_engine({**job, "steps": steps(True), "transfer": transfer}, out, env))

    print(
        json.dumps({"cores": os.cpu_count(), "tokens": options.tokens, "dtype": options.dtype, "rows": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
