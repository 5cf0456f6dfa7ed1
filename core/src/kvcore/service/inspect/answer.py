"""One question over a door: HTTP, one request a connection, JSON."""

import io
import socket
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import ValidationError

from kvcore.api import KVCoreError
from kvcore.explain.explain import NotOnRecord
from kvcore.observe import logger
from kvcore.service.inspect.client import MAX_BODY_BYTES
from kvcore.service.inspect.routes import ROUTES
from kvcore.service.inspect.subject import Subject

MAX_DIGITS = 10
TEXT = "text/plain; version=0.0.4; charset=utf-8"


def answer(asking: socket.socket, subject: Subject, ask_s: float, take_s: float) -> None:
    """Read a request, which takes `ask_s` at most, and answer it, for which the client has `take_s`. Raises `OSError`
    when who asks is gone."""
    _Handler(asking, subject, ask_s, take_s)


class _Until(io.RawIOBase):
    """What comes over a socket up to a time, however it is cut. Raises `TimeoutError` from then on."""

    def __init__(self, asking: socket.socket, time_s: float) -> None:
        self._asking = asking
        self._give_up = time.monotonic() + time_s

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        left = self._give_up - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._asking.settimeout(left)
        return self._asking.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, asking: socket.socket, subject: Subject, ask_s: float, take_s: float) -> None:
        self._subject = subject
        self._ask_s, self._take_s = ask_s, take_s
        super().__init__(asking, ("", 0), None)  # type: ignore[arg-type]  # it has no server

    def setup(self) -> None:
        """See `StreamRequestHandler`, whose time-outs begin anew with every byte."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Until(self.connection, self._ask_s))

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
        if self._subject.closing and not route.late:
            self.send_error(503, "it is being closed")
            return
        try:
            query = route.query.model_validate(dict(parse_qsl(url.query))) if route.query else None
            given = route.body.model_validate_json(body or b"{}") if route.body else None
            found = route.view(self._subject, given if query is None else query)
            kind = TEXT if isinstance(found, str) else "application/json"
            data = (found if isinstance(found, str) else found.model_dump_json()).encode()
        except NotOnRecord as error:
            self.send_error(404, str(error))
        except ValidationError as error:
            text = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
            self.send_error(422, text)
        except KVCoreError as error:
            self.send_error(422, str(error))
        except TimeoutError as error:
            self.send_error(504, f"not done in time: {error}")
        except Exception:
            logger.exception("%s %s failed", self.command, url.path)
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
