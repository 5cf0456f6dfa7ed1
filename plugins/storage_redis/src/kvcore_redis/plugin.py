"""The entry point `redis` of the group `kvcore.storage`."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_storage() -> Component:
    """The storage in Redis and Valkey."""
    from kvcore_redis.config import RedisConfig
    from kvcore_redis.storage import RedisStorage

    return Component(api=ApiVersion(1, 0), config=RedisConfig, factory=RedisStorage)
