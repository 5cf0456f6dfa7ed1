"""From the configuration of vLLM's offloading to kvcore's `ModelSpec`.

An object is one row of vLLM's CPU tier: a chunk of one group, of all workers one after the other. What is where in it
is vLLM's own affair; all that decides it stands in the namespace.
"""

import hashlib
import json
import os
from typing import Any

from kvcore.api import LayoutError
from kvcore.engine import GroupSpec, ModelSpec, weights_fingerprint
from kvcore_vllm import _compat, model_spec


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `LayoutError`, one sentence, for a model or a way of running it whose KV cannot be kept safely."""
    found = model_spec.unsafe(vllm_config)
    if vllm_config.lora_config is not None:
        found.append(
            "with enable_lora, vLLM's block hashes hold an adapter's name, not its weights, and a tier is not told "
            "which request has which adapter; use KVCoreConnector, which looks at the weights"
        )
    if vllm_config.parallel_config.nnodes > 1:
        found.append("the engine runs on several nodes, and vLLM's CPU tier is the memory of one")
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        if any(getattr(spec, "non_causal", False) for spec in model_spec.layer_specs(group.kv_cache_spec)):
            found.append(f"KV cache group {i} attends to later tokens, so a prefix's KV is not its own")
    if found:
        raise LayoutError(f"kvcore cannot keep this model's KV safely: {found[0]}")


def build_spec(offloading: Any, vllm_config: Any, kv_cache_config: Any) -> ModelSpec:
    """The identity of this model's rows. `offloading` is vLLM's `TieringOffloadingSpec`."""
    config, model = offloading.config, vllm_config.model_config
    parallel = config.parallel
    copies = 1 if offloading.replicated_layout else parallel.world_size
    row = int(offloading.cpu_page_size_per_worker)
    windows = model_spec.group_windows(kv_cache_config)
    specs = [s for g in kv_cache_config.kv_cache_groups for s in model_spec.layer_specs(g.kv_cache_spec)]
    return ModelSpec(
        engine="vllm",
        model=model_spec.model_name(model),
        weights=weights_fingerprint(_compat.weights_path(model), model.revision),
        dtype=model_spec.kv_dtype(kv_cache_config, vllm_config.cache_config),
        element_bytes=min((s.dtype.itemsize for s in specs if hasattr(s, "dtype")), default=1),
        layout=f"rows:{kv_cache_config.kv_cache_layout}",
        backend=_compat.attention_choice(vllm_config),
        isa=_compat.block_isa(vllm_config, [s for s in specs if hasattr(s, "head_size")]),
        block_tokens=config.groups[0].tokens_per_block * config.cache.blocks_per_chunk,
        ranks=copies,
        groups=tuple(GroupSpec(("row",), (row,), windows[g.group_id]) for g in config.groups),
        parallel={
            "tp": parallel.tp_size,
            "pp": parallel.pp_size,
            "pcp": parallel.pcp_size,
            "dcp": parallel.dcp_size,
            "world": parallel.world_size,
        },
        extra={
            **model_spec.computed_from(vllm_config),
            "groups": _digest(config.groups, kv_cache_config),
            "blocks_per_chunk": str(config.cache.blocks_per_chunk),
            "tokens_per_hash": str(config.cache.tokens_per_hash),
            "replicated": str(offloading.replicated_layout),
            "canonical": str(config.canonical_layout),
            "pp_partition": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
        },
    )


def _digest(groups: Any, kv_cache_config: Any) -> str:
    """Which layers each group has, and how vLLM describes their KV."""
    told = [
        (g.group_id, g.tokens_per_block, g.layer_names, repr(kv_cache_config.kv_cache_groups[g.group_id].kv_cache_spec))
        for g in groups
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]
