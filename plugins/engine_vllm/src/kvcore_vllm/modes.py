"""When copies are made: inside vLLM's steps or beside them, whole or layer by layer."""

from typing import Any, NamedTuple

from kvcore.api import ConfigError
from kvcore_vllm import _compat
from kvcore_vllm.options import Options


class Modes(NamedTuple):
    """Are loads and saves asynchronous, and are they made layer by layer? `load_early`: does vLLM give a request its
    blocks while tiers still load for it, so that each object is copied when it comes?"""

    load_async: bool
    save_async: bool
    load_layers: bool
    save_layers: bool
    load_early: bool

    def words(self) -> str:
        """For people."""

        def how(beside: bool, layers: bool) -> str:
            return ("async" if beside else "sync") + (", layer by layer" if layers else "")

        loads, saves = how(self.load_async, self.load_layers), how(self.save_async, self.save_layers)
        early = ", from tiers as objects come" if self.load_early else ""
        return f"loads are {loads}{early}; saves are {saves}"


def resolve(options: Options, vllm_config: Any, groups: int, recomputes: bool) -> Modes:
    """The modes for a model with so many KV cache groups. Raises `ConfigError` for one that is not safe here.
    `recomputes`: vLLM computes what could not be loaded."""
    where = "kv_connector_extra_config.kvcore.load: is 'sync', but"
    overlapped = bool(vllm_config.scheduler_config.async_scheduling)
    if options.load == "sync" and groups > 1:
        raise ConfigError(
            f"{where} this model has {groups} KV cache groups, of which only an async load can fail safely"
        )
    if options.load == "sync" and overlapped:
        raise ConfigError(f"{where} async scheduling starts a step before a failed load is known; use 'async'")
    on, auto = options.layerwise == "on", options.layerwise == "auto"
    if vllm_config.parallel_config.use_ubatching:
        if on:
            raise ConfigError(
                "kv_connector_extra_config.kvcore.layerwise: is 'on', but vLLM runs microbatches (enable_dbo, "
                "ubatch_size), where a layer is computed in parts; use 'auto'"
            )
        auto = False
    inline = _compat.on_cpu()
    may_fail = groups == 1 and not overlapped
    load = options.load == "async" or (options.load == "auto" and not (may_fail and (inline or on)))
    save = options.save == "async" or (options.save == "auto" and not inline)
    auto = auto and not inline
    awaited = not vllm_config.kv_transfer_config.is_kv_consumer
    load_layers = not load and (on or auto)
    # What is promised and then does not come is a failed load, which may fail no request.
    early = groups == 1 and options.load != "sync" and not load_layers and recomputes
    return Modes(load, save, load_layers, on or (auto and awaited), early)
