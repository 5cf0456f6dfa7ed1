"""`kvcore plan` puts layers into groups as vLLM does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvcore_bench.plan.costs import weigh
from kvcore_bench.plan.model import read_model

HEADS, SIZE, BLOCK, WINDOW = 2, 64, 16, 128
CONFIG: Any = SimpleNamespace(
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC),
    speculative_config=None,
)
"""As much of vLLM's configuration as it looks at."""


@pytest.mark.parametrize(
    ("full", "windowed"), [(4, 0), (0, 4), (12, 12), (10, 52), (5, 29), (12, 13), (13, 12), (7, 10), (7, 11), (1, 3)]
)
def test_groups_are_those_of_vllm(full: int, windowed: int) -> None:
    kinds = ["full_attention"] * full + ["sliding_attention"] * windowed
    config = {
        "hidden_size": 256, "num_hidden_layers": full + windowed, "num_attention_heads": 4, "head_dim": SIZE,
        "num_key_value_heads": HEADS, "intermediate_size": 512, "layer_types": kinds, "sliding_window": WINDOW,
        "torch_dtype": "bfloat16", "max_position_embeddings": 4096,
    }  # fmt: skip
    ours = weigh(read_model(config), 1, BLOCK, "auto", 1 << 20).groups

    specs = {}
    for i, kind in enumerate(kinds):
        shape = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": torch.bfloat16}
        window = kind == "sliding_attention"
        specs[f"layer.{i}"] = (
            SlidingWindowSpec(**shape, sliding_window=WINDOW) if window else FullAttentionSpec(**shape)
        )
    theirs = get_kv_cache_groups(CONFIG, specs)

    assert sorted((g.layers, g.window) if g.window else (g.layers, 0) for g in ours) == sorted(
        (len(g.layer_names), getattr(g.kv_cache_spec, "sliding_window", None) or 0) for g in theirs
    )
    token = sum(len(g.layer_names) * g.kv_cache_spec.page_size_bytes // BLOCK for g in theirs)
    assert sum(g.token_bytes for g in ours) == token
