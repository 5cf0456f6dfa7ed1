"""Copies inside vLLM's steps on a CPU: whole, or layer by layer (`kvcore.layerwise`). One engine, both in turn.

    python benchmarks/layerwise.py --model DIR [--rounds 8] [--cores 0|0-1]

Time to first token of prompts that are loaded but for the last 21 or 512 tokens, and of new prompts, whose KV is saved
as it is computed. Prints a table in Markdown: median, least and most, in milliseconds.
"""

import argparse
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

LOADED = 6016
NEW = 1500


def main() -> None:
    arguments = argparse.ArgumentParser(description="Whole copies beside copies layer by layer.")
    arguments.add_argument("--model", required=True, type=Path)
    arguments.add_argument("--rounds", default=8, type=int)
    arguments.add_argument("--cores", default="0", help="of the engine, as VLLM_CPU_OMP_THREADS_BIND takes them")
    options = arguments.parse_args()
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": options.cores,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the mode is changed in the engine's process
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    engine = Engine(str(options.model))
    document = engine.tokens(LOADED)
    engine.ask(document + engine.tokens(21))
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(options.rounds + 1):  # the first is dropped
        for layers in (False, True):
            engine.layer_by_layer(layers)
            for name, prompt in (
                ("6,016 tokens loaded, 21 computed", document + engine.tokens(21)),
                ("6,016 tokens loaded, 512 computed", document + engine.tokens(512)),
                ("1,500 tokens computed and saved", engine.tokens(NEW)),
            ):
                engine.forget()
                times.setdefault((name, layers), []).append(engine.ask(prompt))
    print("| | whole | layer by layer | in turn |\n|---|--:|--:|--:|")
    for name in dict.fromkeys(name for name, _ in times):
        whole, pieces = times[name, False][1:], times[name, True][1:]
        ratio = statistics.median(b / a for a, b in zip(whole, pieces, strict=True))
        print(f"| {name} | {spread(whole)} | {spread(pieces)} | {ratio:.2f} |")


class Engine:
    """vLLM with kvcore, in this process."""

    def __init__(self, model: str) -> None:
        from vllm import LLM

        extra = {"kvcore.l1.size": "2GiB", "kvcore.l2": [], "kvcore.layerwise": "on"}
        transfer = {"kv_connector": "KVCoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        self._llm = LLM(model, dtype="bfloat16", max_model_len=8192, enforce_eager=True, kv_transfer_config=transfer)
        self._vocabulary = self._llm.model_config.get_vocab_size()
        self._random = random.Random(1)
        self.ask(self.tokens(300))

    def layer_by_layer(self, on: bool) -> None:
        """How copies are made from now on."""
        half: Any = self._llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
        half.modes = half.modes._replace(load_layers=on, save_layers=on)

    def tokens(self, count: int) -> list[int]:
        """A new text."""
        return [self._random.randrange(3, self._vocabulary) for _ in range(count)]

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        while not self._llm.reset_prefix_cache():
            self.ask([5, 6, 7])

    def ask(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        from vllm import SamplingParams, TokensPrompt

        began = time.perf_counter()
        self._llm.generate(TokensPrompt(prompt_token_ids=prompt), SamplingParams(max_tokens=1), use_tqdm=False)
        return time.perf_counter() - began


def spread(seconds: list[float]) -> str:
    """Median, least and most."""
    median, least, most = (1000 * f(seconds) for f in (statistics.median, min, max))
    return f"{median:.0f} ({least:.0f} to {most:.0f})"


if __name__ == "__main__":
    main()
