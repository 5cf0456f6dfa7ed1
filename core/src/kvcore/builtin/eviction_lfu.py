"""Eviction policy `lfu`: the least often used key goes first; of equals, the least recently used."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kvcore.api import ApiVersion, Component, EvictionPolicy, hookimpl

MAX_USES = 255


@hookimpl
def kvcore_eviction() -> Component:
    """The `lfu` policy."""
    return Component(api=ApiVersion(1, 0), factory=LfuPolicy)


class LfuPolicy(EvictionPolicy):
    """One ordered dict per number of uses, up to `MAX_USES`. O(1) per key. Uses are not forgotten over time."""

    def __init__(self, config: Any, context: Any) -> None:
        self._uses: dict[Hashable, int] = {}
        self._buckets: list[OrderedDict[Hashable, int]] = [OrderedDict() for _ in range(MAX_USES + 1)]
        self._lowest = MAX_USES  # no bucket below this one holds a key

    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        """See `EvictionPolicy.insert`."""
        uses, first = self._uses, self._buckets[1]
        for key, size in zip(keys, sizes, strict=True):
            if key in uses:
                self._buckets[uses[key]][key] = size
                self.touch([key])
            else:
                uses[key] = 1
                first[key] = size
        if first:
            self._lowest = 1

    def touch(self, keys: Sequence[Hashable]) -> None:
        """See `EvictionPolicy.touch`."""
        uses, buckets = self._uses, self._buckets
        for key in keys:
            n = uses.get(key)
            if n is None:
                continue
            more = n + 1 if n < MAX_USES else n
            size = buckets[n].pop(key)
            buckets[more][key] = size
            uses[key] = more

    def remove(self, keys: Sequence[Hashable]) -> None:
        """See `EvictionPolicy.remove`."""
        for key in keys:
            n = self._uses.pop(key, None)
            if n is not None:
                del self._buckets[n][key]

    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        """See `EvictionPolicy.evict`."""
        victims: list[Hashable] = []
        lowest = MAX_USES
        for n in range(self._lowest, MAX_USES + 1):
            if nbytes <= 0:
                lowest = min(lowest, n)
                break
            bucket, kept = self._buckets[n], list[tuple[Hashable, int]]()
            while nbytes > 0 and bucket:
                key, size = bucket.popitem(last=False)
                if pinned(key):
                    kept.append((key, size))
                else:
                    victims.append(key)
                    del self._uses[key]
                    nbytes -= size
            for key, size in reversed(kept):
                bucket[key] = size
                bucket.move_to_end(key, last=False)
            if bucket:
                lowest = min(lowest, n)
        self._lowest = lowest
        return victims

    def __len__(self) -> int:
        return len(self._uses)
