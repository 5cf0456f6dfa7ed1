"""Storages over a server of the tests, and what the tests ask of them."""

from collections.abc import Sequence
from typing import Any

from kvcore.api import Context, ObjectKey, Stored
from kvcore.testing.driver import Driver
from kvcore.testing.memory import content, source
from kvcore_redis.config import RedisConfig
from kvcore_redis.node import Node
from kvcore_redis.storage import RedisStorage


def make_redis(url: str, prefix: str = "kvcore:", *, passive: bool = False, **options: Any) -> RedisStorage:
    """An unopened storage, its options as YAML gives them."""
    config = RedisConfig.model_validate({"url": url, "prefix": prefix, **options})
    return RedisStorage(config, Context(passive=passive))


def opened(url: str, prefix: str = "kvcore:", **options: Any) -> Driver:
    """A storage in a driver, to be entered."""
    return Driver(make_redis(url, prefix, **options))


def put(driver: Driver, keys: Sequence[ObjectKey], nbytes: int = 10_000) -> None:
    """Store an object for each key, whose content depends on the key."""
    outcomes = driver.store([source(key, content(key, nbytes), (4096,)) for key in keys])
    assert all(isinstance(outcome, Stored) for outcome in outcomes), outcomes


def nodes(driver: Driver) -> list[Node]:
    """The nodes that the storage knows."""
    assert isinstance(driver.storage, RedisStorage)
    return list(driver.storage._nodes())


def connections(driver: Driver) -> int:
    """How many connections the storage has open for objects."""
    return sum(node.connections for node in nodes(driver))
