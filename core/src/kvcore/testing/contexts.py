"""A context as the core gives it to components."""

from kvcore.api import Context
from kvcore.plugins import Registry


def context(name: str = "test", *, passive: bool = False) -> Context:
    """What a component's constructor takes beside its config. `make_eviction` and `make_storage` find the built-in and
    the installed plugins, as they do in an engine.

    Args:
        name: where the component stands in the configuration, for its messages.
        passive: as of `Context`.
    """
    return Registry().context(name, passive=passive)
