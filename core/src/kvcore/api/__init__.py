"""Everything a plugin author imports. It imports nothing above itself, no torch, and pydantic only when asked for.

The config base (`PluginConfig`, `Size`, `EvictionSpec`, ...) is loaded at first use, because pydantic costs
0.1 s to import.
"""

from typing import TYPE_CHECKING, Any

from kvcore.api.command import Command
from kvcore.api.context import Context
from kvcore.api.engine import EngineIntegration, Finding, Launch, LaunchRequest, Prompt
from kvcore.api.errors import (
    ArenaError,
    ConfigError,
    FrameError,
    KVCoreError,
    LayoutError,
    LeaseError,
    PluginError,
    SerdeError,
    SerdeUnavailable,
    ServiceError,
    StorageError,
    StorageUnavailable,
)
from kvcore.api.eviction import EvictionPolicy
from kvcore.api.hooks import (
    API_VERSIONS,
    GROUPS,
    KINDS,
    ApiVersion,
    Attribute,
    Component,
    Kind,
    ObjectEvent,
    Span,
    hookimpl,
    hookspec,
)
from kvcore.api.keys import KeyGenerator, KeySource, ObjectKey
from kvcore.api.layout import ObjectLayout
from kvcore.api.metrics import PluginMetrics
from kvcore.api.prefetch import Brought, Prefetch
from kvcore.api.serde import Serde
from kvcore.api.storage import (
    MISSING,
    STORED,
    BlockingStorage,
    Entry,
    Failed,
    Item,
    Loaded,
    LoadOutcome,
    Missing,
    Storage,
    Stored,
    StoreOutcome,
    Usage,
    fill,
)
from kvcore.api.units import format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from kvcore.api.config import Duration, EvictionSpec, PluginConfig, Size, StorageSpec

__all__ = [
    "API_VERSIONS",
    "GROUPS",
    "KINDS",
    "MISSING",
    "STORED",
    "ApiVersion",
    "ArenaError",
    "Attribute",
    "BlockingStorage",
    "Brought",
    "Command",
    "Component",
    "ConfigError",
    "Context",
    "Duration",
    "EngineIntegration",
    "Entry",
    "EvictionPolicy",
    "EvictionSpec",
    "Failed",
    "Finding",
    "FrameError",
    "Item",
    "KVCoreError",
    "KeyGenerator",
    "KeySource",
    "Kind",
    "Launch",
    "LaunchRequest",
    "LayoutError",
    "LeaseError",
    "LoadOutcome",
    "Loaded",
    "Missing",
    "ObjectEvent",
    "ObjectKey",
    "ObjectLayout",
    "PluginConfig",
    "PluginError",
    "PluginMetrics",
    "Prefetch",
    "Prompt",
    "Serde",
    "SerdeError",
    "SerdeUnavailable",
    "ServiceError",
    "Size",
    "Span",
    "Storage",
    "StorageError",
    "StorageSpec",
    "StorageUnavailable",
    "StoreOutcome",
    "Stored",
    "Usage",
    "fill",
    "format_size",
    "hookimpl",
    "hookspec",
    "parse_duration",
    "parse_size",
]


def __getattr__(name: str) -> Any:
    if name in ("PluginConfig", "Size", "Duration", "EvictionSpec", "StorageSpec"):
        from kvcore.api import config

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
