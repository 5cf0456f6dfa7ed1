"""What `lru`, `mru` and `fifo` share: one ordered dict, taken from one end."""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Any, ClassVar

from kvcore.api import EvictionPolicy


class OrderedPolicy(EvictionPolicy):
    """Keys with their sizes, oldest first. Every operation is O(1) per key; `evict` also passes the pinned keys at
    its end of the order. An `OrderedDict`, because a dict's front is slow to reach after many deletions there."""

    evicts_newest: ClassVar[bool] = False

    def __init__(self, config: Any, context: Any) -> None:
        self._entries: OrderedDict[Hashable, int] = OrderedDict()
        self._size: int | None = 0  # of every key so far; None once they differ

    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        """See `EvictionPolicy.insert`."""
        entries = self._entries
        before = len(entries)
        if sizes and sizes.count(self._size) != len(sizes):
            self._size = sizes[0] if not entries and sizes.count(sizes[0]) == len(sizes) else None
        for key, size in zip(keys, sizes, strict=True):
            entries[key] = size
        if len(entries) - before < len(keys):
            self.touch(keys)

    def remove(self, keys: Sequence[Hashable]) -> None:
        """See `EvictionPolicy.remove`."""
        forget = self._entries.pop
        for key in keys:
            forget(key, None)

    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        """See `EvictionPolicy.evict`."""
        victims: list[Hashable] = []
        kept: list[tuple[Hashable, int]] = []
        entries, newest = self._entries, self.evicts_newest
        if self._size:  # then it is known how many go, and C can do it, unless one of them is pinned
            count = max(0, -(-nbytes // self._size))
            victims = list(islice(reversed(entries) if newest else entries, count))
            if not any(map(pinned, victims)):
                deque(map(entries.__delitem__, victims), 0)
                return victims
            victims = []
        pop, choose = entries.popitem, victims.append
        while nbytes > 0 and entries:
            key, size = pop(newest)
            if pinned(key):
                kept.append((key, size))
            else:
                choose(key)
                nbytes -= size
        for key, size in reversed(kept):
            entries[key] = size
            entries.move_to_end(key, newest)
        return victims

    def __len__(self) -> int:
        return len(self._entries)
