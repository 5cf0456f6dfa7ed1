"""Serde `quant`: lossy compression of KV to fp8 or four bits, with scales that suit keys and values alike."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_serde() -> Component:
    """The lossy serde."""
    from kvcore_quant.config import QuantConfig
    from kvcore_quant.serde import QuantSerde

    return Component(api=ApiVersion(1, 0), config=QuantConfig, factory=QuantSerde)
