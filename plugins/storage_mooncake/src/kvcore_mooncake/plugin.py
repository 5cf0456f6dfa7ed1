"""Storage `mooncake`: the memory of many machines as one pool, over TCP or RDMA; payloads move without a copy."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_storage() -> Component:
    """The mooncake storage."""
    from kvcore_mooncake.config import MooncakeConfig
    from kvcore_mooncake.storage import MooncakeStorage

    return Component(api=ApiVersion(1, 0), config=MooncakeConfig, factory=MooncakeStorage)
