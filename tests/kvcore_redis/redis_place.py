"""Storages over a server of the tests, and objects to move through them."""

from typing import Any

from kvcore.api import Context
from kvcore.testing.driver import Driver
from kvcore_redis.config import RedisConfig
from kvcore_redis.storage import RedisStorage


def make_redis(url: str, prefix: str = "kvcore:", **options: Any) -> RedisStorage:
    """An unopened storage, its options as YAML would give them."""
    return RedisStorage(RedisConfig.model_validate({"url": url, "prefix": prefix, **options}), Context())


def opened(url: str, prefix: str = "kvcore:", **options: Any) -> Driver:
    """A storage in a driver, to be entered."""
    return Driver(make_redis(url, prefix, **options))
