"""Small random models of each kind, and what tests do with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from kvcore_transformers import PrefixCache

SHARED: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FLAGS: dict[str, Any] = {"l1.size": "64MiB", "l2": [], "chunk_tokens": 32, "lookup_timeout": "20s"}


def gqa(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHARED, num_key_value_heads=2)).eval()


def sliding() -> Gemma3ForCausalLM:
    """Two layers in three see 64 tokens."""
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        **SHARED, num_key_value_heads=1, head_dim=32, sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def mla() -> DeepseekV3ForCausalLM:
    """Its cache holds a latent of 32 and a rotary key of 16, of one head."""
    torch.manual_seed(2)
    config = DeepseekV3Config(
        **SHARED, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=3,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).eval()


MODELS: dict[str, Callable[[], Any]] = {"gqa": gqa, "sliding": sliding, "mla": mla}


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    """[1, count] token ids, none of which is special."""
    return torch.randint(3, 512, (1, count), generator=torch.Generator().manual_seed(seed))


def plain(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the model says without a cache."""
    return model.generate(ids, **{"max_new_tokens": 12, "do_sample": False, **options})


def cached(cache: PrefixCache, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """The same with it."""
    return cache.generate(ids, **{"max_new_tokens": 12, "do_sample": False, **options})


def yaml(folder: Path, l2: str, wait: str = "20s") -> str:
    """A configuration file with these tiers, for which a lookup waits so long."""
    path = folder / "kvcore.yaml"
    path.write_text(f"l1: {{size: 64MiB}}\nchunk_tokens: 32\nlookup_timeout: {wait}\nl2: {l2}\n")
    return str(path)
