"""How metrics leave the process: a Prometheus registry of our own, and the port it is served on."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric

from kvcore.observe.log import logger


class Registry(CollectorRegistry):
    """Brings what is only known when asked up to date before it is read, and leaves out the `_created` series, which
    tell when a counter was made and double the number of series. The host process may want them of its own metrics,
    so the switch of prometheus_client, which is global, is left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refresh: Callable[[], None] = _nothing
        """Called before every reading, to set the gauges that nobody keeps up to date."""

    def collect(self) -> Iterable[Metric]:
        """See `CollectorRegistry.collect`."""
        self.refresh()
        for family in super().collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


def _nothing() -> None:
    pass


def serve(registry: Registry, port: int) -> Any:
    """Serve `registry` on this port of 127.0.0.1, on a thread of its own; 0 picks a free one.

    Returns the server (`shutdown` and `server_close` end it), or None when the port cannot be had, which is logged.
    """
    try:
        server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        logger.warning("metrics_port %d cannot be served (%s): the cache runs without it", port, error)
        return None
    logger.info("metrics are served on http://127.0.0.1:%d/metrics", server.server_port)
    return server
