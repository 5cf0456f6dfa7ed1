"""One request to an OpenAI-compatible server, streamed, and when each piece of its answer came."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvcore.api.errors import ConfigError

Message = dict[str, str]
"""`role` and `content`."""
_ERROR_CHARS = 300
_LINE_BYTES = 1 << 20
"""Of one event: hundreds of times what a token takes."""
_PAGE_BYTES = 64 << 20
"""Of a page that is read at once. An engine's metrics are less than 1 MiB."""


class Answer(NamedTuple):
    """What came of a request.

    Args:
        text: of the answer. whole_s: to its end.
        first_s: to its first text; None when there was none.
        gaps_s: between one piece of text and the next.
        prompt, output: tokens of the prompt and of the answer as the server counts them; None: it did not tell.
        cached: tokens of the prompt that were not computed; None: it did not tell.
        error: why it failed; its other numbers then mean nothing.
    """

    text: str = ""
    whole_s: float = 0.0
    first_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    prompt: int | None = None
    output: int | None = None
    cached: int | None = None
    error: str = ""


class Api:
    """A server, as its address, a model and the way to ask.

    Args:
        url: with or without `/v1` at its end. Raises `ConfigError` for what is no address, and for one with a
            user's name or password, which it does not repeat.
        model: its name; None: ask for the first that the server names.
        key: sent as a bearer token, if any.
        chat: by `chat/completions`; else by `completions`, with a conversation as one text.
        more: more fields of every request, such as `ignore_eos`.
        timeout_s: of a request, to the end of its answer.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        key: str = "",
        chat: bool = True,
        more: dict[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if "@" in url:  # the address is the server's name in all that is printed
            raise ConfigError("an address with USER:PASSWORD@ is not taken: leave it out, and set OPENAI_API_KEY")
        try:
            where = urlsplit(url if "//" in url else f"http://{url}")
            host, port = where.hostname, where.port
        except ValueError as error:
            raise ConfigError(f"{url}: {error}; write http://HOST:PORT or https://HOST") from None
        if where.scheme not in ("http", "https") or not host or ("//" not in url and port is None):
            raise ConfigError(f"{url!r} is no address of a server: write http://HOST:PORT or https://HOST")
        self._make = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        self._at = (host, port)
        self._root = where.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._chat = chat
        self._more = more or {}
        self._timeout_s = timeout_s
        self.model = model or ""

    def read(self, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """Status and body of a GET below the server's root. Raises `OSError` when it does not answer."""
        try:
            with self._connected(timeout_s) as connection:
                connection.request("GET", self._root + path, headers=self._headers)
                response = connection.getresponse()
                body = response.read(_PAGE_BYTES)
                if len(body) == _PAGE_BYTES:
                    raise OSError(f"{path} has more than {_PAGE_BYTES >> 20} MiB")
                return response.status, body
        except http.client.HTTPException as error:
            raise OSError(f"no HTTP: {error!r}") from None

    def find_model(self) -> str:
        """`model`, asked for when it was not given. Raises `ConfigError` when the server names none."""
        if not self.model:
            status, body = self.read("/v1/models")
            try:
                self.model = str(json.loads(body)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ConfigError(f"the server names no model (/v1/models: {status}): give it with --model") from None
        return self.model

    def ask(self, messages: Sequence[Message], output: int) -> Answer:
        """One answer. Never raises for what the server or the network does."""
        path, body = self._request(messages, output)
        try:
            with self._connected(self._timeout_s) as connection:
                begun = time.perf_counter()
                connection.request("POST", path, body, self._headers)
                response = connection.getresponse()
                if response.status != http.client.OK:
                    text = response.read(4096).decode(errors="replace")
                    return Answer(error=f"{response.status}: {_told(text)}"[:_ERROR_CHARS])
                return _heard(_lines(response), begun)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Answer(error=f"{type(error).__name__}: {error}"[:_ERROR_CHARS])
        except (AttributeError, TypeError, RecursionError) as error:  # JSON of another shape
            return Answer(error=f"an event is not as the API has it: {error}"[:_ERROR_CHARS])

    @contextmanager
    def _connected(self, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        """A connection that lasts `timeout_s` at most: a socket's own limit begins anew with each byte. Raises
        `TimeoutError` when it was too short."""
        host, port = self._at
        connection = self._make(host, port, timeout=timeout_s)
        over = threading.Event()
        try:
            connection.connect()
            clock = threading.Timer(timeout_s, _end, (connection.sock, over))
            clock.daemon = True  # nobody waits for it at the end of the process
            clock.start()
            try:
                yield connection
            except Exception:
                if not over.is_set():
                    raise
            finally:
                clock.cancel()
            if over.is_set():  # what was cut off may look like an end
                raise TimeoutError(f"no whole answer within {timeout_s:g} s")
        finally:
            connection.close()

    def _request(self, messages: Sequence[Message], output: int) -> tuple[str, bytes]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._more,
        }
        if self._chat:
            body["messages"] = list(messages)
        else:
            said = "".join(f"\n\n{m['role']}: {m['content']}" for m in messages[1:])
            body["prompt"] = f"{messages[0]['content']}{said}"
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        return self._root + path, json.dumps(body).encode()


def _end(connection: socket.socket, over: threading.Event) -> None:
    """Whoever reads from it reads its end."""
    over.set()
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS, whose state is the reader's


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Raises `ValueError` for one that does not end."""
    while line := response.readline(_LINE_BYTES):
        if len(line) == _LINE_BYTES:
            raise ValueError(f"a line of the stream has more than {_LINE_BYTES >> 20} MiB")
        yield line


def _heard(lines: Iterable[bytes], begun: float) -> Answer:
    """The answer that a stream of events holds. Raises `ValueError` for what is none."""
    pieces: list[str] = []
    times: list[float] = []
    spoken: float | None = None
    usage: dict[str, Any] = {}
    ended = False
    for event in _events(lines):
        if event is None:
            ended = True
            continue
        if event.get("error"):
            raise ValueError(f"the server answered {event['error']}")
        if isinstance(told := event.get("usage"), dict):
            usage = told or usage
        for choice in event.get("choices") or ():
            ended = ended or bool(choice.get("finish_reason"))
            text = _text(choice)
            now = time.perf_counter() - begun
            spoken = now if spoken is None else spoken
            if text:
                pieces.append(text)
                times.append(now)
    whole_s = time.perf_counter() - begun
    if not ended:
        raise ValueError("the stream ended before the answer did")
    if spoken is None:
        raise ValueError("no token came: the stream held nothing but its end")
    details = usage.get("prompt_tokens_details")
    return Answer(
        text="".join(pieces),
        whole_s=whole_s,
        first_s=times[0] if times else spoken,  # a first token may have no text, such as the one that ends an answer
        gaps_s=tuple(b - a for a, b in pairwise(times)),
        prompt=_number(usage.get("prompt_tokens")),
        output=_number(usage.get("completion_tokens")),
        cached=_number(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """The events of a stream; None is its end."""
    for line in lines:
        name, _, value = line.partition(b":")
        if name != b"data":
            continue
        value = value.strip()
        if value == b"[DONE]":
            yield None
        elif value:
            event = json.loads(value)
            if not isinstance(event, dict):
                raise ValueError(f"an event is no object: {value[:60]!r}")
            yield event


def _text(choice: dict[str, Any]) -> str:
    """Of a completion, of a chat, or of what a model thinks before it answers."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _number(told: Any) -> int | None:
    """What is no number of tokens was not told."""
    return told if isinstance(told, int) and not isinstance(told, bool) and told >= 0 else None


def _told(body: str) -> str:
    """What a server says is wrong."""
    try:
        said = json.loads(body)
        return str((said.get("error") or said)["message"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return body.strip()
