"""The connector's own options, as `kvcore plugins show vllm` and the documentation tell them."""

from typing import Literal

from pydantic import Field

from kvcore.api import Duration, PluginConfig

Mode = Literal["auto", "sync", "async"]


class VllmConfig(PluginConfig):
    """Keys of vLLM's `kv_connector_extra_config`, each with the prefix `kvcore.` there."""

    config: str | None = None
    """Path of kvcore's YAML file. Default: the file that `KVCORE_CONFIG` names, else kvcore's defaults."""

    load: Mode = "auto"
    """When cached KV is copied: `sync` before the step that needs it, `async` beside the steps, on a thread of the
    worker. `auto`: `sync` with vLLM's CPU backend and one KV cache group, where both would share the cores, else
    `async`. With one group and anything but `sync`, what tiers deliver is copied beside the steps object by object, as
    it comes."""

    save: Mode = "auto"
    """When computed KV is copied: `sync` at the end of its step, `async` beside the steps. `auto`: `sync` with vLLM's
    CPU backend, else `async`."""

    layerwise: Literal["auto", "on", "off"] = "auto"
    """Copy layer by layer while a step computes: a load `sync` ahead of the layer that needs it, a save as soon as its
    layer is computed. `on` takes loads into the steps where a failed one can be undone there (one KV cache group, no
    async scheduling), and has vLLM make its CUDA graphs piecewise. `auto`: not with vLLM's CPU backend, where it gains
    nothing; elsewhere loads that are `sync`, and the saves of a `kv_producer`, which somebody waits for."""

    save_decode: bool = True
    """Keep the KV of generated tokens, too."""

    pd_timeout: Duration = Field(default=5.0, gt=0)
    """How long a request waits, without any progress, for KV that the engine which computed its prompt has promised
    (`kv_transfer_params`). What has not come by then is computed."""

    on_load_failure: Literal["recompute", "fail"] = "recompute"
    """`recompute` makes vLLM compute what could not be loaded; `fail` leaves its `kv_load_failure_policy` as it is."""
