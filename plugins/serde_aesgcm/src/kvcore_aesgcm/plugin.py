"""Serde `aesgcm`: what leaves this machine's memory is encrypted and signed."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_serde() -> Component:
    """The encrypting serde."""
    from kvcore_aesgcm.config import AesGcmConfig
    from kvcore_aesgcm.serde import AesGcmSerde

    return Component(api=ApiVersion(1, 0), config=AesGcmConfig, factory=AesGcmSerde)
