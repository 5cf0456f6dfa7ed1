"""Real SGLang engines for the scenarios. Imported by `scenarios.py` only, never by pytest."""

import json
import multiprocessing
import random
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from caches import BACKEND

import sglang
from kvcore.testing.servers import free_port

# SGLang's ranks are to be what this process is by then, instead of importing all of it again.
multiprocessing.set_start_method("fork", force=True)
multiprocessing.set_start_method = lambda method, force=False: None  # type: ignore[method-assign]

PAGE = 16
PATIENCE_S = 90.0
Text = tuple[list[int], float]
"""Token ids, and the sum of their log probabilities: with a random model the tokens alone are a weak witness."""


def backend_options(options: dict[str, Any], *, in_place: bool = True) -> str:
    """SGLang's `--hicache-storage-backend-extra-config`."""
    extra = {**BACKEND, "prefetch_threshold": PAGE, "kvcore.lookup_timeout": "20s", **options}
    return json.dumps({**extra, "interface_v1": 1} if in_place else extra)


class Engine:
    """One engine with kvcore behind its HiCache, or without one until `attach`."""

    def __init__(self, model: Path, options: dict[str, Any] | None, **kwargs: Any) -> None:
        storage: dict[str, Any] = {}
        if options is not None:
            storage = {"hicache_storage_backend": "dynamic"}
            storage["hicache_storage_backend_extra_config"] = backend_options(self._with_port(options))
        self.llm = sglang.Engine(
            model_path=str(model), device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
            grammar_backend="none", dtype="float32", mem_fraction_static=0.2, max_total_tokens=2048,
            max_running_requests=4, page_size=PAGE, log_level="info", skip_server_warmup=True, watchdog_timeout=600,
            disable_cuda_graph=True, random_seed=1, enable_hierarchical_cache=True, hicache_ratio=2.0,
            hicache_write_policy="write_through", hicache_storage_prefetch_policy="wait_complete",
            enable_cache_report=True, **storage, **kwargs,
        )  # fmt: skip

    def _with_port(self, options: dict[str, Any]) -> dict[str, Any]:
        self._port = free_port()
        return {"kvcore.metrics_port": self._port, **options}

    def run(self, prompts: Sequence[list[int]]) -> tuple[list[Text], list[int]]:
        """Greedy text, and how many tokens of it came from the storage, per prompt, one after another."""
        texts, loaded = [], []
        for prompt in prompts:
            answer = self.llm.generate(
                input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 8}, return_logprob=True
            )
            meta = answer["meta_info"]
            texts.append((answer["output_ids"], sum(item[0] for item in meta["output_token_logprobs"])))
            loaded.append((meta.get("cached_tokens_details") or {}).get("storage", 0))
        return texts, loaded

    def forget(self) -> None:
        """Empty SGLang's own two levels. It refuses while pages are on their way to the storage, so they are there
        afterwards."""
        until = time.monotonic() + PATIENCE_S
        while not self.llm.flush_cache().success:
            assert time.monotonic() < until, "something is still under way"
            time.sleep(0.05)

    def again(self, prompts: Sequence[list[int]]) -> tuple[list[Text], list[int]]:
        """`run` with nothing but the storage to find anything in."""
        self.forget()
        return self.run(prompts)

    def attach(self, options: dict[str, Any], *, in_place: bool = True, policy: str = "wait_complete") -> str:
        """Take another storage, in place of the one there is; SGLang's message, "" when it took it."""
        self.forget()
        manager, loop = self.llm.tokenizer_manager, self.llm.loop
        detached = loop.run_until_complete(manager.detach_hicache_storage())
        assert detached.success, detached.message
        extra = backend_options(self._with_port(options), in_place=in_place)
        attached = loop.run_until_complete(
            manager.attach_hicache_storage(
                "dynamic",
                hicache_storage_backend_extra_config_json=extra,
                hicache_storage_prefetch_policy=policy,
            )
        )
        return "" if attached.success else str(attached.message)

    def clear(self) -> None:
        """SGLang's own way to empty the storage."""
        assert self.llm.loop.run_until_complete(self.llm.tokenizer_manager.clear_hicache_storage()).success

    def numbers(self) -> dict[str, float]:
        """kvcore's, of the first rank."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if x and x[0] != "#")}

    def number(self, prefix: str, *parts: str) -> float:
        """Sum of those whose name begins so, and holds these."""
        return sum(v for k, v in self.numbers().items() if k.startswith(prefix) and all(p in k for p in parts))


@contextmanager
def engine(model: Path, options: dict[str, Any] | None, **kwargs: Any) -> Iterator[Engine]:
    """An engine for the time of a block."""
    made = Engine(model, options, **kwargs)
    try:
        yield made
    finally:
        made.llm.shutdown()


def tokens(seed: int, count: int) -> list[int]:
    """Random token ids that the test model knows."""
    rnd = random.Random(seed)
    return [rnd.randrange(3, 1000) for _ in range(count)]


PROMPTS = [tokens(1, 200), tokens(1, 96) + tokens(2, 60), tokens(3, 70)]
LOADED = [192, 48, 64]
"""Tokens that the storage gives back when they are run in this order: whole pages but the last token's. The first 96 of
the second prompt are those of the first, and on the device by then."""
PAGES = 20
"""How many different pages they and their answers have."""
