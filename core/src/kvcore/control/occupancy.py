"""How full the tiers are, for metrics: asked when those are read, and not too often, for asking may take long."""

import time
from collections.abc import Sequence

from kvcore.control.loop import LoopThread
from kvcore.l2 import Tier
from kvcore.observe import Metrics

ASK_S = 60.0


class Occupancy:
    """Keeps `tier_used_bytes` and `tier_capacity_bytes`. From any thread.

    A shared storage that keeps its own account is not asked: some list all that they hold to answer, and every engine
    that uses it would.
    """

    def __init__(self, loop: LoopThread, tiers: Sequence[Tier], metrics: Metrics) -> None:
        self._loop = loop
        self._tiers = tiers
        self._metrics = metrics
        self._next = 0.0

    def refresh(self) -> None:
        """Have the tiers asked, when that is due. Waits for no answer: what they say stands in the next reading."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + ASK_S
            self._loop.begin(self._ask)

    async def _ask(self) -> None:
        for tier in list(self._tiers):
            if not tier.usable or (tier.storage.shared and tier.capacity is None):
                continue
            usage = await tier.usage()
            if usage is None or tier not in self._tiers:
                continue
            self._metrics.set("tier_used_bytes", usage.nbytes, tier.name)
            if usage.capacity_bytes is not None:
                self._metrics.set("tier_capacity_bytes", usage.capacity_bytes, tier.name)
