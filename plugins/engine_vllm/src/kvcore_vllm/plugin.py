"""The entry point `vllm` of the group `kvcore.engine`."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_engine() -> Component:
    """The vLLM connector, for people: what `kvcore doctor` says about it."""
    from kvcore_vllm.integration import VllmIntegration

    return Component(api=ApiVersion(1, 0), factory=VllmIntegration)
