"""Two real vLLM engines with kvcore behind a router: the same load by turns, and by prefix. Prints both hit rates.

    python run.py --model DIR

Several documents, several questions on each, in random order. All documents together are more than one engine's cache
holds, and less than both hold: by turns both engines need all of them; by prefix each keeps its half.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from kvcore.testing.servers import free_port

HERE = Path(__file__).resolve().parent
CLIENTS = 3
BLOCK = 128
SUFFIX_TOKENS = 60
READY_S = 240
OURS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Hit rate of prefix routing against round robin.")
    parser.add_argument("--model", required=True, type=Path, help="directory of the model")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--document-tokens", type=int, default=768, help=f"a multiple of {BLOCK}")
    parser.add_argument("--questions", type=int, default=6, help="on each document")
    parser.add_argument("--answer-tokens", type=int, default=8)
    parser.add_argument("--out", type=Path, help="where the result goes as JSON")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-")))
        say(f"starting two engines with {options.model.name}")
        engines = [stack.enter_context(engine(options, folder, i)) for i in range(2)]
        for given in engines:
            wait_for(given.split(",")[0] + "/health", folder)
        results = {}
        for seed, policy in enumerate(("round-robin", "prefix"), 1):
            say(f"{options.documents} documents, {options.questions} questions on each, {policy}")
            with router(engines, policy, folder) as url:
                wait_for(url + "/status", folder)
                results[policy] = asyncio.run(load(url, options, seed))
                results[policy]["requests"] = [e["requests"] for e in httpx.get(url + "/status").json()["engines"]]
    print()
    print(f"{'policy':<12}  {'hit rate':>8}  {'first token, mean':>18}  {'p90':>7}  requests by engine")
    for policy, r in results.items():
        requests = " ".join(map(str, r["requests"]))
        print(f"{policy:<12}  {r['hit_rate']:>8.1%}  {r['mean_s']:>16.2f} s  {r['p90_s']:>5.2f} s  {requests}")
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))
    return 0


async def load(url: str, options: Any, seed: int) -> dict[str, Any]:
    """All questions, `CLIENTS` at a time. Prompts of another seed share nothing."""
    rng = random.Random(seed)
    words = range(100, json.loads((options.model / "config.json").read_text())["vocab_size"])
    documents = [rng.choices(words, k=options.document_tokens) for _ in range(options.documents)]
    prompts = [d + rng.choices(words, k=SUFFIX_TOKENS) for d in documents for _ in range(options.questions)]
    rng.shuffle(prompts)
    waiting = iter(prompts)
    cached = total = 0
    firsts: list[float] = []

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal cached, total
        for prompt in waiting:
            body = {
                "model": "model", "prompt": prompt, "max_tokens": options.answer_tokens, "ignore_eos": True,
                "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            began, first = time.perf_counter(), 0.0
            async with http.stream("POST", url + "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    first = first or time.perf_counter() - began
                    said = json.loads(line.removeprefix("data: "))
                    if "error" in said:
                        raise RuntimeError(said["error"])
                    if usage := said.get("usage"):
                        cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                        total += usage["prompt_tokens"]
            firsts.append(first)

    async with httpx.AsyncClient(timeout=None) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    firsts.sort()
    return {
        "hit_rate": cached / total,
        "mean_s": sum(firsts) / len(firsts),
        "p90_s": firsts[int(0.9 * len(firsts))],
        "prompt_tokens": total,
        "cached_tokens": cached,
    }


@contextmanager
def engine(options: Any, folder: Path, number: int) -> Iterator[str]:
    """A vLLM server, as the router is told of it. Its caches are small, so that where a prompt goes matters."""
    port = free_port()
    events, replay = (f"ipc://{folder}/{number}.{what}" for what in ("events", "replay"))
    config = json.loads((options.model / "config.json").read_text())
    document_bytes = kv_bytes(config) * options.document_tokens
    transfer = {
        "kv_connector": "KVCoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvcore.l1.size": f"{document_bytes * options.documents * 5 // 8 // 1024 + 1024}KiB",
            "kvcore.l2": [],
        },
    }
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", options.model, "--served-model-name", "model", "--port", port, "--host", "127.0.0.1",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", 2048, "--block-size", BLOCK,
        "--num-gpu-blocks-override", CLIENTS * (options.document_tokens // BLOCK + 1) + 2,
        "--enable-prompt-tokens-details",
        "--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(publish),
    ]  # fmt: skip
    with process(
        command, folder / f"engine{number}.log", VLLM_CPU_OMP_THREADS_BIND=str(number % (os.cpu_count() or 1))
    ):
        yield f"http://127.0.0.1:{port},{events},{replay}"


@contextmanager
def router(engines: list[str], policy: str, folder: Path) -> Iterator[str]:
    """The router before these engines."""
    port = free_port()
    given = [part for e in engines for part in ("--engine", e)]
    with process(
        [sys.executable, HERE / "router.py", "--port", port, "--policy", policy, *given], folder / "router.log"
    ):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def process(command: list[Any], log: Path, **environment: str) -> Iterator[None]:
    """A process, and those that it starts, for the time of a block."""
    with log.open("w") as out:
        started = subprocess.Popen(
            list(map(str, command)),
            env={**OURS, **os.environ, **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def wait_for(url: str, folder: Path) -> None:
    """Until this URL answers. Ends the program with the logs' ends when it never does."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    for log in sorted(folder.glob("*.log")):
        print(f"{log.name}: {log.read_text()[-2000:]}", file=sys.stderr)
    sys.exit(f"{url} does not answer")


def kv_bytes(config: dict[str, Any]) -> int:
    """Bytes of one token's KV in float32."""
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * width * 4)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
