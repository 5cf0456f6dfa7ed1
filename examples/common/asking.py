"""Asking an OpenAI server, as a client does: streamed, with the time to the first token."""

import json
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

ANSWER_S = 300.0


class Answer(NamedTuple):
    """`text`; seconds to its first token and to its end; tokens of the prompt, and how many were not computed."""

    text: str
    first_s: float
    whole_s: float
    prompt: int
    cached: int


def ask(url: str, prompt: "str | Sequence[int]", max_tokens: int = 24) -> Answer:
    """One greedy completion. Raises `RuntimeError` when the server answers with an error."""
    where = urlsplit(url)
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first_s = 0.0
    text = ""
    usage: dict[str, Any] = {}
    connection = HTTPConnection(where.hostname or "127.0.0.1", where.port, timeout=ANSWER_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {response.read(2000).decode(errors='replace')}")
        for line in response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{url} answered {event['error']}")
            if event.get("usage"):
                usage = event["usage"]
            for choice in event["choices"]:
                text += choice["text"]
                first_s = first_s or time.perf_counter() - began
    finally:
        connection.close()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(text, first_s, time.perf_counter() - began, usage.get("prompt_tokens", 0), cached)
