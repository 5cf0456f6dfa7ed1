"""What stands beside a tier's rate: the file system that its path is in, or loopback sockets."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvcore.api import BlockingStorage, Storage, StorageError
from kvcore_bench.speed import socket_end
from kvcore_bench.speed.disk_limit import Limit, fio_limit, raw_limit
from kvcore_bench.speed.measure import Sampler


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
        with _sockets(object_bytes, objects, depth) as limit:
            yield limit
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
        for _ in range(20):  # a thread of a sample that was interrupted may be writing yet
            shutil.rmtree(root, ignore_errors=True)
            if not root.exists():
                break
            time.sleep(0.1)


@contextmanager
def _sockets(object_bytes: int, objects: int, depth: int) -> Iterator[Limit]:
    """Objects to and from another process over `depth` TCP connections of the loopback device."""
    depth = min(depth, objects)
    words = [sys.executable, socket_end.__file__, str(depth), str(object_bytes)]
    with ExitStack() as stack:
        # In a session of its own, so that it does not hear the terminal's Ctrl-C.
        far = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True))
        stack.callback(far.kill)
        assert far.stdout is not None
        port = far.stdout.readline()
        if not port:
            raise StorageError("the far end of the loopback limit did not start")
        address = ("127.0.0.1", int(port))
        near = [stack.enter_context(socket.create_connection(address)) for _ in range(depth)]
        for end in near:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rooms = [memoryview(bytearray(b"k" * object_bytes)) for _ in range(depth)]
        answer = memoryview(bytearray(1))

        def store(end: socket.socket, room: memoryview) -> None:
            end.sendall(b"w")
            end.sendall(room)
            socket_end.receive(end, answer)

        def load(end: socket.socket, room: memoryview) -> None:
            end.sendall(b"r")
            socket_end.receive(end, room)

        def sampler(call: Callable[[socket.socket, memoryview], None]) -> Sampler:
            def each(job: int) -> None:
                for _ in range(job, objects, depth):
                    call(near[job], rooms[job])

            def sample() -> float:
                begun = time.perf_counter()
                with ThreadPoolExecutor(depth) as pool:
                    list(pool.map(each, range(depth)))
                return objects * object_bytes / (time.perf_counter() - begun) / 1e9

            return sample

        note = f"limit: another process by {depth} loopback sockets, which is not this store's network"
        yield Limit(sampler(store), sampler(load), note)
