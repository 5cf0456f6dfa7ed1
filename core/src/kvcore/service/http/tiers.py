"""The tiers as they are shown: their state, their queue, and what their storage holds."""

import asyncio
import time
from functools import partial
from typing import Any

from kvcore.api import Usage
from kvcore.control.manager import StorageManager
from kvcore.l2 import Tier
from kvcore.service.http.models import TierModel, UsageModel, when

USAGE_S = 0.3
"""So long an answer waits for what the storages hold; one that takes longer is shown with the next."""


class Views:
    """Shows tiers. A storage is asked what it holds by one call at a time, so that one that hangs costs one thread."""

    def __init__(self, manager: StorageManager) -> None:
        self._manager = manager
        self._asked: dict[Tier, asyncio.Future[Usage | None]] = {}
        self._known: dict[Tier, tuple[Usage, float]] = {}

    async def all(self) -> list[TierModel]:
        """All tiers, in order."""
        tiers = list(self._manager.tiers)
        for gone in [t for t in self._known if t not in tiers]:
            del self._known[gone]
        await self._ask(tiers)
        return [self._show(tier) for tier in tiers]

    async def one(self, tier: Tier) -> TierModel:
        """One of them."""
        await self._ask([tier])
        return self._show(tier)

    async def _ask(self, tiers: list[Tier]) -> None:
        for tier in tiers:
            if tier not in self._asked and tier.usable and tier.stuck_s is None:
                future = asyncio.wrap_future(self._manager.loop.submit(tier.usage()))
                self._asked[tier] = future
                future.add_done_callback(partial(self._answered, tier))
        waiting = [self._asked[t] for t in tiers if t in self._asked]
        if waiting:
            await asyncio.wait(waiting, timeout=USAGE_S)

    def _answered(self, tier: Tier, done: "asyncio.Future[Usage | None]") -> None:
        del self._asked[tier]
        if not done.cancelled() and done.exception() is None and (usage := done.result()) is not None:
            self._known[tier] = (usage, time.monotonic())

    def _show(self, tier: Tier) -> TierModel:
        config = self._manager.tier_configs.get(tier.name)
        objects, nbytes = self._manager.stores.waiting().get(tier.name, (0, 0))
        known = self._known.get(tier)
        return TierModel(
            name=tier.name,
            storage=config.storage.plugin if config else "",
            serde=[s.plugin for s in config.serde] if config else [],
            write=config.write if config else "none",
            promote=config.promote if config else False,
            queue_objects=objects,
            queue_bytes=nbytes,
            usage=_usage(*known) if known else None,
            **_state(tier),
        )


def _state(tier: Tier) -> dict[str, Any]:
    stuck_s = tier.stuck_s
    if stuck_s is not None:
        cause = tier.breaker.cause if not tier.usable else "calls hang in it beyond their deadline"
        return {"state": "stuck", "since": when(time.monotonic() - stuck_s), "cause": cause}
    if tier.usable:
        return {"state": "open", "since": None, "cause": ""}
    state = "down" if tier.opened else "opening"
    return {"state": state, "since": when(tier.breaker.opened_at), "cause": tier.breaker.cause}


def _usage(usage: Usage, at: float) -> UsageModel:
    age_s = round(time.monotonic() - at, 3)
    return UsageModel(nbytes=usage.nbytes, objects=usage.objects, capacity=usage.capacity_bytes, age_s=age_s)
