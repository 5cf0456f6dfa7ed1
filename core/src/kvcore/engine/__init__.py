"""What an engine plugin talks to: `CacheEngine` for engines that hand over their paged KV, `ObjectStore` for engines
that own their host memory."""

from kvcore.engine.cache_engine import CacheEngine, StorePlan
from kvcore.engine.fingerprint import weights_fingerprint
from kvcore.engine.lookup import Lookup
from kvcore.engine.object_store import ObjectStore
from kvcore.engine.space import GroupSpec, ModelSpec, Space
from kvcore.l1.arena import ArenaView

attach_arena = ArenaView.attach
"""Map the arena of a `Space.descriptor()` in a worker."""

__all__ = [
    "ArenaView",
    "CacheEngine",
    "GroupSpec",
    "Lookup",
    "ModelSpec",
    "ObjectStore",
    "Space",
    "StorePlan",
    "attach_arena",
    "weights_fingerprint",
]
