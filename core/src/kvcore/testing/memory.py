"""Memory, bytes and keys for the suites: page-aligned rooms with guarded edges, contents nobody can confuse."""

import hashlib
import mmap
from collections.abc import Sequence
from itertools import pairwise

from kvcore.api import Item, ObjectKey

PAGE = mmap.PAGESIZE
POISON = 0xA5
NAMESPACE = bytes(range(16))


def aligned(nbytes: int) -> memoryview:
    """Writable page-aligned memory of `nbytes`, zeroed, as a storage with direct I/O gets it from the arena."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def content(seed: object, nbytes: int) -> bytes:
    """`nbytes` bytes that depend on `seed` alone and look random, so that two contents differ everywhere."""
    return hashlib.shake_128(repr(seed).encode()).digest(nbytes)


def make_key(seed: object, group: int = 0, namespace: bytes = NAMESPACE) -> ObjectKey:
    """A key that depends on the arguments alone."""
    return ObjectKey(namespace, hashlib.sha256(repr(seed).encode()).digest(), group)


def split(memory: memoryview, at: Sequence[int] = ()) -> list[memoryview]:
    """`memory` cut at the given places (kept in order, clipped to its length)."""
    cuts = [0, *sorted(min(cut, len(memory)) for cut in at), len(memory)]
    return [memory[a:b] for a, b in pairwise(cuts)]


def source(key: ObjectKey, data: bytes, at: Sequence[int] = (), *, offset: int = 0) -> Item:
    """An item to store: `data` in fresh read-only buffers, `offset` bytes after a page's start, cut at `at`."""
    memory = aligned(offset + len(data))[offset:]
    memory[:] = data
    return Item(key, split(memory.toreadonly(), at))


class Room:
    """Memory to load into: poisoned, with poisoned guards before and after, so that every stray byte shows.

    Args:
        nbytes: the room's size in bytes.
        at: where it is cut into several buffers.
        offset: distance in bytes of its start from a page's start.
    """

    def __init__(self, nbytes: int, at: Sequence[int] = (), *, offset: int = 0) -> None:
        self._memory = aligned(PAGE + offset + nbytes + PAGE)
        self._start = PAGE + offset
        self.nbytes = nbytes
        self.view = self._memory[self._start : self._start + nbytes]
        self.buffers = split(self.view, at)
        self.poison()

    def poison(self) -> None:
        """Fill the room and its guards with the poison."""
        self._memory[:] = bytes([POISON]) * len(self._memory)

    def item(self, key: ObjectKey) -> Item:
        """The item that loads `key` into this room."""
        return Item(key, self.buffers)

    def clean_from(self, nbytes: int) -> bool:
        """Whether all but the first `nbytes` of the room still is poison, the guards included."""
        return _is_poison(self._memory[: self._start]) and _is_poison(self._memory[self._start + nbytes :])


class Pieces:
    """Buffers of these sizes that are no neighbours: each lies in memory of its own, at an address that is no multiple
    of two (but the first, a frame's header, at a page's start), between guards."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._memory = [aligned(2 * PAGE + size + PAGE) for size in sizes]
        starts = [PAGE + (2 * i + 1 if i else 0) for i in range(len(sizes))]
        self.buffers = [m[at : at + n] for m, at, n in zip(self._memory, starts, sizes, strict=True)]
        self._edges = [(m[:at], m[at + n :]) for m, at, n in zip(self._memory, starts, sizes, strict=True)]
        for memory in self._memory:
            memory[:] = bytes([POISON]) * len(memory)

    def fill(self, data: bytes) -> None:
        """Write `data` over all of them, from the first to the last."""
        at = 0
        for buffer in self.buffers:
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)

    @property
    def data(self) -> bytes:
        """What they hold."""
        return b"".join(self.buffers)

    def clean(self) -> bool:
        """Whether all guards still are poison."""
        return all(_is_poison(edge) for edges in self._edges for edge in edges)


def _is_poison(memory: memoryview) -> bool:
    return bytes(memory) == bytes([POISON]) * len(memory)
