"""The stores that the demo can keep its KV in: each with its real server on loopback, for the time of the demo."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

CAPACITY = "4GiB"


@contextmanager
def disk(folder: Path) -> Iterator[dict[str, Any]]:
    """A directory."""
    yield {"plugin": "disk", "path": str(folder), "capacity": CAPACITY}


@contextmanager
def nixl(folder: Path) -> Iterator[dict[str, Any]]:
    """A directory, through NIXL."""
    yield {"plugin": "nixl", "backend": "posix", "path": str(folder)}


@contextmanager
def redis(folder: Path) -> Iterator[dict[str, Any]]:
    """A Valkey server."""
    from kvcore.testing.servers.redis import RedisServer

    with RedisServer(folder, options={"maxmemory": "4gb", "maxmemory-policy": "allkeys-lru"}) as server:
        yield {"plugin": "redis", "url": f"redis://127.0.0.1:{server.port}"}


@contextmanager
def s3(folder: Path) -> Iterator[dict[str, Any]]:
    """JuiceFS's S3 gateway. Its credentials go to the engine as they would in production: by the environment."""
    from kvcore.testing.servers.s3 import ACCESS_KEY, SECRET_KEY, JuiceFS

    with JuiceFS(folder) as server:
        os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        yield {
            "plugin": "s3",
            "bucket": "kvcore-demo",
            "create_bucket": True,
            "endpoint": server.endpoint,
            "region": "us-east-1",
        }


@contextmanager
def mooncake(folder: Path) -> Iterator[dict[str, Any]]:
    """A Mooncake master and a process that gives memory to its pool, in a network of their own (needs root)."""
    from kvcore.testing.servers.mooncake import MooncakeHolder, MooncakeMaster
    from kvcore.testing.servers.network import PrivateNetwork

    with PrivateNetwork(), MooncakeMaster(folder) as master, MooncakeHolder(folder, master.address, 2 << 30):
        yield {"plugin": "mooncake", "master_server_address": master.address}


STORES: dict[str, Callable[[Path], AbstractContextManager[dict[str, Any]]]] = {
    "disk": disk,
    "redis": redis,
    "s3": s3,
    "mooncake": mooncake,
    "nixl": nixl,
}
