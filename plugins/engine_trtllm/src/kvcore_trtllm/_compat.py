"""Everything that depends on TensorRT-LLM's version or its inner layout. Nothing here imports it at module level."""

from importlib import import_module
from typing import Any

from kvcore.api import LayoutError
from kvcore_trtllm import INTERFACE_TESTED

DISTRIBUTION = "tensorrt_llm"
INTERFACE = "035ab91cad04b7b77a479a9526edecfbc742c661"
"""The commit of TensorRT-LLM's repository in which the interface was read; it holds for 00fdcbff, too. What else is
relied on, name by name: `tests/kvcore_trtllm/trtllm_record.json`."""

_MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
"""Where the interface stands, the newest first."""
_NOT_TOKENS = (
    "lora_task_id",
    "py_lora_path",
    "multimodal_hashes",
    "multimodal_embedding",
    "py_multimodal_data",
    "prompt_embedding_table",
    "mrope_rotary_cos_sin",
)
"""Attributes of a request whose KV depends on more than its tokens."""


def base_classes() -> tuple[type[Any], type[Any]]:
    """TensorRT-LLM's scheduler and worker interface. Raises `ImportError`."""
    for name in _MODULES:
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        return module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker
    raise ImportError(f"TensorRT-LLM's KV cache connector interface is in none of {', '.join(_MODULES)}")


def check_supported(llm_args: Any) -> None:
    """Raise `LayoutError`, one sentence, for a way of running a model whose KV cannot be cached safely."""
    for name in ("pipeline_parallel_size", "context_parallel_size", "max_beam_width"):
        value = getattr(llm_args, name, 1) or 1
        if value > 1:
            raise LayoutError(f"{name} is {value}, with kvcore only 1 is supported ({INTERFACE_TESTED})")
    if getattr(llm_args, "speculative_config", None) is not None:
        raise LayoutError("speculative_config is set: TensorRT-LLM's connector interface does not support draft tokens")
    if getattr(llm_args, "enable_attention_dp", False):
        raise LayoutError("enable_attention_dp is set: kvcore's objects hold the KV of a tensor-parallel group")
    if getattr(llm_args, "kv_cache_compression_config", None) is not None:
        raise LayoutError("kv_cache_compression_config is set: what it keeps is not the KV of a prefix")
    if getattr(llm_args.kv_cache_config, "cross_kv_cache_fraction", None) is not None:
        raise LayoutError("kv_cache_config.cross_kv_cache_fraction is set: encoder-decoder models are not supported")
    windows = getattr(llm_args.kv_cache_config, "max_attention_window", None)
    if windows:
        raise LayoutError("kv_cache_config.max_attention_window is set: only full attention is supported")
    here = getattr(llm_args, "gpus_per_node", None)
    if here and ranks(llm_args) > here:
        raise LayoutError(f"{ranks(llm_args)} ranks on nodes of {here} GPUs: all ranks must be on one node")


def ranks(llm_args: Any) -> int:
    """Tensor-parallel ranks."""
    return int(llm_args.tensor_parallel_size)


def block_tokens(llm_args: Any) -> int:
    """Tokens per block."""
    return int(llm_args.kv_cache_config.tokens_per_block)


def model_of(llm_args: Any) -> tuple[str, str | None]:
    """Name or path of the model, and its revision."""
    return str(llm_args.model), getattr(llm_args, "revision", None)


def computed_from(llm_args: Any) -> dict[str, str]:
    """What else KV is computed from."""
    names = ("dtype", "attn_backend", "quant_config", "moe_config", "sparse_attention_config", "model_kwargs")
    found = {name: _text(getattr(llm_args, name, None)) for name in names}
    return {**found, "kv_cache_dtype": _text(getattr(llm_args.kv_cache_config, "dtype", None)), "version": version()}


def _text(value: Any) -> str:
    dump = getattr(value, "model_dump_json", None)
    return str(dump() if dump is not None else value)


def version() -> str:
    """Of TensorRT-LLM."""
    return str(getattr(import_module("tensorrt_llm"), "__version__", ""))


def rank() -> int:
    """This process's rank."""
    return int(import_module("tensorrt_llm._utils").mpi_rank())


def tokens_of(request: Any) -> list[int]:
    """The request's tokens so far."""
    return list(request.get_tokens(0))


def salt_of(request: Any) -> str | None:
    """What separates this request's KV from that of others with the same tokens; None: it depends on what has no
    name, and is not cached."""
    generation_only = getattr(request, "is_generation_only_request", False)
    if generation_only() if callable(generation_only) else generation_only:  # a property of C++, a method of Python
        return None
    if any(_is_given(getattr(request, name, None)) for name in _NOT_TOKENS):
        return None
    for name in ("cache_salt", "cache_salt_id"):
        salt = getattr(request, name, None)
        if salt is not None:
            return f"{name}={salt}"
    return ""


def _is_given(value: Any) -> bool:
    """Adapter 0 is one, and a tensor has no truth of its own."""
    return value is not None and not (isinstance(value, (str, list, dict)) and not value)


def event_after(tensor: Any, stream: Any) -> Any:
    """An event after all that this stream was told so far; None where there are no streams."""
    if tensor is None or tensor.device.type == "cpu":
        return None
    import torch

    event = torch.cuda.Event()
    event.record(stream)
    return event
