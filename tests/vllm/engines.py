"""Real vLLM engines, in this process, for the scenarios. Imported by `scenarios.py` only, never by pytest."""

import gc
import json
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from vllm import LLM, SamplingParams, TokensPrompt

BLOCK = 128
OPTIONS = {"kvcore.l1.size": "256MiB", "kvcore.min_object_size": "64KiB", "kvcore.l2": []}
Prompt = list[int]
"""Token ids. Where a prompt has images too, it is vLLM's own `TokensPrompt`."""
Text = tuple[list[int], float]
"""Token ids, and the sum of their log probabilities: with a random model the tokens alone are a weak witness."""


# vLLM collects garbage some ten times for each engine, and has all that was imported looked at each time. There is none
# in it.
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None


class Engine:
    """One engine. `extra` are kvcore's options, all of them when they name a file; None runs vLLM without kvcore."""

    def __init__(
        self,
        model: str,
        extra: dict[str, Any] | None,
        *,
        connector: str = "KVCoreConnector",
        role: str = "kv_both",
        **kwargs: Any,
    ) -> None:
        transfer = None
        if extra is not None:
            options = extra
            if connector == "KVCoreConnector" and "kvcore.config" not in extra:
                options = {**OPTIONS, **extra}
                # Models this small are often computed sooner than a busy machine reads.
                options["kvcore.l2"] = [{"read": "always", **tier} for tier in options["kvcore.l2"]]
            transfer = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": options}
        settings = {
            "dtype": "float32",
            "max_model_len": 2048,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 16,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 128 << 20,
            "seed": 0,
            "disable_log_stats": False,
            **kwargs,
        }
        self.llm = LLM(model=model, kv_transfer_config=transfer, **settings)
        self.answered: list[dict[str, Any] | None] = []

    def run(
        self,
        prompts: "Sequence[Prompt | TokensPrompt]",
        max_tokens: int = 16,
        *,
        salt: str | None = None,
        adapter: Path | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> tuple[list[Text], list[int]]:
        """Greedy text and the number of cached tokens, per prompt. `transfer` is what a router would send along as
        `kv_transfer_params`; what it would get back stands in `answered` afterwards."""
        more = {"extra_args": {"kv_transfer_params": transfer}} if transfer is not None else {}
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, **more)
        given = [TokensPrompt(prompt_token_ids=p) if isinstance(p, list) else p for p in prompts]
        tokens = [TokensPrompt(**p, cache_salt=salt) if salt else p for p in given]
        lora = LoRARequest("adapter", 1, str(adapter)) if adapter else None
        outputs = self.llm.generate(tokens, params, use_tqdm=False, lora_request=lora)
        assert all(o.outputs[0].finish_reason == "length" for o in outputs), [o.outputs[0] for o in outputs]
        self.answered = [o.kv_transfer_params for o in outputs]
        texts = [(list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]
        return texts, [o.num_cached_tokens for o in outputs]

    def one(self, prompt: "Prompt | TokensPrompt", max_tokens: int = 16, **kwargs: Any) -> tuple[Text, int]:
        """The same for one prompt."""
        (text,), (cached,) = self.run([prompt], max_tokens, **kwargs)
        return text, cached

    def forget(self, *, connector: bool = False) -> None:
        """Empty vLLM's own prefix cache (and kvcore's, with `connector`)."""
        until = time.monotonic() + 10
        while not self.llm.reset_prefix_cache(reset_connector=connector):
            # Blocks of an asynchronous save come back with the next step.
            assert time.monotonic() < until, "blocks are still held"
            self.one([5, 6, 7], 1)

    @property
    def core(self) -> Any:
        """vLLM's scheduler, in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def half(self) -> Any:
        """The connector's scheduler half."""
        return self.core.connector.scheduler

    def settle(self) -> None:
        """Step until nothing is under way."""
        until = time.monotonic() + 20
        while self.core.has_requests():
            assert time.monotonic() < until
            self.llm.llm_engine.step()

    def leaks(self) -> dict[str, float]:
        """What the cache still holds for requests; all zero when no request runs."""
        half = self.half
        half.engine.drain()
        usage = half.engine.l1.usage()
        return {
            "leases": usage["leases"],
            "staging": usage["staging"],
            "quarantined": usage["quarantined"],
            "plans": len(half._load_plans) + len(half._save_plans) + len(half.engine._plans),
            "requests": len(half._requests) + len(half._waiting),
        }

    def stat(self, prefix: str) -> float:
        """Sum of the cache's numbers whose name begins so."""
        totals = {**self.half.engine.stats(), **self.half._counts, **self.half._handover.counts}
        return sum(v for k, v in totals.items() if k.startswith(prefix))

    def faults(self) -> dict[str, int]:
        """Faults that the guards of both halves have caught."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return {**self.half.faults, **get_kv_transfer_group().worker.faults}

    def close(self) -> None:
        """Shut down as vLLM does."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


@contextmanager
def engine(model: str, extra: dict[str, Any] | None, **kwargs: Any) -> Iterator[Engine]:
    """An engine for the time of a block. Afterwards no thread and no arena of kvcore is left in this process."""
    made = Engine(model, extra, **kwargs)
    try:
        yield made
    finally:
        made.close()
    until = time.monotonic() + 5  # a storage call that hangs holds its thread until it returns
    while (threads := kvcore_threads()) and time.monotonic() < until:
        time.sleep(0.1)
    arenas = [f for f in Path("/proc/self/fd").iterdir() if f.is_symlink() and "kvcore" in str(f.readlink())]
    assert not threads, threads
    assert not arenas, arenas


def fork_ranks() -> None:
    """Have vLLM fork its other processes from now on, as on GPUs: on a CPU each of them imports all of it again."""
    forking = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forking  # type: ignore[assignment]


def kvcore_threads() -> list[str]:
    """Names of kvcore's threads in this process."""
    return [t.name for t in threading.enumerate() if t.name.startswith("kvcore")]


def tokens(seed: int, count: int) -> Prompt:
    """Random token ids that every test model knows."""
    rnd = random.Random(seed)
    return [rnd.randrange(3, 1000) for _ in range(count)]


def crowd(count: int = 40) -> list[Prompt]:
    """Requests that share parts of one prefix, of up to 1,100 tokens."""
    rnd = random.Random(3)
    shared = tokens(4, 600)
    return [shared[: rnd.randrange(600)] + tokens(100 + i, rnd.randrange(5, 500)) for i in range(count)]


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A LoRA adapter of random weights for the attention of `tiny`."""
    config = json.loads((model / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["head_dim"]
    random_numbers = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in (("q_proj", config["num_attention_heads"]), ("v_proj", config["num_key_value_heads"])):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, hidden, generator=random_numbers) * 0.1
            weights[f"{prefix}.lora_B.weight"] = torch.randn(heads * dim, 8, generator=random_numbers) * 0.1
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))
    return folder
