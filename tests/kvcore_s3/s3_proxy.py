"""A TCP relay between a storage and its server that reads the heads of requests."""

import re
import ssl
from collections import Counter
from collections.abc import Callable

from kvcore.testing.servers import proxy

_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) \S+ HTTP/1\.1\r\n")
_LARGE_BYTES = 100_000


class Proxy(proxy.Proxy):
    """Its limits are those of one request and one reply."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.requests: Counter[str] = Counter()
        """How many requests of each method have passed."""
        self.heads: list[bytes] = []
        """The head of each request."""
        self.meanwhile: Callable[[], object] | None = None
        """Called once in each large reply, when its head and some of its body have passed."""
        super().__init__(port, tls)
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    def passes(self, way: proxy.Way, data: bytes, passed: dict[proxy.Way, int]) -> None:
        if way == "requests" and (head := _REQUEST.match(data)):
            passed.update(requests=0, replies=0)
            with self._lock:
                self.requests[head[1].decode()] += 1
                self.heads.append(data.partition(b"\r\n\r\n")[0])
        if way == "replies" and passed[way] <= _LARGE_BYTES < passed[way] + len(data) and self.meanwhile is not None:
            self.meanwhile()
