"""A storage for tests: a dict that all engines of this process share, with every call delayed."""

import time
from collections.abc import Sequence
from typing import Any

from kvcore.api import (
    MISSING,
    STORED,
    ApiVersion,
    BlockingStorage,
    Component,
    Duration,
    Item,
    LoadOutcome,
    ObjectKey,
    PluginConfig,
    StoreOutcome,
    fill,
    hookimpl,
)

OBJECTS: dict[ObjectKey, bytes] = {}


class SlowConfig(PluginConfig):
    """How slow."""

    load_delay: Duration = 0.0
    """Before every load."""

    store_delay: Duration = 0.0
    """Before every store."""


class SlowStorage(BlockingStorage):
    """See the module."""

    def __init__(self, config: SlowConfig, context: Any) -> None:
        self.config = config

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [k in OBJECTS for k in keys]

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        time.sleep(self.config.load_delay)
        return [fill(i.buffers, OBJECTS[i.key]) if i.key in OBJECTS else MISSING for i in items]

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        time.sleep(self.config.store_delay)
        for item in items:
            OBJECTS[item.key] = b"".join(item.buffers)
        return [STORED for _ in items]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            OBJECTS.pop(key, None)


@hookimpl
def kvcore_storage() -> Component:
    """The `slow` storage."""
    return Component(api=ApiVersion(1, 0), config=SlowConfig, factory=SlowStorage)
