"""Two real vLLM engines with kvcore behind a router: the same load by turns, and by prefix. Prints both hit rates.

    python examples/prefix-router/run.py --model DIR

Several documents, several questions on each, in random order. All documents together are more than one engine's caches
hold, and less than both hold: by turns both engines need all of them; by prefix each keeps its half.
"""

import argparse
import json
import random
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / name) for name in ("common", "demo")]

from asking import Answer, ask  # noqa: E402
from runs import say  # noqa: E402
from vllm_server import VllmServer  # noqa: E402

from kvcore.testing.servers import Server, free_port  # noqa: E402

CLIENTS = 3
BLOCK = 128
QUESTION_TOKENS = 60
ANSWER_TOKENS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description="Hit rate of prefix routing against round robin.")
    parser.add_argument("--model", required=True, type=Path, help="directory of the model")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--document-tokens", type=int, default=768, help=f"a multiple of {BLOCK}")
    parser.add_argument("--questions", type=int, default=6, help="on each document")
    parser.add_argument("--out", default=Path("build/prefix-router"), type=Path, help="where logs and result go")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((options.model / "config.json").read_text())
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        sockets = stack.enter_context(TemporaryDirectory(prefix="kv"))  # a short path, as sockets need
        say("starting two engines, each with a small cache of its own")
        engines = [PublishingEngine(out, sockets, options, config, number) for number in range(2)]
        for engine in engines:
            stack.enter_context(engine)
        for engine in engines:
            engine.wait()
        for seed, policy in enumerate(("round-robin", "prefix")):
            say(f"{options.documents} documents, {options.questions} questions on each, {policy}")
            with Router(out, engines, policy) as router:
                results[policy] = load(router.url, options, config["vocab_size"], seed)
                results[policy]["requests"] = [e["requests"] for e in router.status()["engines"]]
    print(f"\n{'policy':<12}  {'hit rate':>8}  {'first token, mean':>17}  {'p90':>7}  requests by engine")
    for policy, r in results.items():
        requests = ", ".join(map(str, r["requests"]))
        print(f"{policy:<12}  {r['hit_rate']:>8.1%}  {r['mean_s']:>15.2f} s  {r['p90_s']:>5.2f} s  {requests}")
    (out / "result.json").write_text(json.dumps(results, indent=1))
    return 0 if results["prefix"]["hit_rate"] > results["round-robin"]["hit_rate"] else 1


class PublishingEngine(VllmServer):
    """An engine with kvcore that publishes its KV events. Its caches are small, so that where a prompt goes matters."""

    def __init__(self, out: Path, sockets: str, options: Any, config: Any, number: int) -> None:
        self.events, self.replay = (f"ipc://{sockets}/{number}.{what}" for what in ("events", "replay"))
        documents_kib = kv_bytes(config) * options.document_tokens * options.documents // 1024
        transfer = {
            "kv_connector": "KVCoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kvcore.l1.size": f"{documents_kib * 5 // 8 + 1024}KiB", "kvcore.l2": []},
        }
        publish = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events,
            "replay_endpoint": self.replay,
        }
        blocks = CLIENTS * (options.document_tokens // BLOCK + 1) + 2
        arguments = ["--kv-events-config", json.dumps(publish), "--block-size", str(BLOCK)]
        arguments += ["--max-model-len", str(options.document_tokens + BLOCK), "--num-gpu-blocks-override", str(blocks)]
        core = {"VLLM_CPU_OMP_THREADS_BIND": str(number)}
        super().__init__(out, f"engine-{number}", options.model, transfer, arguments=arguments, env=core)


class Router(Server):
    """`router.py` before these engines."""

    def __init__(self, out: Path, engines: Sequence[PublishingEngine], policy: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        script = Path(__file__).with_name("router.py")
        command: list[str | Path] = [sys.executable, script, "--port", str(port), "--policy", policy]
        for engine in engines:
            command += ["--engine", f"{engine.url},{engine.events},{engine.replay}"]
        super().__init__(f"router-{policy}", command, ready=self._answers_status, folder=out)

    def status(self) -> Any:
        """What it knows."""
        with urllib.request.urlopen(f"{self.url}/status", timeout=5) as answer:
            return json.load(answer)

    def _answers_status(self) -> bool:
        try:
            return bool(self.status())
        except OSError:
            return False


def load(url: str, options: Any, vocabulary: int, seed: int) -> dict[str, Any]:
    """All questions, `CLIENTS` at a time. Prompts of another seed share nothing."""
    rng = random.Random(seed)
    words = range(100, vocabulary)
    documents = [rng.choices(words, k=options.document_tokens) for _ in range(options.documents)]
    prompts = [d + rng.choices(words, k=QUESTION_TOKENS) for d in documents for _ in range(options.questions)]
    rng.shuffle(prompts)
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers: list[Answer] = list(clients.map(lambda p: ask(url, p, ANSWER_TOKENS), prompts))
    firsts = sorted(answer.first_s for answer in answers)
    return {
        "hit_rate": sum(a.cached for a in answers) / sum(a.prompt for a in answers),
        "mean_s": sum(firsts) / len(firsts),
        "p90_s": firsts[int(0.9 * len(firsts))],
    }


def kv_bytes(config: Any) -> int:
    """Bytes of one token's KV in float32."""
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * width * 4)


if __name__ == "__main__":
    sys.exit(main())
