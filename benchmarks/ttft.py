"""Time to first token in real vLLM on a CPU: kvcore beside vLLM's own prefix cache, vLLM's own offloading and LMCache.

    python benchmarks/ttft.py --model DIR [--out DIR] [--prompts 3] [--tokens 6037] [--turns 2]
        [--only NAME ...]
        [--lmcache-server BIN --lmcache-path DIR]

Several prompts, each asked cold, hot, and hot in a new process with the page cache emptied. The engine computes on one
core everywhere, so that the rows can be compared. LMCache joins when its `lmcache` command and a folder that holds its
package are given (see benchmarks/README.md). Prints JSON.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "demo"))

from runs import counter, documents, forget_page_cache, kvcore_transfer, own_seconds, run_engine, say  # noqa: E402

LMCACHE_PORT, LMCACHE_HTTP = 7455, 7456


class Bench:
    """The prompts, and the rows measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out.resolve()
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        tokenizer, self.prompts = documents(options.model, options.tokens, options.prompts)
        warm_up = tokenizer("Good morning!", add_special_tokens=False)["input_ids"]
        model = str(options.model.resolve())
        self.job = {"model": model, "dtype": options.dtype, "max_tokens": 8, "warm_up": warm_up}
        self.rows: list[dict[str, Any]] = []

    def run(self, *resets: bool, transfer: Any, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
        """One engine process that asks each prompt `len(resets)` times."""
        steps = [{"prompt": p, "reset": r} for p in self.prompts for r in resets]
        return run_engine({**self.job, "steps": steps, "transfer": transfer}, self.out, env)

    def report(self, name: str, answers: list[dict[str, Any]]) -> None:
        """Add a row: median, least and most of the prompts."""
        times = [a["ttft_s"] for a in answers]
        row: dict[str, Any] = {"name": name, "ttft_s": round(statistics.median(times), 4)}
        row |= {"min_s": round(min(times), 4), "max_s": round(max(times), 4)}
        row["cached_tokens"] = [a["cached_tokens"] for a in answers]
        if any(own_seconds(a) for a in answers):
            row["own_s"] = [round(own_seconds(a), 4) for a in answers]
            row["load_s"] = [round(counter(a, "kvcore_load_seconds"), 4) for a in answers]
            row["idle_wait_s"] = [round(counter(a, "kvcore_idle_wait_seconds"), 4) for a in answers]
        self.rows.append(row)
        say(f"{name}: {row['ttft_s']:.3f} s")

    def memory_then_disk(
        self, name: str, transfer: Any, files: Path, env: dict[str, str] | None = None, between: Any = None
    ) -> None:
        """Cold and hot in one process, then hot in a new one."""
        for what, answers in self.in_turn(name, transfer, files, env, between).items():
            self.report(f"{name}.{what}", answers)

    def in_turn(
        self, name: str, transfer: Any, files: Path, env: dict[str, str] | None = None, between: Any = None
    ) -> dict[str, list[dict[str, Any]]]:
        """The answers of the same."""
        say(f"{name}: cold, then from host memory")
        answers = self.run(True, True, transfer=transfer, env=env)
        if between is not None:
            between()
        forget_page_cache(files)
        say(f"{name}: a new process, from disk")
        disk = self.run(True, transfer=transfer, env=env)
        return {"cold": answers[0::2], "hot_memory": answers[1::2], "hot_disk": disk}


def vllm(bench: Bench) -> None:
    say("vLLM alone: cold, then its own prefix cache")
    answers = bench.run(True, False, transfer=None)
    bench.report("vllm.cold", answers[0::2])
    bench.report("vllm.own_hit", answers[1::2])


def kvcore(bench: Bench, name: str = "kvcore", serde: str = "[]") -> None:
    cache, config = bench.out / name, bench.out / f"{name}.yaml"
    tier = f"  - storage: {{plugin: disk, path: {cache}, capacity: 8GiB}}\n    serde: {serde}\n"
    config.write_text(f"l1: {{size: 2GiB}}\nl2:\n{tier}")
    bench.memory_then_disk(name, kvcore_transfer({"config": str(config)}), cache)


def kvcore_zstd(bench: Bench) -> None:
    kvcore(bench, "kvcore_zstd", "[zstd]")


def offloading(bench: Bench) -> None:
    files = bench.out / "offload"
    tier = {"type": "fs", "root_dir": str(files), "n_read_threads": 2, "n_write_threads": 2}
    bench.memory_then_disk("vllm_offloading", offload_transfer(tier), files, OFFLOAD_ENV)


def tiering(bench: Bench) -> None:
    """Below vLLM's own CPU tier: its file tier and kvcore's. In turn, for the speed of a machine changes."""
    answers: dict[str, list[dict[str, Any]]] = {}
    for turn in range(bench.options.turns):
        fs, ours = bench.out / f"fs{turn}", bench.out / f"kvcore_tier{turn}"
        disk = {"storage": {"plugin": "disk", "path": str(ours), "capacity": "8GiB"}}
        for name, files, tier in (
            ("vllm_fs_tier", fs, {"type": "fs", "root_dir": str(fs)}),
            ("kvcore_tier", ours, {"type": "kvcore", "kvcore.l2": [disk]}),
        ):
            for what, found in bench.in_turn(name, offload_transfer(tier), files, OFFLOAD_ENV).items():
                answers.setdefault(f"{name}.{what}", []).extend(found)
            shutil.rmtree(files)
    for name, found in answers.items():
        bench.report(name, found)


OFFLOAD_ENV = {"PYTHONPATH": str(ROOT / "benchmarks")}


def offload_transfer(tier: dict[str, Any]) -> dict[str, Any]:
    """vLLM's offloading over one secondary tier."""
    extra = {
        "cpu_bytes_to_use": 1 << 30,
        "spec_name": "CpuOffloadingSpec",
        "spec_module_path": "offload_on_cpu",
        "secondary_tiers": [tier],
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def lmcache(bench: Bench) -> None:
    if not bench.options.lmcache_server:
        say("LMCache: left out, no --lmcache-server was given")
        return
    files = bench.out / "lmcache"
    files.mkdir()
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": LMCACHE_PORT}
    transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    env = {"PYTHONPATH": str(bench.options.lmcache_path), "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(lmcache_server(bench, files))

        def restart() -> None:
            stack.close()
            stack.enter_context(lmcache_server(bench, files))

        bench.memory_then_disk("lmcache", transfer, files, env, restart)


@contextlib.contextmanager
def lmcache_server(bench: Bench, files: Path) -> Iterator[None]:
    """LMCache's server with chunks of one vLLM block and its file adapter, on loopback."""
    adapter = json.dumps({"type": "fs", "base_path": str(files)})
    command = [bench.options.lmcache_server, "server", "--host", "127.0.0.1", "--port", str(LMCACHE_PORT)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(LMCACHE_HTTP), "--chunk-size", "128"]
    command += [
        "--l1-size-gb",
        "2",
        "--eviction-policy",
        "LRU",
        "--disable-observability",
        "--supported-transfer-mode",
        "engine_driven",
        "--shm-name",
        "kvcore_ttft",
        "--l2-adapter",
        adapter,
    ]
    env = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0", "LMCACHE_DISABLE_BANNER": "1"}
    with (bench.out / "lmcache.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        try:
            for _ in range(120):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{LMCACHE_HTTP}/healthcheck", timeout=1).close()
                    break
                time.sleep(0.5)
            else:
                raise SystemExit("LMCache's server did not become healthy")
            yield
        finally:
            process.terminate()
            process.wait(30)


PARTS: dict[str, Callable[[Bench], None]] = {
    "vllm": vllm,
    "kvcore": kvcore,
    "kvcore_zstd": kvcore_zstd,
    "offloading": offloading,
    "tiering": tiering,
    "lmcache": lmcache,
}


def main() -> None:
    arguments = argparse.ArgumentParser(description="Time to first token in real vLLM.")
    arguments.add_argument("--model", required=True, type=Path)
    arguments.add_argument("--out", default=Path("build/ttft"), type=Path)
    arguments.add_argument("--prompts", default=3, type=int)
    arguments.add_argument("--turns", default=2, type=int, help="of the rows that are measured in turn")
    arguments.add_argument("--tokens", default=6037, type=int)
    arguments.add_argument("--dtype", default="bfloat16")
    arguments.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    arguments.add_argument("--lmcache-server", help="LMCache's command in its own environment")
    arguments.add_argument("--lmcache-path", type=Path, help="a folder with the lmcache package, for the engine")
    options = arguments.parse_args()
    bench = Bench(options)
    for name in options.only:
        PARTS[name](bench)
    facts = {"cores": os.cpu_count(), "tokens": options.tokens, "dtype": options.dtype}
    print(json.dumps({**facts, "rows": bench.rows}, indent=1))


if __name__ == "__main__":
    main()
