"""What an engine plugin talks to: `CacheEngine` for engines that hand over their paged KV, `ObjectStore` for engines
that own their host memory."""

from kvcore.engine.attach import attach_arena
from kvcore.engine.cache_engine import CacheEngine
from kvcore.engine.face import Engine, EngineLookup, StorePlan
from kvcore.engine.fingerprint import weights_fingerprint
from kvcore.engine.lookup import Lookup
from kvcore.engine.object_store import ObjectStore
from kvcore.engine.space import GroupSpec, ModelSpec, Space
from kvcore.l1.arena import ArenaView

__all__ = [
    "ArenaView",
    "CacheEngine",
    "Engine",
    "EngineLookup",
    "GroupSpec",
    "Lookup",
    "ModelSpec",
    "ObjectStore",
    "Space",
    "StorePlan",
    "attach_arena",
    "weights_fingerprint",
]
