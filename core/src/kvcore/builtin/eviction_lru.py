"""Eviction policy `lru`: the least recently used key goes first."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kvcore.api import ApiVersion, Component, EvictionPolicy, hookimpl


@hookimpl
def kvcore_eviction() -> Component:
    """The `lru` policy."""
    return Component(api=ApiVersion(1, 0), factory=LruPolicy)


class LruPolicy(EvictionPolicy):
    """A dict in order of last use."""

    def __init__(self, config: Any, context: Any) -> None:
        self._sizes: dict[Hashable, int] = {}

    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        s = self._sizes
        for k, n in zip(keys, sizes):
            s.pop(k, None); s[k] = n
    def touch(self, keys: Sequence[Hashable]) -> None:
        s = self._sizes
        for k in keys:
            n = s.pop(k, None)
            if n is not None:
                s[k] = n
    def remove(self, keys: Sequence[Hashable]) -> None:
        for k in keys:
            self._sizes.pop(k, None)
    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        out: list[Hashable] = []; got = 0
        for k, n in self._sizes.items():
            if got >= nbytes: break
            if not pinned(k):
                out.append(k); got += n
        for k in out: del self._sizes[k]
        return out
    def __len__(self) -> int:
        return len(self._sizes)
