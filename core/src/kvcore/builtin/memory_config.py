"""Options of storage `memory`. Apart from `memory`, because pydantic is slow to import."""

from typing import Any

from kvcore.api import PluginConfig, Size


class MemoryConfig(PluginConfig):
    """Options of the `memory` storage."""

    capacity: Size | None = None
    """Most bytes of objects to hold. Without it, the storage grows without bound."""
    eviction: Any = "lru"
    """The eviction policy that makes room: its name, or a mapping with `plugin` and its options."""
