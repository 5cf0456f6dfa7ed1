"""Runs the application: uvicorn on a thread and a loop of its own, asleep while nobody asks."""

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcore.api import ConfigError
from kvcore.config import HttpConfig
from kvcore.observe import logger
from kvcore.service.http.app import Api, Node, make_app
from kvcore.service.http.guard import Spare

MAX_CONNECTIONS = 64
SPARE_CONNECTIONS = 8
"""More of them, on which only `/healthz` and `/readyz` are answered. A new one takes the place of the oldest."""
UNREAD_S = 30.0
"""A client takes an answer within so long."""
HEADER_S = 10.0
"""A client that has connected says what it wants within so long."""
MAX_HEADER_BYTES = 16 << 10
START_S = 10.0
CLOSE_S = 5.0


class _Protocol(H11Protocol):
    """One connection. Those that begin no request, or do not read an answer, in time are cut."""

    spare_since: float | None = None
    """When it was made beyond `MAX_CONNECTIONS`."""
    _patience: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # any byte that waits is told of, by `pause_writing`
        self._patience = self.loop.call_later(HEADER_S, transport.abort)
        others = [c for c in self.connections if c is not self and not c.transport.is_closing()]
        spare = [c for c in others if isinstance(c, _Protocol) and c.spare_since is not None]
        if len(others) - len(spare) >= MAX_CONNECTIONS:
            self.spare_since = self.loop.time()
            self.app = Spare(self.app, MAX_CONNECTIONS)
            if len(spare) >= SPARE_CONNECTIONS:
                min(spare, key=lambda c: c.spare_since or 0.0).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._be_patient()
        elif self._patience is None:  # the front of a request; uvicorn has just stopped its own clock
            self._patience = self.loop.call_later(HEADER_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._be_patient()
        self._was_read()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._was_read()

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Server(uvicorn.Server):
    """Waits for its end instead of looking for it ten times a second."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self.ready = ready
        self.over = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        self.ready.set()
        await self.over.wait()
        self.should_exit = True


class HttpServer:
    """Listens from its making on. Raises `ConfigError` when the address cannot be had.

    Attributes:
        port: where it listens, also when any free port was asked for.
    """

    def __init__(self, node: Node, config: HttpConfig) -> None:
        self._socket = _listen(config.listen.host, config.listen.port)
        self.host, self.port = self._socket.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._server: _Server | None = None
        self._failed: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(node, config), name="kvcore-http", daemon=True)
        self._thread.start()
        self._ready.wait(START_S)
        if not self._thread.is_alive():
            raise RuntimeError("the HTTP server did not start") from self._failed
        logger.info("HTTP is served on %s", self.url)

    @property
    def url(self) -> str:
        """Where it is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        """Let requests end, for at most `CLOSE_S`, and stop. Idempotent."""
        if self._server is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._server.over.set)
        self._thread.join(CLOSE_S)
        self._socket.close()

    def _run(self, node: Node, config: HttpConfig) -> None:
        asyncio.set_event_loop(self._loop)
        api = Api(node)
        try:
            token = config.token.get_secret_value() if config.token else None
            app = make_app(api, token=token, loopback=config.listen.loopback, hosts=config.hosts)
            self._server = _Server(
                uvicorn.Config(
                    app,
                    http=_Protocol,
                    ws="none",
                    lifespan="off",
                    interface="asgi3",
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    date_header=False,  # made once a second otherwise
                    proxy_headers=False,
                    timeout_keep_alive=10,
                    timeout_graceful_shutdown=2,
                    h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ),
                self._ready,
            )
            self._loop.run_until_complete(self._server.serve(sockets=[self._socket]))
        except BaseException as error:
            self._failed = error
            logger.exception("HTTP is no longer served")
        finally:
            self._ready.set()
            api.close()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64)
    except OSError as error:
        text = f"server.http: {host} port {port} cannot be had: {error.strerror}"
        raise ConfigError(f"{text}. Choose another port, or 0 for any free one") from error
