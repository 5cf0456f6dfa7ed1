"""What stands beside a tier's rate: the file system that its path is in, or loopback sockets."""

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvcore.api import BlockingStorage, Storage
from kvcore.cli.bench.disk_limit import Limit, fio_limit, raw_limit
from kvcore.cli.bench.measure import Sampler


@contextmanager
def limit_of(
    storage: Storage | BlockingStorage, options: Any, object_bytes: int, objects: int
) -> Iterator[Limit | None]:
    """Samplers that move the same bytes without kvcore; None for a storage with neither a path nor a network."""
    depth = max(1, storage.preferred_concurrency)
    path = getattr(options, "path", None)
    if path is not None:
        with _directory(Path(path).expanduser().absolute()) as root:
            fio = shutil.which("fio") is not None
            limit = (fio_limit if fio else raw_limit)(root, object_bytes, objects, depth)
            way = "fio" if fio else "pwritev and preadv"
            yield limit._replace(note=f"limit: {way} in the same file system, {depth} at once")
    elif storage.shared:
        sample = _sockets(object_bytes, objects, depth)
        yield Limit(sample, sample, f"limit: {depth} loopback sockets, which is not this store's network")
    else:
        yield None


@contextmanager
def _directory(path: Path) -> Iterator[Path]:
    """A folder in the file system of `path`; beside it where that goes, so that no foreign file is in a store."""
    while not path.is_dir():
        path = path.parent
    beside = path.parent.stat().st_dev == path.stat().st_dev and os.access(path.parent, os.W_OK)
    root = Path(tempfile.mkdtemp(prefix="kvcore-bench-", dir=path.parent if beside else path))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _sockets(object_bytes: int, objects: int, depth: int) -> Sampler:
    """GB/s over `depth` connections of the loopback device, from memory to memory."""
    each = -(-objects // depth)
    block = bytes(object_bytes)

    def send(connection: socket.socket) -> None:
        for _ in range(each):
            connection.sendall(block)

    def receive(connection: socket.socket) -> None:
        room = memoryview(bytearray(object_bytes))
        for _ in range(each):
            at = 0
            while at < object_bytes and (got := connection.recv_into(room[at:])):
                at += got

    def sample() -> float:
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threads: list[threading.Thread] = []
            for _ in range(depth):
                near = stack.enter_context(socket.create_connection(listener.getsockname()))
                far = stack.enter_context(listener.accept()[0])
                work: tuple[tuple[Callable[[socket.socket], None], socket.socket], ...] = ((send, near), (receive, far))
                threads += [threading.Thread(target=call, args=(end,), daemon=True) for call, end in work]
            begun = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return depth * each * object_bytes / (time.perf_counter() - begun) / 1e9

    return sample
