"""Engine `vllm`: the KV connector. Its options are keys of vLLM's `kv_connector_extra_config` and begin with `kvcore.`
there (`kvcore.load`); any other key with that prefix is a value of kvcore's configuration (`kvcore.l1.size`)."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_engine() -> Component:
    """The vLLM connector, for people: what `kvcore doctor` says about it."""
    from kvcore_vllm.config import VllmConfig
    from kvcore_vllm.integration import VllmIntegration

    return Component(api=ApiVersion(1, 0), factory=VllmIntegration, config=VllmConfig)
