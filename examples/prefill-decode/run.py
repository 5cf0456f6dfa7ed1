"""Prefill and decode on two vLLM engines, with a router before them.

    python examples/prefill-decode/run.py --model DIR [--over server|disk]

The one engine computes prompts and stores their KV; the other starts from it and decodes. They share a kvcore server,
or without one a directory. Every answer is compared to that of a single vLLM without kvcore.
"""

import argparse
import shutil
import sys
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "examples" / name) for name in ("common", "demo")]

from asking import Answer, ask  # noqa: E402
from runs import documents, say  # noqa: E402
from table import Line, table  # noqa: E402
from vllm_server import VllmServer, kvcore  # noqa: E402

from kvcore.testing.servers import Server, free_port  # noqa: E402
from kvcore.testing.servers.kvcore import KVCoreServer  # noqa: E402

PROMPT_TOKENS = 2500
PROMPTS = 3


class Router(Server):
    """The proxy, as a process."""

    def __init__(self, folder: Path, prefill: str, decode: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        command = [sys.executable, str(HERE / "proxy.py"), str(port), prefill, decode]
        super().__init__("router", command, ready=self._healthy, folder=folder)

    def _healthy(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        finally:
            connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Prefill and decode on two vLLM engines.")
    parser.add_argument("--model", required=True, type=Path, help="directory of the model")
    parser.add_argument("--over", choices=("server", "disk"), default="server", help="how the KV gets across")
    parser.add_argument("--out", default=Path("build/prefill-decode"), type=Path, help="where the logs go")
    options = parser.parse_args()
    out, model = options.out.resolve(), options.model.resolve()
    tokenizer, prompts = documents(model, PROMPT_TOKENS, PROMPTS + 1)
    warm_up = tokenizer("Good morning!", add_special_tokens=False)["input_ids"]

    with ExitStack() as stack:
        if options.over == "server":
            config = stack.enter_context(KVCoreServer(out, {"l1": {"size": "1GiB"}, "l2": []})).config
        else:
            config = shared_directory(out)
        prefill = stack.enter_context(VllmServer(out, "prefill", model, kvcore(config, "kv_producer")))
        decode = stack.enter_context(VllmServer(out, "decode", model, kvcore(config, "kv_consumer")))
        say("starting an engine that computes prompts, and one that decodes")
        for engine in (prefill, decode):
            engine.wait()
            ask(engine.url, warm_up, 4)
        router = stack.enter_context(Router(out, prefill.url, decode.url))
        routed: list[tuple[int, str, Answer]] = []

        def through_the_router(i: int, what: str) -> None:
            routed.append((i, what, ask(router.url, prompts[i - 1])))
            say(f"  prompt {i}: {routed[-1][2].first_s:.2f} s to the first token")

        for i in range(1, PROMPTS + 1):
            through_the_router(i, "prefill and decode")
        prefill.kill()
        say("the engine that computes prompts is killed: the other one does it all")
        through_the_router(PROMPTS + 1, "prefill killed")
        router.stop()
        decode.stop()
        say("one engine that does both, to compare")
        alone = stack.enter_context(VllmServer(out, "alone", model))  # only now: of three at once memory may run out
        alone.wait()
        ask(alone.url, warm_up, 4)
        expected = [ask(alone.url, prompt) for prompt in prompts]

    lines = [Line(f"one vLLM, prompt {i}", answer, answer.text) for i, answer in enumerate(expected, 1)]
    lines += [Line(f"{what}, prompt {i}", answer, expected[i - 1].text) for i, what, answer in routed]
    print()
    print(table(lines))
    print(f"\nThe engines' logs: {out}")
    faults = [f"{line.what}: the answer differs from vLLM's own" for line in lines if not line.same]
    handed = [line for line in lines if line.what.startswith("prefill and decode")]
    faults += [
        f"{line.what}: the engine that decodes computed {line.answer.prompt - line.answer.cached} tokens of the prompt"
        for line in handed
        if line.answer.cached < line.answer.prompt * 9 // 10
    ]
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    if not faults:
        print("Every answer is the same as that of one engine.")
    return int(bool(faults))


def shared_directory(out: Path) -> Path:
    """A configuration with a directory that both engines use, each with memory of its own."""
    folder = out / "kv"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tier = {"storage": {"plugin": "disk", "path": str(folder), "capacity": "4GiB"}, "read": "always"}
    config = out / "disk.yaml"
    config.write_text(yaml.safe_dump({"l1": {"size": "512MiB"}, "l2": [tier]}))
    return config


if __name__ == "__main__":
    sys.exit(main())
