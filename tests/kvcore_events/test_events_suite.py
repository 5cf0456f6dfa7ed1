"""The suite of observers over kvcore-events."""

from kvcore.testing import ObserverConformance, context
from kvcore.testing.servers import free_port
from kvcore_events.config import EventsConfig
from kvcore_events.observer import EventsObserver


class TestEvents(ObserverConformance):
    def make_observer(self) -> EventsObserver:
        return EventsObserver(EventsConfig(endpoint=f"tcp://127.0.0.1:{free_port()}"), context())
