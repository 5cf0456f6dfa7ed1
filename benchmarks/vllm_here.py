"""vLLM with kvcore in a benchmark's own process, for what is switched meanwhile: `layerwise.py`, `record_cost.py`."""

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any


def add_arguments(arguments: argparse.ArgumentParser) -> None:
    """The options that say which model, and where it runs."""
    arguments.add_argument("--model", required=True, type=Path)
    arguments.add_argument("--cores", default="0", help="of the engine, as VLLM_CPU_OMP_THREADS_BIND takes them")


class Engine:
    """Has answered one request.

    Args:
        options: see `add_arguments`. extra: of `kv_connector_extra_config`, beside an L1 of 2 GiB without tiers.
    """

    def __init__(self, options: argparse.Namespace, **extra: Any) -> None:
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": options.cores,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        from vllm import LLM

        extra = {"kvcore.l1.size": "2GiB", "kvcore.l2": [], **extra}
        transfer = {"kv_connector": "KVCoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        self._llm = LLM(
            str(options.model), dtype="bfloat16", max_model_len=8192, enforce_eager=True, kv_transfer_config=transfer
        )
        self._vocabulary = self._llm.model_config.get_vocab_size()
        self._random = random.Random(1)
        self.half: Any = self._llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
        """kvcore's, of the scheduler."""
        self.ask(self.tokens(300))

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
