"""Eviction policy `lru`: the least recently used key goes first."""

from kvcore.api import ApiVersion, Component, hookimpl
from kvcore.builtin.eviction_order import OrderedPolicy


@hookimpl
def kvcore_eviction() -> Component:
    """The `lru` policy."""
    return Component(api=ApiVersion(1, 0), factory=LruPolicy)


class LruPolicy(OrderedPolicy):
    """The order is that of the last use."""
