"""From vLLM's configuration to kvcore's `ModelSpec`; refuses at start what cannot be cached safely."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from kvcore.api import LayoutError
from kvcore.engine import GroupSpec, ModelSpec, weights_fingerprint
from kvcore_vllm import _compat, media
from kvcore_vllm.metadata import WorkerLayout

_IGNORED_IN_CONFIG = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `LayoutError`, one sentence, for a model or a way of running it whose KV cannot be cached safely."""
    for text in _obstacles(vllm_config, kv_cache_config):
        raise LayoutError(f"kvcore cannot cache this model safely: {text}")


def group_layers(kv_cache_config: Any) -> tuple[tuple[str, ...], ...]:
    """Layer names per KV cache group, in the order in which an object holds them."""
    return tuple(tuple(g.layer_names) for g in kv_cache_config.kv_cache_groups)


def group_windows(kv_cache_config: Any) -> tuple[int | None, ...]:
    """The sliding window of each group in tokens, or None for full attention."""
    return tuple(_window(g.kv_cache_spec) for g in kv_cache_config.kv_cache_groups)


def block_tokens(kv_cache_config: Any) -> int:
    """Tokens per block, the same for all groups."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def build_spec(
    vllm_config: Any, kv_cache_config: Any, workers: Mapping[int, WorkerLayout], extra: Mapping[str, str]
) -> ModelSpec:
    """The identity of this model's KV.

    Args:
        workers: what each tensor-parallel rank has reported of its paged KV.
        extra: what the KV depends on besides, such as an adapter.

    Raises `LayoutError` when ranks are missing or disagree.
    """
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if sorted(workers) != list(range(ranks)):
        raise LayoutError(f"{ranks} tensor-parallel ranks, but layouts came from {sorted(workers)}")
    first = workers[0]
    for rank, layout in workers.items():
        if layout != first:
            raise LayoutError(f"the KV layout of rank {rank} ({layout}) differs from that of rank 0 ({first})")
    groups = []
    for layers, window in zip(group_layers(kv_cache_config), group_windows(kv_cache_config), strict=True):
        missing = [name for name in layers if name not in first.block_bytes]
        if missing:
            raise LayoutError(f"the workers hold no KV for the layers {', '.join(missing)}")
        groups.append(GroupSpec(layers, tuple(first.block_bytes[name] for name in layers), window))
    model = vllm_config.model_config
    return ModelSpec(
        engine="vllm",
        model=model_name(model),
        weights=weights_fingerprint(_compat.weights_path(model), model.revision),
        dtype=kv_dtype(kv_cache_config, vllm_config.cache_config),
        element_bytes=first.element_bytes,
        layout=f"{kv_cache_config.kv_cache_layout}:{first.shape}",
        backend=first.backend,
        isa=first.isa,
        block_tokens=block_tokens(kv_cache_config),
        ranks=ranks,
        groups=tuple(groups),
        parallel={"tp": ranks},
        extra={**computed_from(vllm_config), **extra},
    )


def model_name(model_config: Any) -> str:
    """The model's name; of a folder its last part, so that it may be moved."""
    name = str(model_config.model)
    return os.path.basename(os.path.normpath(name)) if os.path.exists(name) else name


def computed_from(vllm_config: Any) -> dict[str, str]:
    """What else KV is computed from, for `ModelSpec.extra`."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "compute_dtype": str(model.dtype),
        "kv_cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "load_format": str(vllm_config.load_config.load_format),
        "hash": str(cache.prefix_caching_hash_algo),
        "hf_config": _config_digest(model),
        "media": media.identity(model),
    }


def unsafe(vllm_config: Any) -> list[str]:
    """Why the KV of this model is not a function of the tokens before it and of what a namespace tells apart."""
    model, speculative, found = vllm_config.model_config, vllm_config.speculative_config, []
    if model.is_encoder_decoder:
        found.append("it is an encoder-decoder model, whose cross-attention depends on more than the tokens before")
    if model.is_diffusion:
        found.append("it is a diffusion model, whose KV changes after it was written")
    if speculative is not None and speculative.uses_draft_kv_cache():
        found.append(
            f"speculative decoding with {speculative.method!r} keeps draft KV that depends on tokens after a block; "
            "use ngram, or none"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        found.append("calculate_kv_scales makes the KV depend on the first request; give scales, or turn it off")
    if unnamed := media.obstacle(vllm_config):
        found.append(unnamed)
    return found


def _obstacles(vllm_config: Any, kv_cache_config: Any) -> "list[str]":
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    found = []
    for size, name in (
        (parallel.pipeline_parallel_size, "pipeline parallel"),
        (parallel.prefill_context_parallel_size, "prefill context parallel"),
        (parallel.decode_context_parallel_size, "decode context parallel"),
        (parallel.nnodes, "number of nodes of one engine"),
    ):
        if size > 1:
            found.append(f"the {name} size is {size}, only 1 is supported (tensor parallel is)")
    found += unsafe(vllm_config)
    if not groups:
        found.append("it has no KV cache")
        return found
    excluded = set(range(len(groups))) - set(kv_cache_config.prefix_cacheable_group_ids)
    for i, group in enumerate(groups):
        kinds = {type(spec).__name__ for spec in layer_specs(group.kv_cache_spec)}
        unknown = kinds - {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"}
        if unknown or i in excluded:
            found.append(
                f"KV cache group {i} is of the kind {', '.join(sorted(kinds))}; supported are full attention, MLA and "
                "sliding windows"
            )
        elif any(getattr(spec, "non_causal", False) for spec in layer_specs(group.kv_cache_spec)):
            found.append(f"KV cache group {i} attends to later tokens, so a prefix's KV is not its own")
        elif getattr(group.kv_cache_spec, "extra_retained_tokens", 0):
            found.append(f"KV cache group {i} retains tokens beyond its window")
    sizes = sorted({int(g.kv_cache_spec.block_size) for g in groups})
    if len(sizes) > 1:
        found.append(f"its KV cache groups have different block sizes ({', '.join(map(str, sizes))})")
    return found


def layer_specs(spec: Any) -> list[Any]:
    """vLLM's description of each layer's KV in a group, or the one that all have."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [spec]


def _window(spec: Any) -> int | None:
    windows = {int(s.sliding_window) if type(s).__name__ == "SlidingWindowSpec" else None for s in layer_specs(spec)}
    return windows.pop() if len(windows) == 1 else None


def kv_dtype(kv_cache_config: Any, cache_config: Any) -> str:
    """Element type of the KV cache, with the format it is quantised to."""
    specs = [s for g in kv_cache_config.kv_cache_groups for s in layer_specs(g.kv_cache_spec)]
    dtypes = sorted({str(s.dtype).removeprefix("torch.") for s in specs})
    return "+".join(dtypes) if cache_config.cache_dtype == "auto" else f"{cache_config.cache_dtype}:{'+'.join(dtypes)}"


def _config_digest(model_config: Any) -> str:
    """The model's configuration as vLLM runs it, with what was overridden on the command line."""
    fields = {k: v for k, v in model_config.hf_config.to_dict().items() if k not in _IGNORED_IN_CONFIG}
    text = json.dumps(fields, sort_keys=True, default=str)
    if "longrope" in text:  # chooses its factors by the length the engine was started with
        text += f"|max_model_len={model_config.max_model_len}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
