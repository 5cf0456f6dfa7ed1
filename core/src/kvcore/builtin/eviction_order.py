"""What `lru`, `mru` and `fifo` share: batches of keys in one order, taken from one end.

Keys come, are used and go in batches: the chunks of a prompt. So the order is one of batches, not of keys, and a prompt
that is used again is one move. A batch goes on naming keys that have left it, until they are most of what it names.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import repeat
from typing import Any, ClassVar

from kvcore.api import EvictionPolicy


class _Batch:
    """Keys in order. Those before `at` have gone, and so have those that name another batch; `live` are left."""

    __slots__ = ("at", "keys", "live", "sizes")

    def __init__(self, keys: list[Hashable], sizes: "int | dict[Hashable, int]") -> None:
        self.keys = keys
        self.sizes = sizes  # of each key, or one for all
        self.live = len(keys)
        self.at = 0

    def some(self, keys: list[Hashable]) -> "int | dict[Hashable, int]":
        """The sizes of these of its keys."""
        return self.sizes if isinstance(self.sizes, int) else {key: self.sizes[key] for key in keys}

    def resize(self, key: Hashable, nbytes: int) -> None:
        if isinstance(self.sizes, int):
            if nbytes == self.sizes:
                return
            self.sizes = dict.fromkeys(self.keys, self.sizes)
        self.sizes[key] = nbytes


class OrderedPolicy(EvictionPolicy):
    """Keys with their sizes. Every operation is O(1) per key; `evict` also passes the pinned keys at its end."""

    evicts_newest: ClassVar[bool] = False
    use_moves: ClassVar[bool] = True
    """A key that is used goes to the newest end."""

    def __init__(self, config: Any, context: Any) -> None:
        self._batch_of: dict[Hashable, _Batch] = {}
        self._batches: OrderedDict[_Batch, None] = OrderedDict()  # oldest first

    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        """See `EvictionPolicy.insert`."""
        if not keys:
            return
        if sizes.count(sizes[0]) != len(keys) or not self._batch_of.keys().isdisjoint(keys):
            self._insert_some_known(dict(zip(keys, sizes, strict=True)))
        else:
            self.insert_new(list(keys), sizes[0])

    def insert_new(self, keys: list[Any], nbytes: int) -> None:
        """The same for keys that are not here, all of one size. L1 knows that of its own, and half of what `insert`
        costs is to find it out. `keys` is the policy's from then on."""
        before = len(self._batch_of)
        batch = self._append(keys, nbytes)
        if len(self._batch_of) - before < len(keys):  # one came twice
            batch.keys = list(dict.fromkeys(keys))
            batch.live = len(batch.keys)

    def touch(self, keys: Sequence[Hashable]) -> None:
        """See `EvictionPolicy.touch`. Whole batches move as they are."""
        if not self.use_moves:
            return
        keys, i, batch_of = list(keys), 0, self._batch_of
        used: list[_Batch] = []
        while i < len(keys):
            batch, start = batch_of.get(keys[i]), i
            i += 1
            if batch is None:
                continue
            end = start + batch.live
            if end <= len(keys) and batch.keys[-1] == keys[end - 1] and batch.keys[batch.at :] == keys[start:end]:
                used.append(batch)
                i = end
                continue
            while i < len(keys) and batch_of.get(keys[i]) is batch:
                i += 1
            moved = list(dict.fromkeys(keys[start:i]))
            used.append(self._append(moved, batch.some(moved)))
            self._left(batch, len(moved))
        for batch in reversed(used) if self.evicts_newest else used:
            if batch.live:  # else a key came twice, and has moved on
                self._batches.move_to_end(batch)

    def remove(self, keys: Sequence[Hashable]) -> None:
        """See `EvictionPolicy.remove`."""
        forget = self._batch_of.pop
        for key in keys:
            batch = forget(key, None)
            if batch is not None:
                self._left(batch, 1)

    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        """See `EvictionPolicy.evict`."""
        victims: list[Hashable] = []
        kept: list[_Batch] = []
        batches, batch_of = self._batches, self._batch_of
        while nbytes > 0 and batches:
            batch = next(reversed(batches)) if self.evicts_newest else next(iter(batches))
            at, sizes = batch.at, batch.sizes
            count = -(-nbytes // sizes) if isinstance(sizes, int) and sizes > 0 else 1
            some = batch.keys[at : at + count]
            batch.at += len(some)
            if batch.live != len(batch.keys) - at:
                some = [key for key in some if batch_of.get(key) is batch]
            gone = len(some)
            if any(map(pinned, some)):
                held = [key for key in some if pinned(key)]
                some = [key for key in some if not pinned(key)]
                kept.append(self._append(held, batch.some(held)))
                del batches[kept[-1]]  # until the others have been looked at
            for key in some:
                del batch_of[key]
            nbytes -= sizes * len(some) if isinstance(sizes, int) else sum(map(sizes.__getitem__, some))
            victims += some
            self._left(batch, gone)
        for batch in reversed(kept):
            batches[batch] = None
            batches.move_to_end(batch, self.evicts_newest)
        return victims

    def __len__(self) -> int:
        return len(self._batch_of)

    def _append(self, keys: list[Hashable], sizes: "int | dict[Hashable, int]") -> _Batch:
        batch = _Batch(keys, sizes)
        self._batch_of.update(zip(keys, repeat(batch)))
        self._batches[batch] = None
        return batch

    def _insert_some_known(self, sizes: dict[Hashable, int]) -> None:
        known = [(key, batch) for key in sizes if (batch := self._batch_of.get(key)) is not None]
        if self.use_moves:
            self.remove([key for key, _ in known])
        else:
            for key, batch in known:
                batch.resize(key, sizes.pop(key))
        if sizes:
            self._append(list(sizes), sizes)

    def _left(self, batch: _Batch, count: int) -> None:
        """So many of its keys name it no more."""
        batch.live -= count
        if not batch.live:
            del self._batches[batch]
        elif 2 * batch.live < len(batch.keys):
            batch.keys = [key for key in batch.keys[batch.at :] if self._batch_of.get(key) is batch]
            batch.sizes = batch.some(batch.keys)
            batch.at = 0
