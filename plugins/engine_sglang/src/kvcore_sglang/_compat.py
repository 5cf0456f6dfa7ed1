"""Everything that depends on SGLang's version or its inner layout. Nothing here imports SGLang at module level."""

import logging
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED = "0.5.23"
"""The SGLang release that the tests run under."""

EXTRA_CONFIG_KEYS = frozenset(
    ("backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path")
)
"""What SGLang itself reads, or adds, in `--hicache-storage-backend-extra-config`; others it takes out beforehand."""

SERVER_MODULE = "sglang.launch_server"
"""What is run to serve a model."""

KV = "kv"
"""SGLang's name of the pool that holds the model's KV."""

_SHARED_BY_RANKS = frozenset(
    (
        KV, "swa", "auxiliary_swa", "indexer", "draft_indexer",
        "deepseek_v4_c1", "deepseek_v4_c1_indexer", "deepseek_v4_c1_indexer_scale",
        "deepseek_v4_c2", "deepseek_v4_c2_indexer", "deepseek_v4_c2_indexer_scale",
        "deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c4_indexer_scale", "deepseek_v4_c128",
        "deepseek_v4_c4_rope", "deepseek_v4_c128_rope",
        "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state", "deepseek_v4_c128_state",
    )
)  # fmt: skip
"""Pools of which all tensor-parallel ranks hold the same where the model is of the MLA kind. Of these SGLang has one
rank write, and every rank read. State-space states are split by ranks even then, and so are most draft models."""


def installed_sglang() -> str | None:
    """The version of the installed SGLang, from metadata."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def is_tested(sglang_version: str) -> bool:
    """Is this the release that the tests run under, or a rebuild of it?"""
    public = sglang_version.partition("+")[0]
    return public == TESTED or public.startswith(TESTED + ".post")


def storage_class() -> Any:
    """`HiCacheStorage`, the class that a storage backend must be one of."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    return HiCacheStorage


def share_log() -> None:
    """Let kvcore's log lines appear among SGLang's, where nobody has arranged for them."""
    log = logging.getLogger("kvcore")
    if log.level == logging.NOTSET:
        log.setLevel(logging.getLogger("sglang").getEffectiveLevel())


def server_args() -> Any:
    """The arguments that this engine runs with."""
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


def attention_backends(args: Any) -> str:
    """The attention backends of prefill and decode, which agree on the layout of a page."""
    names = (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend)
    return "+".join(str(name) for name in dict.fromkeys(names) if name) or "auto"


def run_settings(args: Any) -> dict[str, str]:
    """What KV depends on, among an engine's arguments, beside its weights."""
    names = (
        "dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "load_format", "json_model_override_args",
        "context_length", "speculative_algorithm",
    )  # fmt: skip
    return {name: str(getattr(args, name)) for name in names}


def adapter_paths(args: Any) -> dict[str, str]:
    """Name -> path of the LoRA adapters given at the start. SGLang's page keys know these by name and path only; those
    that are loaded while it runs have a random id in the keys."""
    return {str(ref.lora_name): str(ref.lora_path) for ref in args.lora_paths or ()}


def weights_path(name: str, revision: str | None) -> str:
    """Where the weights lie: the directory itself, or a hub model's snapshot in the local cache, else the name."""
    if os.path.exists(name):
        return name
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except Exception:
        return name  # not a hub name, or no hub client
    return os.path.dirname(found) if isinstance(found, str) else name


def shared_by_ranks(config: Any, name: str, pool: Any) -> bool:
    """Do all tensor-parallel ranks hold the same in this pool?"""
    if not config.is_mla_model:
        return False
    return name in _SHARED_BY_RANKS or (name.startswith("draft") and _is_mla_pool(pool))


def is_logical(pool: Any) -> bool:
    """Is this a pool of indices that holds no bytes itself, as of DeepSeek-V4, whose side pools hold all?"""
    return not pool.size_per_token


def trailing_pages(transfer: Any) -> int | None:
    """How many of a prefix's last pages a side pool needs; 0: all of them; None: none, it only says what it has."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

    if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
        return None
    return max(1, len(transfer.keys or ())) if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES else 0


def pages_before(extra_info: Any) -> int:
    """How many pages of the request come before those asked for; 0 where SGLang does not say."""
    return len(getattr(extra_info, "prefix_keys", None) or ())


def one_page(pool: Any) -> Any:
    """The indices of a pool's first page."""
    import torch

    return torch.arange(pool.page_size, dtype=torch.int64)


def pages_result(pages: int, by_pool: Mapping[str, int], restorable: Sequence[int]) -> Any:
    """SGLang's record of which prefixes are there."""
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

    return PoolTransferResult(pages, dict(by_pool), list(restorable))


def storage_metrics(prefetched: list[int], backed_up: list[int], get_speed: list[float], set_speed: list[float]) -> Any:
    """SGLang's record of transfers: pages, and GiB/s."""
    from sglang.srt.observability.metrics_collector import StorageMetrics

    return StorageMetrics(
        prefetch_pgs=prefetched, backup_pgs=backed_up, prefetch_bandwidth=get_speed, backup_bandwidth=set_speed
    )


def _is_mla_pool(pool: Any) -> bool:
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    return isinstance(pool, (MLATokenToKVPoolHost, DeepSeekV4PagedHostPool))
