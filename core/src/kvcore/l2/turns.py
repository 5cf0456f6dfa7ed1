"""So many calls at once, and turns among those who wait: however many calls one has waiting, each other comes next."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Turns:
    """A semaphore that serves those who wait in turns: the first call of each, then the second, and so on.

    Args:
        slots: how many may be inside at once.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()  # in order of turns

    @asynccontextmanager
    async def turn(self, who: Hashable) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(who)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, who: Hashable) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._release()  # it was given the slot in the same moment
            raise

    def _release(self) -> None:
        """Hand the slot to the next who still waits."""
        while self._waiting:
            who, calls = next(iter(self._waiting.items()))
            call = calls.popleft()
            if calls:
                self._waiting.move_to_end(who)
            else:
                del self._waiting[who]
            if not call.done():
                call.set_result(None)
                return
        self._free += 1
