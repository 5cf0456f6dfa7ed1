"""A cache that is served over HTTP."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from http_client import TOKEN, Client

from kvcore.config import HttpConfig
from kvcore.engine import CacheEngine
from kvcore.service.http import Node, serve_http

Serve = Callable[..., tuple[CacheEngine, Client]]
NOTHING: Mapping[str, Any] = MappingProxyType({})


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Opens a cache with these tiers and other fields (YAML) and serves it; the rest are arguments of `server.http`."""
    with ExitStack() as stack:

        def start(
            tiers: str = "[]", more: str = "l1: {size: 8MiB}", *, node: Mapping[str, Any] = NOTHING, **http: Any
        ) -> tuple[CacheEngine, Client]:
            path = tmp_path / "served.yaml"
            path.write_text(f"min_object_size: 128KiB\nlookup_timeout: 20s\nl2: {tiers}\n{more}\n")
            engine = CacheEngine.open(str(path))
            stack.callback(engine.close)
            http = {"listen": "127.0.0.1:0", "token": TOKEN, **http}
            server = serve_http(Node(engine, **node), HttpConfig(**http))
            stack.callback(server.close)
            return engine, Client(server)

        yield start
