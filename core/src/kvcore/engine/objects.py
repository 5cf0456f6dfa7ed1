"""Objects of a cache one by one, for the store that it serves to other processes."""

import time
from collections.abc import Sequence
from concurrent.futures import Future

from kvcore.api import ObjectKey
from kvcore.control import locate, unheard
from kvcore.engine.answers import count_asked
from kvcore.engine.cache_engine import CacheEngine
from kvcore.engine.space import Space
from kvcore.l2 import Tier


def exists(engine: CacheEngine, space: Space, hashes: Sequence[bytes]) -> "Future[list[bool]]":
    """Which objects of a space with one group are in L1 or a tier, as a hint. Returns at once."""
    table, manager = engine.object_space(space, 0), engine.manager
    there = [chunk_hash in table.objects for chunk_hash in hashes]
    if manager.stores.selective:
        manager.stores.asked(table, hashes, space.groups[0])
    missing = [i for i, found in enumerate(there) if not found]
    begun = time.perf_counter()
    silent: list[Tier] = []

    async def ask() -> list[bool]:
        if missing and manager.tiers:
            keys = [ObjectKey(table.namespace, hashes[i]) for i in missing]
            patience_s = manager.config.lookup_timeout / 2
            tiers = list(manager.tiers)
            sources = await locate(manager.loop, tiers, keys, patience_s=patience_s, earlier_s=0.0, silent=silent)
            for i, source in zip(missing, sources, strict=True):
                there[i] = source is not None
        engine.metrics.observe("lookup_seconds", time.perf_counter() - begun)
        count_asked(engine.metrics, there.count(False), unheard(silent)[0])
        return there

    return manager.loop.submit(ask())


def delete(engine: CacheEngine, space: Space, hashes: Sequence[bytes]) -> "Future[int]":
    """Forget objects of a space with one group, in L1 and every tier, but those in use; how many left L1. Returns at
    once."""
    table, manager = engine.object_space(space, 0), engine.manager
    gone = engine.l1.delete(table, hashes)
    in_use = table.objects
    keys = [ObjectKey(table.namespace, h) for h in dict.fromkeys(hashes) if h not in in_use]

    async def forget() -> int:
        for tier in list(manager.tiers):
            await tier.delete(keys)
        return gone

    return manager.loop.submit(forget())
