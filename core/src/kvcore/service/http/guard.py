"""Who may ask what: the `Host` header, the token, the length of a body, the time of a request."""

import asyncio
import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import unquote_to_bytes

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcore.service.problems import Problem

MAX_BODY_BYTES = 64 << 10
MAX_PROMPT_BYTES = 16 << 20
"""Of a body that holds prompts, as over the socket: two million token ids."""
REQUEST_S = 75.0
"""No request lasts longer, whatever its client or a storage does."""
HEALTH_PATHS = ("/healthz", "/readyz")
HOW = "set `server.http.token` (or KVCORE_SERVER__HTTP__TOKEN) to at least 16 characters and start the server again"


class Guard:
    """Around the whole application: refuses hosts that a browser may have been tricked into, and ends long requests.

    Args:
        hosts: names of this machine, beside `localhost` and IP addresses.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = {"localhost", *(h.lower() for h in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        given = [v.decode("latin-1") for k, v in scope["headers"] if k == b"host"]
        name = _name(given[0]) if len(given) == 1 else ""
        if name not in self._hosts and not _is_ip(name):
            text = (
                f"this server does not go by {name!r}: use its IP address or localhost, or list it in server.http.hosts"
            )
            response = Problem(421, "wrong-host", text).response()
            await response(scope, receive, send)
            return
        if not _is_text(scope["raw_path"]):
            text = "the path is no UTF-8 text where it is percent-encoded: no name is written so"
            await Problem(400, "wrong-path", text).response()(scope, receive, send)
            return
        begun = False

        async def note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            async with asyncio.timeout(REQUEST_S):
                await self._app(scope, receive, note)
        except TimeoutError:
            if begun:
                return  # what has been answered so far is no whole answer: the connection is closed
            await Problem(504, "took-too-long", f"not done after {REQUEST_S:g} s").response()(scope, receive, send)


class Spare:
    """In front of the application on a connection that is one too many: answers whether all is well, and nothing else.

    Args:
        most: how many connections there may be, for who is refused.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["path"] in HEALTH_PATHS:
            await self._app(scope, receive, send)
            return
        text = f"there are {self._most} connections already: close some, or try again in a while"
        await Problem(503, "busy", text, headers={"Retry-After": "10"}).response()(scope, receive, send)


def authorize(request: Request, token: str | None) -> None:
    """Raise `Problem` unless the request carries the token."""
    if token is None:
        raise Problem(403, "no-token", f"this needs a token, and the server has none: {HOW}")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    challenge = {"WWW-Authenticate": 'Bearer realm="kvcore"'}
    if scheme.lower() != "bearer":
        raise Problem(401, "token-missing", "send the header Authorization: Bearer TOKEN", headers=challenge)
    if not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise Problem(401, "token-wrong", "the token is not that of `server.http.token`", headers=challenge)


async def body(request: Request, most: int) -> bytes:
    """The body of a request, of at most so many bytes. Raises `Problem`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(
            415, "not-json", f"send JSON with the header Content-Type: application/json, not {kind or 'none'}"
        )
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > most:
                text = f"a body has at most {most} bytes"
                raise Problem(413, "too-large", text, headers={"Connection": "close"})
    except ClientDisconnect:
        raise Problem(400, "cut-short", "who asks has left before the end of the body") from None
    return bytes(data)


def _is_text(raw_path: bytes) -> bool:
    try:
        unquote_to_bytes(raw_path).decode()
    except UnicodeDecodeError:
        return False
    return True


def _name(host: str) -> str:
    """A `Host` header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
