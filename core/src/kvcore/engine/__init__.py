"""What an engine plugin talks to: an `Engine` where the engine hands over its paged KV, an `ObjectStore` where it owns
host memory. `kvcore.service` opens either."""

from kvcore.engine.attach import attach_arena
from kvcore.engine.cache_engine import CacheEngine
from kvcore.engine.face import Coming, Engine, EngineLookup, StorePlan
from kvcore.engine.fingerprint import weights_fingerprint
from kvcore.engine.guard import Guarded, guarded
from kvcore.engine.local_store import LocalStore
from kvcore.engine.lookup import Lookup
from kvcore.engine.space import GroupSpec, ModelSpec, Space
from kvcore.engine.store_face import ObjectStore
from kvcore.engine.store_space import StoreSpace
from kvcore.l1.arena import ArenaView
from kvcore.observe.decisions import Asked, salt_word

__all__ = [
    "ArenaView",
    "Asked",
    "CacheEngine",
    "Coming",
    "Engine",
    "EngineLookup",
    "GroupSpec",
    "Guarded",
    "LocalStore",
    "Lookup",
    "ModelSpec",
    "ObjectStore",
    "Space",
    "StorePlan",
    "StoreSpace",
    "attach_arena",
    "guarded",
    "salt_word",
    "weights_fingerprint",
]
