"""Storage `disk`: one file per object in a directory of a local file system; processes may share it."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_storage() -> Component:
    """The local file system storage."""
    from kvcore_disk.config import DiskConfig
    from kvcore_disk.storage import DiskStorage

    return Component(api=ApiVersion(1, 0), config=DiskConfig, factory=DiskStorage)
