"""Serde `zstd`: lossless compression of KV, bytes of equal weight together and then Zstandard."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_serde() -> Component:
    """The lossless serde."""
    from kvcore_zstd.config import ZstdConfig
    from kvcore_zstd.serde import ZstdSerde

    return Component(api=ApiVersion(1, 0), config=ZstdConfig, factory=ZstdSerde)
