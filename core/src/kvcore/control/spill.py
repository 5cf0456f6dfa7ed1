"""The spill controller: for tiers that take only what L1 gives up (`write: evicted`), writes it before it goes.

Room is made ahead of need: when little of L1 is free, the policy's next victims are written and then dropped, unless
someone has used them meanwhile. When the tiers are slower than the engine, L1 evicts by itself, unwritten and counted.
"""

import asyncio
from collections.abc import Callable, Mapping

from kvcore.api import ObjectLayout
from kvcore.control.loop import LoopThread
from kvcore.control.store import StoreController
from kvcore.l1 import L1, ObjectSpace

FREE_SHARE = 0.1
"""The share of L1 that is kept free."""
_STEP_BYTES = 32 << 20
_WAIT_S = 0.01


class SpillController:
    """Runs on the tiers' loop. `layouts`: how the objects of each space are laid out."""

    def __init__(
        self, loop: LoopThread, l1: L1, stores: StoreController, layouts: Mapping[ObjectSpace, ObjectLayout]
    ) -> None:
        self._loop = loop
        self._l1 = l1
        self._stores = stores
        self._layouts = layouts
        self._running = False

    def wake(self) -> None:
        """L1 has been filled: see whether room must be made. From any thread; returns at once."""
        if self._stores.spill_tiers and not self._running and self._short() > 0:
            self._loop.begin(self._run)

    async def flush(self, timeout_s: float) -> None:
        """Give up all of L1 that nobody uses, for at most `timeout_s`."""
        if self._stores.spill_tiers:
            everything = self._spill(lambda: _STEP_BYTES, everything=True)
            await asyncio.wait((self._loop.spawn(everything),), timeout=timeout_s)

    def _short(self) -> int:
        """Bytes that are missing to the share that is kept free, less what is on its way out."""
        arena = self._l1.arena.size
        return int(arena * FREE_SHARE) - self._l1.free_bytes - self._stores.spill_bytes

    async def _run(self) -> None:
        if self._running:
            return
        self._running = True
        try:
            await self._spill(self._short)
        finally:
            self._running = False

    async def _spill(self, short: Callable[[], int], everything: bool = False) -> None:
        while (missing := short()) > 0 and any(t.breaker.closed for t in self._stores.spill_tiers):
            # what is given up overshoots by less than an object; an empty queue takes one of any size
            room = self._stores.spill_room - max((x.nbytes for x in list(self._layouts.values())), default=0)
            if room <= 0 and self._stores.spill_bytes:
                await asyncio.sleep(_WAIT_S)
                continue
            leases = self._l1.give_up(max(1, min(missing, _STEP_BYTES, room)), everything)
            if not leases:
                return
            for lease in leases:
                self._stores.spill(list(lease.objects), lease, self._layouts[lease.objects[0].space])
            await asyncio.sleep(0)  # let the queues see them
