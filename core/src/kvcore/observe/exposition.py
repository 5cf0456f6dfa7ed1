"""How metrics leave the process: a Prometheus registry of our own, and the port it is served on."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import Metric

from kvcore.observe.log import Throttle, logger

LACK_S = 0.1
"""How long a server rests that can accept nobody."""
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class MetricsRegistry(CollectorRegistry):
    """Brings what is only known when asked up to date before it is read, and leaves out the `_created` series, which
    tell when a counter was made and double the number of series. The host process may want them of its own metrics,
    so the switch of prometheus_client, which is global, is left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refresh: Callable[[], None] = _nothing
        """Called before every reading, to set the gauges that nobody keeps up to date."""
        self.plugins: dict[str, Any] = {}
        """Plugins' own metrics by name, each with its series: see `PluginMetrics`."""
        self.log = Throttle()
        """For their wrong calls."""

    def collect(self) -> Iterable[Metric]:
        """See `CollectorRegistry.collect`."""
        self.refresh()
        for family in super().collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


def _nothing() -> None:
    pass


class _Server(ThreadingMixIn, WSGIServer):
    """Sleeps until somebody asks: the base class looks twice a second whether it is to end."""

    daemon_threads = True

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _LACKING:  # whoever waits would be asked about at once, again and again
                time.sleep(LACK_S)
            raise

    def handle_error(self, *_: Any) -> None:
        """Whoever asked is gone, which is nobody's affair."""

    def serve_forever(self, _: float = 0.0) -> None:
        super().serve_forever(None)  # type: ignore[arg-type]  # a selector's time-out

    def shutdown(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)  # which wakes it
        super().shutdown()


class _Handler(WSGIRequestHandler):
    timeout = 60.0  # of an answer or a question that stands still: each has a thread

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def serve(registry: MetricsRegistry, port: int) -> Any:
    """Serve `registry` on this port of 127.0.0.1, on a thread of its own; 0 picks a free one.

    Returns the server (`shutdown` and `server_close` end it), or None when the port cannot be had, which is logged.
    """
    try:
        server = _Server(("127.0.0.1", port), _Handler)
    except OSError as error:
        logger.warning("metrics_port %d cannot be served (%s): the cache runs without it", port, error)
        return None
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="kvcore-metrics", daemon=True).start()
    logger.info("metrics are served on http://127.0.0.1:%d/metrics", server.server_port)
    return server
