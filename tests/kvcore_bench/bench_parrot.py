"""A small OpenAI-compatible server: it repeats words, counts them as tokens, and keeps what it has heard as a prefix
cache would. What it is told to do wrong, it does for any prompt that holds the word."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS_PER_WORD = 2
METRICS = """\
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompt}
# TYPE vllm:prompt_tokens_cached counter
vllm:prompt_tokens_cached_total{{engine="0",model_name="m"}} {cached}
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{{engine="0",model_name="m",source="local"}} {cached}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
"""


class Parrot(ThreadingHTTPServer):
    """`usage`: does it count? `requests`: bodies as they came. `most`: requests that it had at once."""

    daemon_threads = True

    def __init__(self, *, usage: bool = True, details: bool = True, metrics: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.usage, self.details, self.metrics = usage, details, metrics
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.heard: list[list[str]] = []
        self.prompt = self.cached = self.now = self.most = 0
        self.lock = threading.Lock()
        self.gate: threading.Barrier | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def hear(self, words: list[str]) -> int:
        """How many of the words it knew from their beginning on."""
        with self.lock:
            known = max((_common(words, old) for old in self.heard), default=0)
            self.heard.append(words)
            self.prompt += len(words) * TOKENS_PER_WORD
            self.cached += known * TOKENS_PER_WORD
            return known


class _Handler(BaseHTTPRequestHandler):
    server: Parrot
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        parrot = self.server
        if self.path.endswith("/v1/models"):
            self._whole(200, json.dumps({"data": [{"id": "parrot"}]}))
        elif self.path == "/metrics" and parrot.metrics:
            self._whole(200, METRICS.format(prompt=parrot.prompt, cached=parrot.cached))
        else:
            self._whole(404, "not here")

    def do_POST(self) -> None:
        parrot = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with parrot.lock:
            parrot.requests.append({"path": self.path, **body})
            parrot.headers.append({k.lower(): v for k, v in self.headers.items()})
            parrot.now += 1
            parrot.most = max(parrot.most, parrot.now)
        try:
            if parrot.gate is not None:
                parrot.gate.wait(30)
            self._answer(body)
        finally:
            with parrot.lock:
                parrot.now -= 1

    def _answer(self, body: dict[str, Any]) -> None:
        chat = "messages" in body
        words = " ".join(m["content"] for m in body["messages"]).split() if chat else body["prompt"].split()
        if "REFUSE" in words:
            self._whole(400, json.dumps({"error": {"message": "too long for this bird"}}))
            return
        known = self.server.hear(words)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._send(": hello\r\n\r\n")
        if chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if "QUARREL" in words:
            self._event({"error": {"message": "no more seeds"}})
            return
        said = [] if "SILENT" in words else ["squawk"] * body["max_tokens"]
        for i, word in enumerate(said):
            if "FAINT" in words and i == 1:
                self.close_connection = True
                return
            text = word if i == 0 else f" {word}"
            name = "reasoning_content" if "THINK" in words and i == 0 else "content"
            self._event({"choices": [{"delta": {name: text}} if chat else {"text": text}]})
        last = {"delta": {}} if chat else {"text": ""}
        self._event({"choices": [{**last, "finish_reason": "length"}]})
        if self.server.usage:
            usage: dict[str, Any] = {"prompt_tokens": len(words) * TOKENS_PER_WORD, "completion_tokens": len(said)}
            if self.server.details:
                usage["prompt_tokens_details"] = {"cached_tokens": known * TOKENS_PER_WORD}
            self._event({"choices": [], "usage": usage})
        self._send("data: [DONE]\n\n")
        self._send("")

    def _event(self, value: dict[str, Any]) -> None:
        self._send(f"data: {json.dumps(value)}\r\n\r\n")

    def _send(self, text: str) -> None:
        """One chunk."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text.encode()), text.encode()))
        self.wfile.flush()

    def _whole(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def parrot(**how: bool) -> Iterator[Parrot]:
    """One that runs."""
    with Parrot(**how) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _common(a: list[str], b: list[str]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
