"""The observer: it takes what the cache tells, and is done; a thread of its own publishes it."""

from collections.abc import Sequence

from kvcore.api import Context, ObjectEvent, hookimpl
from kvcore_events.config import EventsConfig
from kvcore_events.publisher import Publisher


class EventsObserver:
    """Publishes from `kvcore_opened` to `kvcore_closed`."""

    def __init__(self, config: EventsConfig, context: Context) -> None:
        self._config = config
        self._log = context.log
        self._publisher: Publisher | None = None

    @hookimpl
    def kvcore_opened(self, name: str) -> None:
        """Bind the endpoints. Where that fails, the cache works without the stream, and the log says so."""
        import zmq

        try:
            self._publisher = Publisher(self._config, self._log)
        except zmq.ZMQError as error:
            self._log.error(
                "events: NOTHING IS PUBLISHED, since %s cannot be bound (%s): routers do not learn what this cache "
                "holds, until it is started again. Free the address, or choose another `endpoint`",
                " and ".join(filter(None, (self._config.endpoint, self._config.replay_endpoint))),
                error,
            )

    @hookimpl
    def kvcore_closed(self, name: str) -> None:
        """Publish what waits, for at most a second, and unbind."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    @hookimpl
    def kvcore_stored(self, events: Sequence[ObjectEvent]) -> None:
        """See the hook."""
        if self._publisher is not None:
            self._publisher.put("stored", events)

    @hookimpl
    def kvcore_evicted(self, events: Sequence[ObjectEvent]) -> None:
        """See the hook."""
        if self._publisher is not None:
            self._publisher.put("evicted", events)
