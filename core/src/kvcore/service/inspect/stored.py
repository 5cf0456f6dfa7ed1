"""What a tier's storage lists, in slices between which everything else goes on."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from kvcore.api import ObjectKey
from kvcore.control.loop import LoopThread
from kvcore.l2 import Tier
from kvcore.service.problems import Problem

T = TypeVar("T")
SLICE = 64
"""Objects that are looked at in one go: about 0.1 ms, after which whoever waits for the interpreter has it."""
BATCH = 512
"""Objects of a batch from a storage."""

Row = tuple[ObjectKey, int, float | None]
"""Key, bytes, and when it was last used, where known."""


class Turns:
    """Of all listings of a tier, one at a time has the storage make its next batch: its other threads are for those who
    load and store."""

    def __init__(self) -> None:
        self._locks: weakref.WeakKeyDictionary[Tier, asyncio.Lock] = weakref.WeakKeyDictionary()

    def of(self, tier: Tier) -> asyncio.Lock:
        """Hold it for a batch."""
        return self._locks.setdefault(tier, asyncio.Lock())


async def stored(
    loop: LoopThread, tier: Tier, turns: Turns, namespaces: Collection[bytes] | None
) -> AsyncIterator[Sequence[Row]]:
    """What a tier's storage lists of these namespaces; None: of all. Raises `Problem` when it cannot."""
    entries = tier.entries(BATCH)

    async def step() -> Sequence[Any] | None:
        return await anext(entries, None)

    while True:
        if not tier.usable:
            raise Problem(503, "tier-down", f"tier {tier.name!r} is left alone just now: see /tiers for the cause")
        try:
            async with turns.of(tier):
                batch = await on(loop, step())
        except NotImplementedError:
            raise Problem(422, "cannot-list", f"the storage of tier {tier.name!r} cannot list what it holds") from None
        except Exception as error:
            raise Problem(502, "tier-failed", f"tier {tier.name!r} could not be listed: {error}") from error
        if batch is None:
            return
        for at in range(0, len(batch), SLICE):
            some = batch[at : at + SLICE]
            yield [(e.key, e.nbytes, e.used_s) for e in some if namespaces is None or e.key.namespace in namespaces]
            await asyncio.sleep(0)


async def on(loop: LoopThread, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine on the tiers' loop."""
    return await asyncio.wrap_future(loop.submit(work))
