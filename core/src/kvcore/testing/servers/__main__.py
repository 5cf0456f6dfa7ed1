"""`python -m kvcore.testing.servers redis|s3|mooncake`: a real server to try a storage with, until Ctrl-C."""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import yaml

from kvcore.testing.servers.process import ServerError

ROOM_BYTES = 1 << 30


def redis(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """A Valkey or Redis server that evicts."""
    from kvcore.testing.servers.redis import RedisServer

    limits: dict[str, str | int] = {"maxmemory": ROOM_BYTES, "maxmemory-policy": "allkeys-lru"}
    return {"plugin": "redis", "url": stack.enter_context(RedisServer(folder, options=limits)).url}


def s3(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """JuiceFS's S3 gateway."""
    from kvcore.testing.servers.s3 import ACCESS_KEY, SECRET_KEY, JuiceFS

    endpoint = stack.enter_context(JuiceFS(folder)).endpoint
    keys = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}
    return {"plugin": "s3", "bucket": "kvcore", "create_bucket": True, "endpoint": endpoint, **keys}


def mooncake(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """A master, and a holder, which listens on all addresses of the machine."""
    from kvcore.testing.servers.mooncake import MooncakeHolder, MooncakeMaster

    master = stack.enter_context(MooncakeMaster(folder))
    stack.enter_context(MooncakeHolder(folder, master.address, ROOM_BYTES))
    return {"plugin": "mooncake", "master_server_address": master.address}


SERVERS: dict[str, Callable[[ExitStack, Path], dict[str, Any]]] = {"redis": redis, "s3": s3, "mooncake": mooncake}


def main() -> int:
    """Start it in a temporary folder, print the tier's YAML, wait for a signal."""
    parser = argparse.ArgumentParser("python -m kvcore.testing.servers", description=__doc__)
    parser.add_argument("server", choices=SERVERS)
    name = parser.parse_args().server
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"kvcore-{name}-"))
        try:
            options = SERVERS[name](stack, Path(folder))
        except ServerError as error:
            print(f"kvcore: {error}", file=sys.stderr)
            return 1
        print(yaml.safe_dump({"l2": [{"storage": options}]}, sort_keys=False) + "# until Ctrl-C", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
