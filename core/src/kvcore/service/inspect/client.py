"""Finds open caches and asks them: behind the sockets of this user, or over the HTTP of `kvcore serve`."""

import http.client
import io
import json
import os
import re
import socket
import time
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvcore.api import KVCoreError
from kvcore.service.inspect import folder
from kvcore.service.inspect.until import Until

ASK_S = 15.0
"""So long a whole answer is waited for."""
MAX_BODY_BYTES = 16 << 20
"""The tokens of a long prompt as JSON are about a megabyte."""
MAX_ANSWER_BYTES = 64 << 20
"""The longest answer, a thousand requests with the hashes of long prompts, is shorter."""
_PIECE_BYTES = 64 << 10
_BUSY_S = 0.02
"""Between two tries of a cache that has no room for one more question."""
TOKEN_VARIABLE = "KVCORE_SERVER__HTTP__TOKEN"  # noqa: S105 - a name
_FILE = re.compile(r"(.+)-(\d+)(?:\.(\d+))?\.sock\Z")


class NoAnswer(KVCoreError):
    """A cache was closed, is gone, or does not answer in time. `late`: the latter; it may have begun with what it was
    asked."""

    def __init__(self, text: str, *, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


class Refusal(KVCoreError):
    """A cache has answered, with a refusal. `status`: as of HTTP."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Cache(NamedTuple):
    """One cache that can be asked. `pid` is 0 and `path` empty for one at a `url`."""

    name: str
    pid: int = 0
    path: str = ""
    url: str = ""
    token: str = ""

    @property
    def label(self) -> str:
        """As people call it: its name and process, or its URL."""
        if self.url:
            return self.url
        number = _FILE.search(self.path)
        more = f".{number[3]}" if number and number[3] else ""
        return f"{self.name}-{self.pid}{more}"


def caches() -> list[Cache]:
    """The open caches of this user on this machine, by name. What processes that were killed have left is removed, a
    while after it was found."""
    found: dict[str, Cache] = {}
    for place in folder.folders():
        try:
            folder.check(place, asking=True)
            names = sorted(os.listdir(place))
        except OSError:
            continue
        for name in names:
            path = place / name
            if (matched := _FILE.match(name)) is None:
                continue
            if folder.alive(path):
                found[str(path)] = Cache(matched[1], int(matched[2]), str(path))
            elif place.stat().st_uid == os.geteuid():
                folder.bury(path)
    return sorted(found.values(), key=lambda cache: (cache.name, cache.pid, len(cache.path), cache.path))


def at_url(url: str) -> Cache:
    """The cache of a `kvcore serve --http` at this URL, asked with the token of `KVCORE_SERVER__HTTP__TOKEN`. Raises
    `Refusal` for what is no URL."""
    if "@" in url:  # not shown: there may be a password before it
        raise Refusal(f"--url has no user and no password: set {TOKEN_VARIABLE} to the server's token instead", 0)
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port is not None
    except ValueError:
        sound = False
    if not sound or parts.path.strip("/") or parts.query:
        raise Refusal(f"{url!r:.200} is no address of a server: write one such as http://127.0.0.1:7601", 0)
    return Cache(parts.netloc, url=f"{parts.scheme}://{parts.netloc}", token=os.environ.get(TOKEN_VARIABLE, ""))


def ask(cache: Cache, path: str, body: Any = None, *, timeout_s: float = ASK_S) -> Any:
    """The answer to GET `path`, or with a `body` (plain values) to POST: plain values, or text where it is no JSON.
    It has `timeout_s` in all.

    Raises `NoAnswer` when there is nobody, and `Refusal` with what it says when it refuses, or when nobody can read it.
    """
    connection = _connection(cache, timeout_s)
    connection.response_class = partial(_Answer, time.monotonic() + timeout_s)  # type: ignore[assignment]
    headers = {"Authorization": f"Bearer {cache.token}"} if cache.token else {}
    data = None if body is None else json.dumps(body).encode()
    if data is not None and len(data) > MAX_BODY_BYTES:
        raise Refusal(f"the question has {len(data):,} bytes, of {MAX_BODY_BYTES:,}: give a shorter prompt", 413)
    if data is not None:
        headers["Content-Type"] = "application/json"
    try:
        connection.request("GET" if data is None else "POST", path, data, headers)
        with connection.getresponse() as response:
            text, kind = _read(cache, response).decode(errors="replace"), response.headers.get_content_type()
    except TimeoutError as error:
        text = f"{cache.label} has not answered for {timeout_s:g} s: see what its process is doing"
        raise NoAnswer(text, late=True) from error
    except BlockingIOError as error:  # nothing has arrived there
        text = f"{cache.label} is busy: for {timeout_s:g} s it had no room for one more question"
        raise NoAnswer(f"{text}: ask again, or see what its process is doing") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{cache.label} {_end(cache, error)}") from error
    finally:
        connection.close()
    if response.status >= 400:
        raise _refusal(cache, response.status, kind, text)
    if kind != "application/json":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{cache.label}: its answer is no JSON: it is no kvcore", response.status) from error


def _end(cache: Cache, error: Exception) -> str:
    """What has become of a cache that nobody answers for."""
    if cache.path and not os.path.lexists(cache.path):
        return "was closed"
    if cache.path and isinstance(error, ConnectionRefusedError):
        return "is gone: its process has ended without closing it"
    return f"is gone: {getattr(error, 'strerror', None) or error or 'it closed the connection'}"


def _read(cache: Cache, response: http.client.HTTPResponse) -> bytes:
    """All of an answer, if it is not too long."""
    whole = bytearray()
    while some := response.read(_PIECE_BYTES):
        whole += some
        if len(whole) > MAX_ANSWER_BYTES:
            most = f"{MAX_ANSWER_BYTES >> 20} MiB"
            raise Refusal(f"{cache.label}: its answer has more than {most}: it is no kvcore", response.status)
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(whole)


def _refusal(cache: Cache, status: int, kind: str, text: str) -> Refusal:
    try:
        detail = json.loads(text)["detail"] if kind.endswith("json") else text
    except (KeyError, TypeError, ValueError, RecursionError):  # it is no kvcore
        detail = f"{status} {text:.200}"
    if status == 401 and not cache.token:
        detail = f"it needs the server's token: set {TOKEN_VARIABLE}"
    return Refusal(f"{cache.label}: {detail}", status)


def _connection(cache: Cache, timeout_s: float) -> http.client.HTTPConnection:
    if not cache.url:
        return _Local(cache.path, timeout_s)
    parts = urlsplit(cache.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=timeout_s)


class _Answer(http.client.HTTPResponse):
    """One that has come by a time, by the monotonic clock."""

    def __init__(self, give_up: float, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(Until(sock, give_up))


class _Local(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """See `HTTPConnection.connect`. Raises `BlockingIOError` where there is no room until the time-out."""
        self.sock = socket.socket(socket.AF_UNIX)
        give_up = time.monotonic() + self._timeout_s
        while True:
            left = give_up - time.monotonic()
            self.sock.settimeout(max(left, _BUSY_S))
            try:
                self.sock.connect(self._path)
                return
            except BlockingIOError:  # so many wait already that one more does not
                if left <= 0:
                    raise
            time.sleep(_BUSY_S)
