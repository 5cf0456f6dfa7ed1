"""One question over a door: HTTP, one request a connection, JSON."""

import io
import select
import socket
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import ValidationError

from kvcore.api import KVCoreError
from kvcore.explain.explain import NotOnRecord
from kvcore.observe import logger
from kvcore.service.inspect.client import MAX_BODY_BYTES
from kvcore.service.inspect.routes import ROUTES, Route
from kvcore.service.inspect.subject import Subject
from kvcore.service.inspect.until import Until

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_DIGITS = 10
MAX_BESIDE = 4
"""So many questions that take long a cache works at at once."""
CLOSING = "it is being closed"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


def answer(asking: socket.socket, subject: Subject, ask_s: float, take_s: float) -> None:
    """Read a request, which takes `ask_s` at most, and answer it, for which the client has `take_s`; what may take long
    is answered later, on another thread. Raises `OSError` when who asks is gone."""
    handler = _Handler(asking, subject, ask_s, take_s)
    if handler.beside is not None:
        try:
            threading.Thread(target=handler.go_on, args=(asking.dup(),), name="kvcore-inspect+", daemon=True).start()
        except BaseException:  # for want of files or threads
            _beside(subject).release()
            raise


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, asking: socket.socket, subject: Subject, ask_s: float, take_s: float) -> None:
        self._subject = subject
        self._ask_s, self._take_s = ask_s, take_s
        self.beside: Callable[[], None] | None = None
        super().__init__(asking, ("", 0), None)  # type: ignore[arg-type]  # it has no server

    def setup(self) -> None:
        """See `StreamRequestHandler`, whose time-outs begin anew with every byte."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(Until(self.connection, time.monotonic() + self._ask_s))

    def do_GET(self) -> None:
        self._reply(b"")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > MAX_DIGITS or int(length) > MAX_BODY_BYTES:
            self.send_error(413, f"a body has a Content-Length of at most {MAX_BODY_BYTES} bytes")
            return
        self._reply(self.rfile.read(int(length)))

    def _reply(self, body: bytes) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            self.send_error(400, f"{self.path!r:.200} is no address: {error}")
            return
        route = ROUTES.get((self.command, url.path))
        if route is None:
            known = ", ".join(f"{method} {path}" for method, path in ROUTES)
            self.send_error(404, f"there is no {self.command} {url.path}: there are {known}")
            return
        self.close_connection = True
        if route.body and _has_left(self.connection):  # nobody wants what it has asked for before it was its turn
            return
        if route.beside and _beside(self._subject).acquire(blocking=False):
            self.beside = partial(self._tell, route, url.query, body)
        elif route.beside:
            self.send_error(503, f"it is at work for {MAX_BESIDE} others: ask again")
        else:
            self._tell(route, url.query, body)

    def go_on(self, asking: socket.socket) -> None:
        """Do what takes long, and answer."""
        assert self.beside is not None
        try:
            with suppress(OSError), asking, asking.makefile("wb") as self.wfile:  # who asked may be gone
                self.connection = asking
                self.beside()
        finally:
            _beside(self._subject).release()

    def _tell(self, route: Route, asked: str, body: bytes) -> None:
        if self._subject.closing and not route.late:
            self.send_error(503, CLOSING)
            return
        try:
            query = route.query.model_validate(dict(parse_qsl(asked))) if route.query else None
            given = route.body.model_validate_json(body or b"{}") if route.body else None
            found = route.view(self._subject, given if query is None else query)
            kind = TEXT if isinstance(found, str) else "application/json"
            data = (found if isinstance(found, str) else found.model_dump_json()).encode()
        except NotOnRecord as error:
            self.send_error(404, str(error))
        except ValidationError as error:
            self.send_error(422, "; ".join(_fault(e) for e in error.errors()[:5]))
        except KVCoreError as error:
            self.send_error(422, str(error))
        except TimeoutError as error:
            self.send_error(504, f"not done in time: {error}")
        except (Exception, CancelledError):
            if self._subject.closing or sys.is_finalizing():
                self.send_error(503, CLOSING)
                return
            logger.exception("%s %s failed", self.command, self.path)
            self.send_error(500, "a bug: the log of the cache has more")
        else:
            self._send(200, kind, data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Every error in the shape of `kvcore serve --http`. Also what the base class refuses."""
        import json

        title = HTTPStatus(code).phrase
        problem = {"type": "about:blank", "title": title, "status": int(code), "detail": message or title}
        self._send(code, "application/problem+json", json.dumps(problem).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.close_connection = True
        self.connection.settimeout(self._take_s)
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: who asks sees it."""


def _beside(subject: Subject) -> threading.Semaphore:
    found: threading.Semaphore = subject.kept.setdefault("beside", threading.BoundedSemaphore(MAX_BESIDE))
    return found


def _fault(error: "ErrorDetails") -> str:
    """What is wrong with one value."""
    text = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    where = ".".join(map(str, error["loc"]))
    return f"{where}: {text}" if where else text


def _has_left(asking: socket.socket) -> bool:
    """Whether who asks has closed the connection."""
    look = select.poll()
    look.register(asking, 0)
    return any(events & select.POLLHUP for _, events in look.poll(0))
