"""`kvcore bench engine` on a CPU: vLLM alone, with kvcore, with its own offloading, and with LMCache, in one run each.

    python benchmarks/engines.py --model DIR [--only WORKLOAD ...] [--out DIR]
        [--lmcache 'COMMAND WORDS' --lmcache-path DIR]

What it adds to the command is what a CPU needs: small workloads, all engines on one core, and a copy worker for vLLM's
own offloading, which has none for CPUs (`offload_on_cpu.py`). The engine's own KV memory holds a part of what each
workload asks for again, so that something is left for a cache behind it. LMCache joins when its command and a folder
with its package are given. Writes `WORKLOAD.json` and `.svg` to the folder, and prints a table in Markdown.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
WORKLOADS = {
    "long-doc-qa": "--documents 6 --length 3000 --questions 2 --output 32 --inflight 2",
    "multi-round-chat": "--users 6 --turns 3 --system 500 --history 1500 --question 50 --output 32 --qps 0.7",
    "shared-prefix": "--prefixes 6 --requests 4 --length 2400 --question 200 --output 16 --inflight 2",
}
VLLM = "--dtype bfloat16 --enforce-eager --max-model-len 4096 --num-gpu-blocks-override 72"
"""Blocks of 128 tokens: 9,216 tokens of the engine's own."""
CHUNK_TOKENS = 128
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 2 * GIB,
        "spec_name": "CpuOffloadingSpec",
        "spec_module_path": "offload_on_cpu",
        "secondary_tiers": [],
    },
}
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "0",  # left alone, vLLM binds its threads differently with and without a connector
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "LMCACHE_DISABLE_BANNER": "1",
}


def command(name: str, options: argparse.Namespace) -> list[str]:
    """`kvcore bench engine` with its words."""
    words = [sys.executable, "-m", "kvcore", "bench", "engine", name, *WORKLOADS[name].split(), "--json"]
    words += ["--vllm", str(options.model), "--memory", "2GiB", "--logs", str(options.out / "logs")]
    words += ["--plot", str(options.out / f"{name}.svg"), "--repeat", str(options.repeat)]
    words += ["--with", "plain", "--with", "kvcore", "--set", f"chunk_tokens={CHUNK_TOKENS}"]
    words += ["--with", f"offloading=--kv-transfer-config '{json.dumps(OFFLOADING)}'"]
    if options.lmcache:
        words += ["--with", "lmcache", "--lmcache", options.lmcache]
    return [*words, "--", *VLLM.split()]


def table(found: dict[str, Any]) -> str:
    """A row for each engine."""
    lines = [
        "| | TTFT first | TTFT again, p50 | p90 | p99 | ITL p50 | p99 | tokens/s | reused | us per reused token |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for subject in found["subjects"]:
        first, again, whole = subject["phases"]["first"], subject["phases"]["again"], subject["all"]
        times = [first["ttft_s"]["p50"], *(again["ttft_s"][p] for p in ("p50", "p90", "p99"))]
        cells = [f"{seconds:.2f} s" for seconds in times]
        cells += [f"{again['itl_s'][p] * 1000:.0f} ms" for p in ("p50", "p99")]
        cost = subject["cost"]["reused_us"]
        cells += [f"{whole['output_tokens_per_s']:.0f}", f"{again['reused_share']:.0%}", f"{cost:.0f}" if cost else ""]
        lines.append(f"| {subject['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    """The options of this script."""
    parser = argparse.ArgumentParser(description="kvcore bench engine on a CPU.")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--out", default=Path("build/engines"), type=Path)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeat", default=1, type=int)
    parser.add_argument("--lmcache", help="LMCache's command, and more words of its server")
    parser.add_argument("--lmcache-path", type=Path, help="a folder with the lmcache package, for the engine")
    return parser


def main() -> None:
    options = arguments().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    paths = [HERE, *([options.lmcache_path] if options.lmcache_path else [])]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    for name in options.only:
        done = subprocess.run(command(name, options), env=env, stdout=subprocess.PIPE, text=True, check=False)
        (options.out / f"{name}.json").write_text(done.stdout)
        if done.returncode:
            raise SystemExit(f"{name} failed: see {options.out / 'logs'}")
        print(f"\n{name} {WORKLOADS[name]}\n\n{table(json.loads(done.stdout))}", flush=True)


if __name__ == "__main__":
    main()
