"""One of SGLang's host pools, with its place in the store."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcore.engine import Asked, ObjectStore, StoreSpace
from kvcore_sglang.identity import page_hash
from kvcore_sglang.pages import Lent, Pages

Moved = Callable[[bool, int, int, float], None]
"""Is told: loaded (else stored), pages, bytes, seconds."""


class StoredPool:
    """Pages between a pool and the store. `False` of a page is a miss, whatever the reason."""

    def __init__(self, pool: Any, pages: Pages, store: ObjectStore, space: StoreSpace, moved: Moved) -> None:
        self.pool = pool
        self.pages = pages
        self._store = store
        self._space = space
        self._moved = moved
        self._page_bytes = sum(pages.sizes)

    def prefix(self, keys: Sequence[str], begin: int = 0) -> int:
        """How many of the front are there; `begin`: the number of the first of them in its request."""
        return self._store.prefix(self._space, [page_hash(key) for key in keys], asked=Asked(), begin=begin)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which are there."""
        return self._store.exists(self._space, [page_hash(key) for key in keys])

    def load(self, keys: Sequence[str], indices: Any) -> list[bool]:
        """Bring pages into the pool, at these indices."""
        if not self._fits(keys, indices):
            return [False] * len(keys)
        lent = self.pages.empty(indices, len(keys))
        arrived = self.fill(keys, lent)
        self.pages.landed(indices, lent, arrived)
        return arrived

    def save(self, keys: Sequence[str], indices: Any) -> list[bool]:
        """Keep pages of the pool."""
        if not self._fits(keys, indices):
            return [False] * len(keys)
        return self.keep(keys, self.pages.full(indices, len(keys)))

    def fill(self, keys: Sequence[str], lent: Lent) -> list[bool]:
        """Bring pages into this memory. Nothing is written into it afterwards."""
        begun = time.perf_counter()
        arrived = self._store.load(self._space, [page_hash(key) for key in keys], lent.buffers)
        self._tell(True, arrived.count(True), begun)
        return arrived

    def keep(self, keys: Sequence[str], lent: Lent) -> list[bool]:
        """Keep pages that stand in this memory."""
        begun = time.perf_counter()
        kept = self._store.store(self._space, [page_hash(key) for key in keys], lent.buffers)
        self._tell(False, kept.count(True), begun)
        return kept

    def _tell(self, loaded: bool, pages: int, begun: float) -> None:
        self._moved(loaded, pages, pages * self._page_bytes, time.perf_counter() - begun)

    def _fits(self, keys: Sequence[str], indices: Any) -> bool:
        return indices is not None and indices.numel() == len(keys) * self.pool.page_size


class LogicalPool:
    """A pool of indices that holds no bytes: any prefix is there as far as it is concerned, and its side pools say how
    long it is."""

    def prefix(self, keys: Sequence[str], begin: int = 0) -> int:
        """All of them."""
        return len(keys)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """All of them."""
        return [True] * len(keys)

    def load(self, keys: Sequence[str], indices: Any) -> list[bool]:
        """There is nothing to do."""
        return [True] * len(keys)

    def save(self, keys: Sequence[str], indices: Any) -> list[bool]:
        """There is nothing to do."""
        return [True] * len(keys)

    def fill(self, keys: Sequence[str], lent: Lent) -> list[bool]:
        """There is nothing to do."""
        return [True] * len(keys)

    def keep(self, keys: Sequence[str], lent: Lent) -> list[bool]:
        """There is nothing to do."""
        return [True] * len(keys)


Pool = StoredPool | LogicalPool
