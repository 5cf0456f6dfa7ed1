"""Memory that Mooncake may transfer from and to: what is registered, and staging buffers for what is not."""

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvcore.api import format_size
from kvcore.api.buffers import address_of

GRAIN = 1 << 20
WAIT_S = 5.0
"""How long a call waits for other calls to give staging memory back."""


class Region(NamedTuple):
    """A registered range of memory: objects go straight from and to it."""

    start: int
    end: int


class StagingFull(Exception):
    """There is no staging memory for this call; the text says why and what helps."""


class Block:
    """One registered staging buffer."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = memoryview(mmap.mmap(-1, nbytes))
        self.address = address_of(self._memory)


class Staging:
    """Staging buffers, registered when they are first needed and kept for the next call.

    A buffer belongs to one call until that call has returned from Mooncake, however late: nothing may be written into
    the buffer of another call.

    Args:
        register: makes memory known to Mooncake: (address, bytes). Raises what its caller wants to see.
        unregister: undoes it: (address).
        limit: the most bytes of all buffers.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None], limit: int) -> None:
        self._register = register
        self._unregister = unregister
        self._limit = limit // GRAIN * GRAIN
        self._changed = threading.Condition()
        self._free: list[Block] = []
        self._total = 0

    @property
    def batch_bytes(self) -> int:
        """So much a call should stage at once, to leave room for others."""
        return max(GRAIN, self._limit // 8)

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[int]:
        """The address of a buffer of at least `nbytes`, for as long as the context lasts. Raises `StagingFull`."""
        if nbytes == 0:
            yield 0
            return
        block = self._take(-(-nbytes // GRAIN) * GRAIN)
        try:
            yield block.address
        finally:
            with self._changed:
                self._free.append(block)
                self._changed.notify_all()  # whoever waits longest may still lack room where another does not

    def _take(self, nbytes: int) -> Block:
        if nbytes > self._limit:
            raise StagingFull(
                f"{format_size(nbytes)} of staging memory are needed, `staging_size` is {format_size(self._limit)}: "
                "raise it"
            )
        with self._changed:
            if not self._changed.wait_for(lambda: self._fits(nbytes), WAIT_S):
                raise StagingFull(
                    f"{format_size(self._limit)} of staging memory are in use by other calls: raise `staging_size`"
                )
            suited = [block for block in self._free if block.nbytes >= nbytes]
            if suited:
                block = min(suited, key=lambda b: b.nbytes)
                self._free.remove(block)
                return block
            while self._total + nbytes > self._limit:
                gone = self._free.pop()
                self._total -= gone.nbytes
                self._unregister(gone.address)
            block = Block(nbytes)
            self._register(block.address, nbytes)
            self._total += nbytes
            return block

    def _fits(self, nbytes: int) -> bool:
        """Under the lock: is there a free buffer, or room for one once the free ones are given up?"""
        idle = sum(block.nbytes for block in self._free)
        return self._total - idle + nbytes <= self._limit or any(block.nbytes >= nbytes for block in self._free)
