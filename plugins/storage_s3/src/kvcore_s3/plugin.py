"""The entry point `s3` of the group `kvcore.storage`."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_storage() -> Component:
    """Storage in S3 and compatibles."""
    from kvcore_s3.config import S3Config
    from kvcore_s3.storage import S3Storage

    return Component(api=ApiVersion(1, 0), config=S3Config, factory=S3Storage)
