"""Eviction policy `fifo`: the key that came first goes first, whatever is used."""

from kvcore.api import ApiVersion, Component, hookimpl
from kvcore.builtin.eviction_order import OrderedPolicy


@hookimpl
def kvcore_eviction() -> Component:
    """The `fifo` policy."""
    return Component(api=ApiVersion(1, 0), factory=FifoPolicy)


class FifoPolicy(OrderedPolicy):
    """The order is that of insertion."""

    use_moves = False
