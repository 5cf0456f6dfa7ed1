"""When copies are made: inside vLLM's steps, or beside them."""

from typing import Any

from kvcore.api import ConfigError
from kvcore_vllm import _compat
from kvcore_vllm.options import Options


def resolve(options: Options, vllm_config: Any, groups: int) -> tuple[bool, bool]:
    """(are loads, are saves) asynchronous. Raises `ConfigError` for a mode that is not safe here."""
    where = "kv_connector_extra_config.kvcore.load: is 'sync', but"
    overlapped = bool(vllm_config.scheduler_config.async_scheduling)
    if options.load == "sync" and groups > 1:
        raise ConfigError(
            f"{where} this model has {groups} KV cache groups, of which only an async load can fail safely"
        )
    if options.load == "sync" and overlapped:
        raise ConfigError(f"{where} async scheduling starts a step before a failed load is known; use 'async'")
    inline = _compat.on_cpu()
    load = options.load == "async" or (options.load == "auto" and (not inline or groups > 1 or overlapped))
    save = options.save == "async" or (options.save == "auto" and not inline)
    return load, save
