"""Eviction policy `mru`: the most recently used key goes first. For scans that are larger than the cache."""

from kvcore.api import ApiVersion, Component, hookimpl
from kvcore.builtin.eviction_order import OrderedPolicy


@hookimpl
def kvcore_eviction() -> Component:
    """The `mru` policy."""
    return Component(api=ApiVersion(1, 0), factory=MruPolicy)


class MruPolicy(OrderedPolicy):
    """The order is that of the last use. Within a batch the tail of a prefix still goes before its head, without which
    it is useless."""

    evicts_newest = True
