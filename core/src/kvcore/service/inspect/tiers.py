"""The tiers as they are shown: their state, their queue, and what their storage holds."""

import threading
import time
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from kvcore.api import Usage
from kvcore.control import StorageManager
from kvcore.l2 import Tier
from kvcore.service.inspect.models import TierModel, UsageModel, when

USAGE_S = 0.3
"""So long an answer waits for what the storages hold; one that takes longer is shown with the next."""


class TierViews:
    """Shows tiers, from any thread. A storage is asked what it holds by one call at a time, so that one that hangs
    costs one thread."""

    def __init__(self, manager: StorageManager) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._asked: dict[Tier, Future[Usage | None]] = {}
        self._known: dict[Tier, tuple[Usage, float]] = {}

    def all(self) -> list[TierModel]:
        """All tiers, in order. Waits for at most `USAGE_S`."""
        tiers = list(self._manager.tiers)
        with self._lock:
            for gone in [t for t in self._known if t not in tiers]:
                del self._known[gone]
        self._ask(tiers)
        return [self._show(tier) for tier in tiers]

    def one(self, tier: Tier) -> TierModel:
        """One of them."""
        self._ask([tier])
        return self._show(tier)

    def _ask(self, tiers: list[Tier]) -> None:
        if self._manager.closed:
            return
        with self._lock:
            due = [t for t in tiers if t not in self._asked and t.usable and t.stuck_s is None]
            asked = {tier: self._manager.loop.submit(tier.usage()) for tier in due}
            self._asked |= asked
            waiting = [self._asked[t] for t in tiers if t in self._asked]
        for tier, future in asked.items():
            future.add_done_callback(partial(self._answered, tier))
        if waiting:
            wait(waiting, timeout=USAGE_S)

    def _answered(self, tier: Tier, done: "Future[Usage | None]") -> None:
        with self._lock:
            self._asked.pop(tier, None)
            if not done.cancelled() and done.exception() is None and (usage := done.result()) is not None:
                self._known[tier] = (usage, time.monotonic())

    def _show(self, tier: Tier) -> TierModel:
        manager = self._manager
        config = manager.tier_configs.get(tier.name)
        waiting = {} if manager.arena is None else manager.stores.waiting()
        objects, nbytes = waiting.get(tier.name, (0, 0))
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
