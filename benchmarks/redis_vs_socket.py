"""kvcore-redis beside the least that a client can do, and beside redis-py. One JSON row per line.

    python benchmarks/redis_vs_socket.py [--kib 64 2048 32768] [--mib 96] [--rounds 5] [--unix]

Each side puts and gets the same objects (a page of header and a payload, as the core gives them) on one connection to
one server on this machine. `value` is ours as the core calls it, 32 MiB of objects in a call; `single` is ours with
one object in a call, so that like all the others it waits for each reply before it sends the next command. `limit` is a
bare blocking socket: `sendmsg` of header and payload, `recv_into` until all is there; no deadline, no error handling.
`redis_py` joins the parts for a put, having no other way, and makes new `bytes` in a get, which are then copied where
the object belongs. The sides take turns, each round in another order, and the first round is dropped. A ratio is the
median over the rounds of ours by the limit, a rate the best, in GB/s of payload. Client and server have a core each:
where the system moves them, rates of small objects differ by a factor of four from run to run. Ends with an error when
an object comes back changed.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import redis

from kvcore.api import Context, Item, Loaded, ObjectKey, Stored
from kvcore.testing import aligned
from kvcore.testing.servers.redis import RedisServer
from kvcore_redis.config import RedisConfig
from kvcore_redis.storage import RedisStorage

BUDGET = 0.9
HEADER_BYTES = 4096
PEER = {"object_kib": 2048, "put": 1.83, "get": 4.11}
"""GB/s of LMCache's RESP client on another machine of this kind, in another run: for the order of magnitude."""


def main() -> None:
    parser = argparse.ArgumentParser(description="kvcore-redis beside a bare socket and redis-py.")
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 2048, 32768], help="sizes of an object")
    parser.add_argument("--mib", type=int, default=96, help="MiB that a sample moves")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one that is dropped")
    parser.add_argument("--unix", action="store_true", help="by the Unix socket instead of TCP")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        pin(server.pid)
        for kib in args.kib:
            count = max(2, (args.mib << 10) // kib)
            compare(server, kib << 10, min(count, 512), args.rounds, args.unix)


def compare(server: RedisServer, nbytes: int, count: int, rounds: int, unix: bool) -> None:
    """The rows of one size."""
    server.ask("FLUSHALL")
    memory = Memory(nbytes, count)
    with contextlib.ExitStack() as stack:
        makers = {"kvcore": Ours, "single": Single, "socket": Bare, "redis-py": RedisPy}
        sides = {name: stack.enter_context(make(server, memory, unix)) for name, make in makers.items()}
        rates: dict[str, dict[str, list[float]]] = {op: {name: [] for name in sides} for op in ("put", "get")}
        for round_ in range(rounds + 1):
            names = list(sides)
            for op in ("put", "get"):
                for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                    memory.mark(round_, op)
                    seconds = timed(sides[name].put if op == "put" else sides[name].get)
                    memory.check(round_, op)
                    if round_:
                        rates[op][name].append(count * nbytes / seconds / 1e9)
    for op, by_name in rates.items():
        row = {
            "name": f"redis.{op}",
            "object_kib": nbytes >> 10,
            "by": "unix" if unix else "tcp",
            "value": round(max(by_name["kvcore"]), 2),
            "single": round(max(by_name["single"]), 2),
            "limit": round(max(by_name["socket"]), 2),
            "redis_py": round(max(by_name["redis-py"]), 2),
            "unit": "GB/s",
            "ratio": round(ratio(by_name["kvcore"], by_name["socket"]), 3),
            "ratio_single": round(ratio(by_name["single"], by_name["socket"]), 3),
            "ratio_redis_py": round(ratio(by_name["kvcore"], by_name["redis-py"]), 2),
            "budget": BUDGET,
            "met": ratio(by_name["kvcore"], by_name["socket"]) >= BUDGET,
        }
        if row["object_kib"] == PEER["object_kib"]:
            row["peer"] = PEER[op]
        print(json.dumps(row), flush=True)


class Memory:
    """The objects' memory, one buffer for all, and their names."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.header = aligned(HEADER_BYTES)
        self.payload = aligned(nbytes)
        self.payload[:] = os.urandom(min(nbytes, 1 << 20)) * max(1, nbytes >> 20)
        self.nbytes = HEADER_BYTES + nbytes
        self.keys = [ObjectKey(b"benchmark".ljust(16), os.urandom(32)) for _ in range(count)]

    def mark(self, number: int, op: str) -> None:
        """Give the payload a mark to find again; before a get, take it away."""
        self.payload[-8:] = number.to_bytes(8, "little") if op == "put" else bytes(8)

    def check(self, number: int, op: str) -> None:
        """It is there again."""
        if op == "get" and self.payload[-8:] != number.to_bytes(8, "little"):
            raise SystemExit("an object came back changed")


class Ours:
    """The storage, as many objects per call as the core gives."""

    call_bytes = 32 << 20

    def __init__(self, server: RedisServer, memory: Memory, unix: bool) -> None:
        config = RedisConfig.model_validate({"url": url(server, unix)})
        self._storage = RedisStorage(config, Context())
        items = [Item(key, (memory.header, memory.payload)) for key in memory.keys]
        step = max(1, self.call_bytes // memory.nbytes)
        self._calls = [items[begin : begin + step] for begin in range(0, len(items), step)]

    def __enter__(self) -> "Ours":
        self._storage.open()
        return self

    def __exit__(self, *error: object) -> None:
        self._storage.close()

    def put(self) -> None:
        for items in self._calls:
            insist(self._storage.store(items), Stored)

    def get(self) -> None:
        for items in self._calls:
            insist(self._storage.load(items), Loaded)


class Single(Ours):
    """The storage, one object per call."""

    call_bytes = 0


class Bare:
    """A socket."""

    def __init__(self, server: RedisServer, memory: Memory, unix: bool) -> None:
        self._memory = memory
        self._names = [b"bare:" + key.name.encode() for key in memory.keys]
        if unix:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(server.unix_socket))
        else:
            self._socket = socket.create_connection(("127.0.0.1", server.port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> "Bare":
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def put(self) -> None:
        memory, sock = self._memory, self._socket
        for name in self._names:
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, memory.nbytes)
            views = [memoryview(head), memory.header, memory.payload, memoryview(b"\r\n")]
            while views:
                sent = sock.sendmsg(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if views:
                    views[0] = views[0][sent:]
            if sock.recv(64) != b"+OK\r\n":
                raise SystemExit("the server refused a put")

    def get(self) -> None:
        memory, sock = self._memory, self._socket
        expected = b"$%d\r\n" % memory.nbytes
        for name in self._names:
            sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
            if sock.recv(len(expected), socket.MSG_WAITALL) != expected:
                raise SystemExit("the server refused a get")
            for view in (memory.header, memory.payload):
                at = 0
                while at < len(view):
                    at += sock.recv_into(view[at:])
            sock.recv(2, socket.MSG_WAITALL)


class RedisPy:
    """redis-py without hiredis or with it, as it is installed."""

    def __init__(self, server: RedisServer, memory: Memory, unix: bool) -> None:
        self._memory = memory
        self._names = ["py:" + key.name for key in memory.keys]
        self._client = redis.Redis.from_url(url(server, unix))

    def __enter__(self) -> "RedisPy":
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def put(self) -> None:
        memory = self._memory
        for name in self._names:
            self._client.set(name, b"".join((memory.header, memory.payload)))

    def get(self) -> None:
        memory = self._memory
        for name in self._names:
            data = memoryview(self._client.get(name))
            memory.header[:] = data[:HEADER_BYTES]
            memory.payload[:] = data[HEADER_BYTES:]


def pin(server_pid: int) -> None:
    """Give the server and this process a core each, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[:1])
        for task in os.listdir(f"/proc/{server_pid}/task"):
            os.sched_setaffinity(int(task), cores[1:2])


def url(server: RedisServer, unix: bool) -> str:
    return f"unix://{server.unix_socket}" if unix else server.url


def insist(outcomes: Sequence[object], kind: type) -> None:
    if not all(isinstance(outcome, kind) for outcome in outcomes):
        raise SystemExit(f"not every object was moved: {outcomes[0]}")


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(ours, others, strict=True))


def timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
