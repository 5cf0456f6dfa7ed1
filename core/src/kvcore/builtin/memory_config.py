"""Options of storage `memory`. Apart from `memory`, because pydantic is slow to import."""

from kvcore.api import EvictionSpec, PluginConfig, Size


class MemoryConfig(PluginConfig):
    """Options of the `memory` storage."""

    capacity: Size | None = None
    """Most bytes of objects to hold. Without it, the storage grows without bound."""
    eviction: EvictionSpec = "lru"
    """The eviction policy that makes room: its name, or a mapping with `plugin` and its options."""
