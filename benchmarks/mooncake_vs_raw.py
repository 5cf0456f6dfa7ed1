"""kvcore-mooncake beside Mooncake's own calls: the same pool, the same objects, one client each. One JSON row per line.

    python benchmarks/mooncake_vs_raw.py [--rounds 4] [--mib 192] [--object-mib 1 4 8]

A master and a holder run on loopback, in a network of their own (root). Ours stores and loads objects as the core gives
them, a header page and a payload in the registered arena; `single` has one object in a call, `batch` as many as the
core puts into one. Raw are `put_from` and `get_into`, one object in a call, and `batch_put_from` and `batch_get_into`,
from and to registered memory in which header and payload are one range. They take turns call by call, so that both meet
the same machine; a rate is that of the median call, in GB/s of payload, and the ratio that of the two rates. The memory
of the pool is touched before. Exits with an error when a call fails or an object comes back changed.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcore.api import Context, Item, Loaded, ObjectKey, Stored
from kvcore.testing import aligned
from kvcore.testing.servers.mooncake import MooncakeHolder, MooncakeMaster
from kvcore.testing.servers.network import PrivateNetwork
from kvcore_mooncake.config import MooncakeConfig
from kvcore_mooncake.memory import address_of
from kvcore_mooncake.storage import MooncakeStorage

BUDGET = 0.9
HEADER_BYTES = 4096
BATCH_BYTES = 32 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="kvcore-mooncake beside Mooncake's own calls.")
    parser.add_argument("--rounds", type=int, default=4, help="rounds after one that is dropped")
    parser.add_argument("--mib", type=int, default=192, help="MiB per round and side")
    parser.add_argument("--object-mib", type=int, nargs="+", default=[1, 4, 8], help="sizes of an object's payload")
    args = parser.parse_args()
    with pool(3 * args.mib << 20) as master:
        for object_mib in args.object_mib:
            compare(master, object_mib << 20, args.mib // object_mib, args.rounds)


@contextlib.contextmanager
def pool(nbytes: int) -> Iterator[str]:
    """A master and a holder of `nbytes`; the master's address."""
    with PrivateNetwork(), tempfile.TemporaryDirectory(prefix="kvcore-mooncake-") as name:
        folder = Path(name)
        with MooncakeMaster(folder) as master, MooncakeHolder(folder, master.address, nbytes):
            yield master.address


def compare(master: str, object_bytes: int, count: int, rounds: int) -> None:
    """The rows of one size."""
    raw, ours = Raw(master, object_bytes, count), Ours(master, object_bytes, count)
    most = max(1, min(count // (2 * MooncakeStorage.preferred_concurrency), BATCH_BYTES // object_bytes))
    for per_call in (1, most):
        times: dict[str, tuple[list[float], list[float]]] = {"store": ([], []), "load": ([], [])}
        for round_ in range(rounds + 1):
            raw.forget()
            for way, sides in (("store", (ours.put, raw.put)), ("load", (ours.get, raw.get))):
                for start in range(0, count - per_call + 1, per_call):
                    batch = range(start, start + per_call)
                    for side in (0, 1) if (start // per_call + round_) % 2 else (1, 0):
                        seconds = timed(sides[side], batch)
                        if round_:
                            times[way][side].append(seconds)
        for way, (mine, limit) in times.items():
            rates = [per_call * object_bytes / statistics.median(side) / 1e9 for side in (mine, limit)]
            row = {
                "name": f"mooncake.{way}",
                "calls": "single" if per_call == 1 else f"batch of {per_call}",
                "object_mib": object_bytes >> 20,
                "samples": len(mine),
                "value": round(rates[0], 3),
                "limit": round(rates[1], 3),
                "unit": "GB/s",
                "ratio": round(rates[0] / rates[1], 3),
                "budget": BUDGET,
                "met": rates[0] / rates[1] >= BUDGET,
            }
            print(json.dumps(row), flush=True)
    ours.close()
    raw.close()


def timed(call: Callable[[range], bool], batch: range) -> float:
    """Seconds that a call takes, which must succeed."""
    begun = time.perf_counter()
    good = call(batch)
    seconds = time.perf_counter() - begun
    if not good:
        raise SystemExit(f"a call for objects {batch} failed")
    return seconds


class Ours:
    """The storage, with the arena registered."""

    def __init__(self, master: str, object_bytes: int, count: int) -> None:
        self._storage = MooncakeStorage(MooncakeConfig(master_server_address=master), Context())
        self._storage.open()
        self._stored = Loaded(HEADER_BYTES + object_bytes)
        self._arena, headers = aligned(object_bytes * count), aligned(HEADER_BYTES * count)
        self._pattern = os.urandom(object_bytes)
        self._arena[:] = self._pattern * count
        self._storage.register_memory(self._arena)
        self._items = [
            Item(
                ObjectKey(b"benchmark".ljust(16), i.to_bytes(32, "big")),
                (
                    headers[i * HEADER_BYTES : (i + 1) * HEADER_BYTES],
                    self._arena[i * object_bytes : (i + 1) * object_bytes],
                ),
            )
            for i in range(count)
        ]

    def put(self, batch: range) -> bool:
        outcomes = self._storage.store([self._items[i] for i in batch])
        return all(isinstance(outcome, Stored) for outcome in outcomes)

    def get(self, batch: range) -> bool:
        return self._storage.load([self._items[i] for i in batch]) == [self._stored] * len(batch)

    def close(self) -> None:
        if any(item.buffers[1] != self._pattern for item in self._items):
            raise SystemExit("an object came back changed")
        self._storage.close()


class Raw:
    """Mooncake's own client."""

    def __init__(self, master: str, object_bytes: int, count: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        self._nbytes = HEADER_BYTES + object_bytes
        self._memory = aligned(self._nbytes * count)
        self._memory[:] = os.urandom(self._nbytes) * count
        start = address_of(self._memory)
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)
        if code or self._store.register_buffer(start, len(self._memory)):
            raise SystemExit("the raw client cannot be set up")
        self._names = [f"raw-{i}" for i in range(count)]
        self._addresses = [start + i * self._nbytes for i in range(count)]

    def put(self, batch: range) -> bool:
        names, addresses = self._names[batch.start : batch.stop], self._addresses[batch.start : batch.stop]
        if len(batch) == 1:
            return bool(self._store.put_from(names[0], addresses[0], self._nbytes) == 0)
        return not any(self._store.batch_put_from(names, addresses, [self._nbytes] * len(batch)))

    def get(self, batch: range) -> bool:
        names, addresses = self._names[batch.start : batch.stop], self._addresses[batch.start : batch.stop]
        if len(batch) == 1:
            return bool(self._store.get_into(names[0], addresses[0], self._nbytes) == self._nbytes)
        sizes = [self._nbytes] * len(batch)
        return bool(self._store.batch_get_into(names, addresses, sizes) == sizes)

    def forget(self) -> None:
        """Remove every object of the pool."""
        self._store.remove_all(True)

    def close(self) -> None:
        self._store.close()


if __name__ == "__main__":
    main()
