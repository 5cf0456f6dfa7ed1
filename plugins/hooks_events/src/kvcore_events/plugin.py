"""Hooks `events`: objects stored and removed, with tier and size, as a ZMQ stream in vLLM's KV-event format."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_observer() -> Component:
    """The observer that publishes."""
    from kvcore_events.config import EventsConfig
    from kvcore_events.observer import EventsObserver

    return Component(api=ApiVersion(1, 0), config=EventsConfig, factory=EventsObserver)
