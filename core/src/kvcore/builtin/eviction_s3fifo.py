"""Eviction policy `s3fifo`: three FIFO queues that let most one-time keys go early.

Yang, Zhang, Qiu, Yue, Vigfusson, "FIFO queues are all you need for cache eviction", SOSP 2023. A key starts in a small
queue (a tenth of the bytes). Used more than once there, it moves to the main queue; else it leaves and only its name
stays, in the ghost queue: should it come again, it goes to the main queue at once. The main queue gives a key one more
round for each use (at most three). No use ever moves a key, so `touch` is one dict entry.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kvcore.api import ApiVersion, Component, EvictionPolicy, hookimpl

SMALL_SHARE = 10
"""The small queue holds one part in so many of all bytes."""
MAX_USES = 3
PROMOTE_USES = 2


@hookimpl
def kvcore_eviction() -> Component:
    """The `s3fifo` policy."""
    return Component(api=ApiVersion(1, 0), factory=S3FifoPolicy)


class S3FifoPolicy(EvictionPolicy):
    """S3-FIFO over bytes; the capacity is taken to be what is held.

    A ghost is remembered by the key's attribute `key` where it has one (L1's keys are its objects, new at every stay),
    else by the key itself.
    """

    def __init__(self, config: Any, context: Any) -> None:
        self._uses: dict[Hashable, int] = {}  # of every known key
        self._small: OrderedDict[Hashable, int] = OrderedDict()
        self._main: OrderedDict[Hashable, int] = OrderedDict()
        self._ghost: OrderedDict[Hashable, None] = OrderedDict()
        self._small_bytes = 0
        self._main_bytes = 0

    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        """See `EvictionPolicy.insert`."""
        uses, small, ghost = self._uses, self._small, self._ghost
        for key, size in zip(keys, sizes, strict=True):
            if key in uses:
                self._resize(key, size)
                self.touch([key])
                continue
            uses[key] = 0
            if ghost and ghost.pop(_name(key), self) is None:
                self._main[key] = size
                self._main_bytes += size
            else:
                small[key] = size
                self._small_bytes += size

    def touch(self, keys: Sequence[Hashable]) -> None:
        """See `EvictionPolicy.touch`."""
        uses = self._uses
        for key in keys:
            n = uses.get(key, MAX_USES)
            if n < MAX_USES:
                uses[key] = n + 1

    def remove(self, keys: Sequence[Hashable]) -> None:
        """See `EvictionPolicy.remove`."""
        for key in keys:
            if self._uses.pop(key, None) is None:
                continue
            if key in self._small:
                self._small_bytes -= self._small.pop(key)
            else:
                self._main_bytes -= self._main.pop(key)

    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        """See `EvictionPolicy.evict`."""
        victims: list[Hashable] = []
        kept_small: list[tuple[Hashable, int]] = []
        kept_main: list[tuple[Hashable, int]] = []
        uses, small, main = self._uses, self._small, self._main
        while nbytes > 0 and (small or main):
            if small and (not main or self._small_bytes * SMALL_SHARE >= self._small_bytes + self._main_bytes):
                key, size = small.popitem(last=False)
                if pinned(key):
                    kept_small.append((key, size))
                    continue
                self._small_bytes -= size
                if uses[key] >= PROMOTE_USES:
                    uses[key] = 0
                    main[key] = size
                    self._main_bytes += size
                    continue
                self._ghost[_name(key)] = None
            else:
                key, size = main.popitem(last=False)
                if pinned(key):
                    kept_main.append((key, size))
                    continue
                if uses[key]:
                    uses[key] -= 1
                    main[key] = size
                    continue
                self._main_bytes -= size
            del uses[key]
            victims.append(key)
            nbytes -= size
        _put_back(small, kept_small)
        _put_back(main, kept_main)
        while len(self._ghost) > len(uses):
            self._ghost.popitem(last=False)
        return victims

    def __len__(self) -> int:
        return len(self._uses)

    def _resize(self, key: Hashable, size: int) -> None:
        if key in self._small:
            self._small_bytes += size - self._small[key]
            self._small[key] = size
        else:
            self._main_bytes += size - self._main[key]
            self._main[key] = size


def _name(key: Any) -> Hashable:
    name: Hashable = getattr(key, "key", key)
    return name


def _put_back(queue: OrderedDict[Hashable, int], kept: list[tuple[Hashable, int]]) -> None:
    for key, size in reversed(kept):
        queue[key] = size
        queue.move_to_end(key, last=False)
