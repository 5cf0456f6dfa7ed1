"""Models that take images, audio or video: what their KV depends on beyond vLLM's hash of each.

vLLM hashes an image and the request's own settings, not the engine's: for its own cache, which ends with the process,
that is enough.
"""

import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvcore_vllm import _compat

_NOT_IN_KV = (
    "allow_missing_mm_embeddings",  # follows from kv_role
    "enable_mm_embeds",
    "interleave_mm_strings",
    "language_model_only",
    "limit_per_prompt",
    "mm_encoder_fp8_scale_save_margin",
    "mm_encoder_fp8_scale_save_path",
    "mm_hasher_algorithm",
    "mm_ipc_gpu_memory_gb",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc",
    "skip_mm_profiling",
)
"""Fields of vLLM's `MultiModalConfig`; one that is not known here separates, which costs a miss and nothing else."""
_PROCESSING = ("transformers", "torchvision")


def identity(model_config: Any) -> str:
    """Of the way from an image to the model's input, as hex: settings, processor files, versions. "" for text only."""
    settings = model_config.multimodal_config
    if settings is None:
        return ""
    fields = {name: value for name, value in vars(settings).items() if name not in _NOT_IN_KV}
    fields["video_loader"] = os.environ.get("VLLM_VIDEO_LOADER_BACKEND")
    fields["versions"] = [_compat.installed_vllm(), *map(_version, _PROCESSING)]
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    # processor_config.json, preprocessor_config.json, video_preprocessor_config.json, processing_*.py
    path = Path(_compat.weights_path(model_config))
    folder = path.parent if path.is_file() else path
    for file in sorted(p for p in folder.glob("*process*") if p.is_file()):
        content = file.read_bytes()
        digest.update(f"\0file\0{file.name}\0{len(content)}\0".encode(errors="surrogateescape") + content)
    return digest.hexdigest()[:32]


def obstacle(vllm_config: Any) -> str | None:
    """Why images could not be told apart, or None."""
    settings = vllm_config.model_config.multimodal_config
    if settings is None or settings.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching:
        return None
    return (
        "with mm_processor_cache_gb at 0 and prefix caching off, vLLM names an image by a counter that every process "
        "begins anew, not by its content; turn one of them on"
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
