"""The entry point `nixl` of the group `kvcore.storage`."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_storage() -> Component:
    """The storage through NVIDIA NIXL."""
    from kvcore_nixl.config import NixlConfig
    from kvcore_nixl.storage import NixlStorage

    return Component(api=ApiVersion(1, 0), config=NixlConfig, factory=NixlStorage)
