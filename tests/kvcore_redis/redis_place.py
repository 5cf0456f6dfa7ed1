"""Storages over a server of the tests, and what the tests ask of them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcore.api import Context, Failed, Loaded, Missing, ObjectKey, Stored
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, make_key, source
from kvcore_redis.config import RedisConfig
from kvcore_redis.node import Node
from kvcore_redis.storage import RedisStorage

SLACK = 5.0


def make_redis(url: str, prefix: str = "kvcore:", *, passive: bool = False, **options: Any) -> RedisStorage:
    """An unopened storage, its options as YAML gives them."""
    config = RedisConfig.model_validate({"url": url, "prefix": prefix, **options})
    return RedisStorage(config, Context(passive=passive))


def opened(url: str, prefix: str = "kvcore:", **options: Any) -> Driver:
    """A storage in a driver, to be entered."""
    return Driver(make_redis(url, prefix, **options))


def keys_of(count: int) -> list[ObjectKey]:
    return [make_key(i) for i in range(count)]


def put(driver: Driver, keys: Sequence[ObjectKey], nbytes: int = 10_000) -> None:
    """Store an object for each key, whose content depends on the key."""
    outcomes = driver.store([source(key, content(key, nbytes), (4096,)) for key in keys])
    assert all(isinstance(outcome, Stored) for outcome in outcomes), outcomes


def get(driver: Driver, keys: Sequence[ObjectKey], nbytes: int = 10_000) -> list[str]:
    """Load all keys in one batch: `ok`, `missing` or the kind of failure for each. What is loaded must be right."""
    rooms = [Room(nbytes, (4096,)) for _ in keys]
    outcomes = driver.load([room.item(key) for room, key in zip(rooms, keys, strict=True)])
    found = []
    for key, room, outcome in zip(keys, rooms, outcomes, strict=True):
        if isinstance(outcome, Loaded):
            assert bytes(room.view[: outcome.nbytes]) == content(key, nbytes), "bytes of another object, or torn"
            assert room.clean_from(outcome.nbytes)
        found.append(kind(outcome))
    return found


def kind(outcome: object) -> str:
    if isinstance(outcome, Failed):
        return outcome.kind
    return "missing" if isinstance(outcome, Missing) else "ok"


def nodes(driver: Driver) -> list[Node]:
    """The nodes that the storage knows."""
    assert isinstance(driver.storage, RedisStorage)
    return list(driver.storage._nodes())


def connections(driver: Driver) -> int:
    """How many connections the storage has open for objects."""
    return sum(node.connections for node in nodes(driver))


@contextmanager
def takes(at_least_s: float, at_most_s: float) -> Iterator[None]:
    """The body takes so long; the upper bound is `SLACK` times as high, for busy machines."""
    begun = time.monotonic()
    yield
    took = time.monotonic() - begun
    assert at_least_s <= took <= at_most_s * SLACK, f"{took:.2f} s"


def eventually(check: Any, within_s: float = 20.0) -> None:
    """`check()` becomes true."""
    give_up = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < give_up, f"not within {within_s:g} s"
        time.sleep(0.05)
