"""Forgets objects of a namespace, a tenant or all: in L1, so that nothing more of it goes to a tier; in the tiers; and
what came from these into L1 meanwhile."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from kvcore.api.keys import NAMESPACE_BYTES
from kvcore.control import StorageManager
from kvcore.engine import CacheEngine, Space
from kvcore.explain.cache import Cache
from kvcore.explain.elsewhere import of_tenant
from kvcore.l2 import Tier
from kvcore.observe import logger
from kvcore.observe.decisions import tenant_shown
from kvcore.service.inspect.models import ClearedModel, ClearModel
from kvcore.service.inspect.stored import Turns, on, stored
from kvcore.service.problems import Problem
from kvcore.service.session import CLEARED

CLEAR_S = 30.0
"""So long one request works at it."""


async def clear(
    engine: CacheEngine,
    wanted: ClearModel,
    tiers: Sequence[Tier],
    turns: Turns,
    work: Callable[[Callable[[], Any]], Awaitable[Any]],
) -> ClearedModel:
    """Forget them in `tiers` and in L1. `work` runs a function on a thread. Raises `Problem`."""
    names = _namespaces(engine, wanted)
    manager = engine.manager
    give_up = time.monotonic() + CLEAR_S
    gone = await _clear_l1(manager, names, work)
    counts: dict[str, int] = {}
    problems: dict[str, str] = {}
    complete = not tiers or await on(manager.loop, manager.stores.written(CLEAR_S / 3))
    for tier in tiers:
        counts[tier.name] = 0
        try:
            async for count in _clear_tier(engine, tier, turns, names):
                counts[tier.name] += count
                if time.monotonic() > give_up:
                    complete = False
                    break
        except Problem as problem:
            problems[tier.name] = problem.detail
    if tiers:
        gone += await _clear_l1(manager, names, work)
    what = wanted.model_dump(include={"namespace", "tenant", "all"}, exclude_none=True)
    if wanted.tenant is not None:
        what["tenant"] = tenant_shown(wanted.tenant, manager.config.tenants)
    logger.info("cleared by request, %s: %d objects in L1, %s in tiers", what, gone, counts or "none")
    return ClearedModel(l1=gone, tiers=counts, complete=complete and not problems, problems=problems)


async def _clear_l1(
    manager: StorageManager, names: set[bytes] | None, work: Callable[[Callable[[], Any]], Awaitable[Any]]
) -> int:
    here = {s.namespace for s in list(manager.layouts)}
    gone = 0
    for name in here if names is None else names & here:
        cleared = CLEARED
        while cleared == CLEARED:  # L1 is nobody else's for as long as one slice takes
            cleared = await work(lambda name=name: manager.l1.clear(name, CLEARED))  # type: ignore[misc]
            gone += cleared
    return gone


def _namespaces(engine: CacheEngine, wanted: ClearModel) -> set[bytes] | None:
    """None: all."""
    if wanted.all:
        return None
    if wanted.namespace is not None:
        return {_whole(engine, wanted.namespace)}
    assert wanted.tenant is not None
    name = wanted.tenant
    found = {ns for ns, t in engine.manager.tenancy.bound().items() if name in (t, tenant_shown(t, ()))}
    if not found and wanted.tiers and not name.startswith("#"):  # of a time before the last start
        cache = Cache(engine)
        found = set(of_tenant(cache, name, cache.past() | cache.identities()))
    if not found:
        text = f"nothing in L1 is the tenant {name!r:.200}'s, and no engine uses a model for it"
        if not wanted.tiers:
            how = "what tiers may have of it is forgotten with --tiers (over HTTP: `tiers`)"
        elif name.startswith("#"):
            how = "a hash tells only tenants that engines have named here; give the name itself"
        else:
            how = "no model is known here yet; ask again when an engine has come, or clear what `kvcore store ls` lists"
        raise Problem(404, "no-tenant", f"{text}: {how}")
    return found


def _whole(engine: CacheEngine, begin: str) -> bytes:
    """The one namespace known here that begins so: nobody means to clear two. Raises `Problem`."""
    if len(begin) == 2 * NAMESPACE_BYTES:
        return bytes.fromhex(begin)
    cache = Cache(engine)
    here = {s.namespace for s in list(engine.manager.layouts)}
    known = here.union(spaces_of(engine), cache.past(), cache.identities())
    found = sorted(name.hex() for name in known if name.hex().startswith(begin))
    if len(found) != 1:
        how = f"choose one: {', '.join(found)}" if found else "`kvcore store ls` shows whole ones, also of tiers alone"
        raise Problem(404, "no-namespace", f"{len(found) or 'no'} namespaces known here begin with {begin}: {how}")
    return bytes.fromhex(found[0])


def spaces_of(engine: CacheEngine) -> dict[bytes, Space]:
    """Namespace -> what is registered under it just now. From any thread."""
    found = (reference() for reference in list(engine.registered.valuerefs()))
    return {space.namespace: space for space in found if space is not None}


async def _clear_tier(
    engine: CacheEngine, tier: Tier, turns: Turns, namespaces: set[bytes] | None
) -> AsyncIterator[int]:
    """Deletes slice by slice, and yields how many objects each time."""
    loop = engine.manager.loop
    async for rows in stored(loop, tier, turns, namespaces):
        keys = [key for key, _, _ in rows]
        if keys and not await on(loop, tier.delete(keys)):
            raise Problem(502, "tier-failed", f"tier {tier.name!r} did not delete: see /tiers, and the log")
        engine.manager.journal.note(tier.name, "evicted", "cleared", keys)
        yield len(rows)
