"""Hooks `prefetch`: loads ahead of requests that wait for their turn, and of a conversation's next turn."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_observer() -> Component:
    """The observer that foresees."""
    from kvcore_prefetch.config import PrefetchConfig
    from kvcore_prefetch.observer import PrefetchObserver

    return Component(api=ApiVersion(1, 0), config=PrefetchConfig, factory=PrefetchObserver)
