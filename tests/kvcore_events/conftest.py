"""A subscriber as routers have one, and caches that publish to it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from events_reader import Subscriber

from kvcore.engine import CacheEngine
from kvcore.testing.servers import free_port


@pytest.fixture
def endpoint() -> str:
    """A free address of this machine."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def replay_endpoint() -> str:
    """Another one."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def subscribe() -> Iterator[Callable[..., Subscriber]]:
    """Subscribes to an address; closed at the end."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        yield lambda *where, **more: stack.enter_context(Subscriber(context, *where, **more))


@pytest.fixture
def cache(tmp_path: Path, endpoint: str, replay_endpoint: str) -> Iterator[Callable[..., CacheEngine]]:
    """Opens a cache whose objects are published at `endpoint`."""
    opened: list[CacheEngine] = []

    def make(l2: str = "[]", **options: Any) -> CacheEngine:
        hook = {"plugin": "events", "endpoint": endpoint, "replay_endpoint": replay_endpoint, "block_hashes": "bytes"}
        hook |= options
        path = tmp_path / "kvcore.yaml"
        path.write_text(
            f"l1: {{size: 8MiB}}\nmin_object_size: 128KiB\nl2: {l2}\nhooks: [{msgspec.json.encode(hook).decode()}]\n"
        )
        opened.append(CacheEngine.open(str(path), name="published"))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()
