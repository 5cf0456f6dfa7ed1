"""Engine `trtllm`: a KV cache connector for TensorRT-LLM. Interface-tested: it has not run in TensorRT-LLM."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_engine() -> Component:
    """The connector, for people: interface-tested, it has not run in TensorRT-LLM."""
    from kvcore_trtllm.integration import TrtllmIntegration

    return Component(api=ApiVersion(1, 0), factory=TrtllmIntegration)
