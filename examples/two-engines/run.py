"""Two vLLM engines share one cache, and neither they nor it need each other to live.

    python examples/two-engines/run.py --model DIR

A question about a long document is computed by the first engine; the second answers others about the same document
without computing it again. Then the first engine is killed, then the server, then the server comes back. Every answer
is compared to what vLLM says without kvcore.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / name) for name in ("common", "demo")]

from asking import ask  # noqa: E402
from runs import questions, say  # noqa: E402
from table import Line, table  # noqa: E402
from vllm_server import VllmServer, kvcore  # noqa: E402

from kvcore.testing.servers.kvcore import KVCoreServer  # noqa: E402

QUESTIONS = (
    "In one sentence, what is this handbook about?",
    "Which licence is quoted in the handbook?",
    "What is a lease, according to the handbook?",
)
PROMPT_TOKENS = 3000
CONFIG = {"l1": {"size": "1GiB"}, "l2": []}
OWN_CACHE_OFF = ["--no-enable-prefix-caching"]
"""Or one would not see which cache an answer comes from."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Two vLLM engines share one cache.")
    parser.add_argument("--model", required=True, type=Path, help="directory of the model")
    parser.add_argument("--out", default=Path("build/two-engines"), type=Path, help="where the logs go")
    options = parser.parse_args()
    out, model = options.out.resolve(), options.model.resolve()
    prompts, warm_up = questions(model, PROMPT_TOKENS, QUESTIONS)

    cache = KVCoreServer(out, CONFIG)

    def engine(name: str, transfer: Any = None) -> VllmServer:
        return VllmServer(out, name, model, transfer, arguments=OWN_CACHE_OFF)

    alone, a, b = engine("alone"), engine("engine-a", kvcore(cache.config)), engine("engine-b", kvcore(cache.config))
    with cache, alone, a, b:
        say("starting kvcore serve, two engines that use it, and one without, to compare")
        for server in (alone, a, b):
            server.wait()
            ask(server.url, warm_up, 4)
        expected = [ask(alone.url, p) for p in prompts]
        alone.stop()
        lines = [Line("vLLM alone: computed", answer, answer.text) for answer in expected]

        def on(server: VllmServer, question: int, what: str) -> None:
            lines.append(Line(what, ask(server.url, prompts[question]), expected[question].text))
            say(f"  {what}: {lines[-1].answer.first_s:.2f} s to the first token")

        on(a, 0, "engine A: computed, and stored for all")
        on(b, 1, "engine B, another question: reuses it")
        a.kill()
        on(b, 2, "engine A killed; engine B: reuses it still")
        cache.kill()
        on(b, 0, "the server killed; engine B: by itself")
        cache.start()
        with engine("engine-c", kvcore(cache.config)) as c:
            say("the server is back; a third engine starts")
            c.wait()
            ask(c.url, warm_up, 4)
            on(c, 0, "the server is back, empty; engine C: computed")
            on(b, 1, "engine B again: reuses it")
        hits = cache.metrics().get("kvcore_hit_tokens_total", 0.0)

    print()
    print(table(lines))
    print(f"\nThe server that came back has served {hits:.0f} tokens. Its log and the engines': {out}")
    faults = [f"{line.what}: the answer differs from vLLM's own" for line in lines if not line.same]
    faults += [
        f"{line.what}: only {line.answer.cached} tokens were reused"
        for line in lines
        if "reuses" in line.what and line.answer.cached < line.answer.prompt * 9 // 10
    ]
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    if not faults:
        print("Every answer is the same as vLLM's own.")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
