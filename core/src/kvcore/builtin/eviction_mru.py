"""Eviction policy `mru`: the most recently used key goes first. For scans that are larger than the cache."""

from collections.abc import Hashable, Sequence

from kvcore.api import ApiVersion, Component, hookimpl
from kvcore.builtin.eviction_order import OrderedPolicy


@hookimpl
def kvcore_eviction() -> Component:
    """The `mru` policy."""
    return Component(api=ApiVersion(1, 0), factory=MruPolicy)


class MruPolicy(OrderedPolicy):
    """The order is that of the last use. Within a batch the tail of a prefix still goes before its head, which would
    leave a tail that is useless without it: batches are taken in from their end."""

    evicts_newest = True

    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        """See `EvictionPolicy.insert`."""
        entries = self._entries
        before = len(entries)
        for key, size in zip(reversed(keys), reversed(sizes), strict=True):
            entries[key] = size
        if len(entries) - before < len(keys):
            self.touch(keys)

    def touch(self, keys: Sequence[Hashable]) -> None:
        """See `EvictionPolicy.touch`."""
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)
