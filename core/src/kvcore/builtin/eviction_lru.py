"""Eviction policy `lru`: the least recently used key goes first."""

from collections import deque
from collections.abc import Hashable, Sequence

from kvcore.api import ApiVersion, Component, hookimpl
from kvcore.builtin.eviction_order import OrderedPolicy


@hookimpl
def kvcore_eviction() -> Component:
    """The `lru` policy."""
    return Component(api=ApiVersion(1, 0), factory=LruPolicy)


class LruPolicy(OrderedPolicy):
    """The order is that of the last use."""

    def touch(self, keys: Sequence[Hashable]) -> None:
        """See `EvictionPolicy.touch`."""
        entries = self._entries
        try:
            deque(map(entries.move_to_end, keys), 0)  # a loop in C
        except KeyError:  # one is unknown: again, with a check
            for key in keys:
                if key in entries:
                    entries.move_to_end(key)
