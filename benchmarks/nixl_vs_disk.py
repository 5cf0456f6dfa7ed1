"""kvcore-nixl's files beside kvcore-disk and plain O_DIRECT. One JSON row per line.

    python benchmarks/nixl_vs_disk.py [--path DIR] [--rounds 5] [--mib 256] [--object-mib 2 32]

Each side stores and loads the same objects, a header page and a payload in an arena, on as many threads and in batches
as large as the core makes them. `plain` is what they all rest on: one pwritev or preadv by O_DIRECT into a file that is
made and closed, without names, accounts or a rename. The sides take turns, each round in another order; a rate is the
best, in GB/s of payload, a ratio to `plain` the median over the rounds. Exits with an error when an object comes back
changed. The storages are opened once; every object gets a new name.
"""

import argparse
import itertools
import json
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvcore.api import BlockingStorage, Context, Item, Loaded, ObjectKey, Stored
from kvcore.l1 import Arena
from kvcore.plugins import PluginSpec, Registry
from kvcore_disk.config import DiskConfig
from kvcore_disk.storage import DiskStorage
from kvcore_nixl.config import NixlConfig
from kvcore_nixl.storage import NixlStorage

HEADER_BYTES = 4096
THREADS = 4
BATCH_BYTES = 32 << 20


class Side(Protocol):
    """One way to keep objects."""

    def store(self, items: Sequence[Item]) -> None:
        """Write a batch."""

    def load(self, items: Sequence[Item]) -> None:
        """Read a batch."""

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Forget objects."""


def main() -> None:
    parser = argparse.ArgumentParser(description="kvcore-nixl beside kvcore-disk and plain O_DIRECT.")
    parser.add_argument("--path", type=Path, help="directory on the disk to measure (default: the temporary directory)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one that is dropped")
    parser.add_argument("--mib", type=int, default=256, help="MiB per round and side")
    parser.add_argument("--object-mib", type=int, nargs="+", default=[2, 32], help="sizes of an object")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kvcore-nixl-", dir=args.path))
    try:
        for object_mib in args.object_mib:
            compare(root / str(object_mib), object_mib << 20, args.mib << 20, args.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def compare(root: Path, object_bytes: int, nbytes: int, rounds: int) -> None:
    """The rows of one object size."""
    root.mkdir()
    arena = Arena(nbytes)
    arena.buffer[:] = os.urandom(1 << 20) * (nbytes >> 20)
    sides: dict[str, Side] = {
        "plain": Plain(root / "plain"),
        "disk": Ours(disk(root / "disk", nbytes)),
        "nixl-aio": Ours(nixl(root / "aio", arena)),
        "nixl-uring": Ours(nixl(root / "uring", arena, use_uring=True)),
    }
    rates: dict[tuple[str, str], list[float]] = {(name, way): [] for name in sides for way in ("store", "load")}
    names = list(sides)
    for round_ in range(rounds + 1):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            stored, loaded = run(sides[name], arena, object_bytes)
            if round_:
                rates[name, "store"].append(stored)
                rates[name, "load"].append(loaded)
    for (name, way), values in rates.items():
        ratios = [value / plain for value, plain in zip(values, rates["plain", way], strict=True)]
        row = {
            "name": f"{name}.{way}",
            "object_mib": object_bytes >> 20,
            "threads": THREADS,
            "value": round(max(values), 3),
            "unit": "GB/s",
            "ratio_to_plain": round(statistics.median(ratios), 3),
            "ratios": sorted(round(ratio, 2) for ratio in ratios),
        }
        print(json.dumps(row), flush=True)


def run(side: Side, arena: Arena, object_bytes: int) -> tuple[float, float]:
    """GB/s of storing what lies in the arena under new names, and of loading it again."""
    count = arena.size // object_bytes
    keys = [ObjectKey(b"benchmark".ljust(16), os.urandom(32)) for _ in range(count)]
    headers = memoryview(mmap.mmap(-1, count * HEADER_BYTES))
    items = []
    for i, key in enumerate(keys):
        payload = arena.buffer[i * object_bytes : (i + 1) * object_bytes]
        payload[-8:] = i.to_bytes(8, "little")
        items.append(Item(key, (headers[i * HEADER_BYTES : (i + 1) * HEADER_BYTES], payload)))
    size = max(1, min(-(-count // (2 * THREADS)), BATCH_BYTES // object_bytes))
    batches = [items[at : at + size] for at in range(0, count, size)]
    stored_s = timed(side.store, batches)
    for item in items:
        item.buffers[1][-8:] = bytes(8)
    loaded_s = timed(side.load, batches)
    for i, item in enumerate(items):
        if item.buffers[1][-8:] != i.to_bytes(8, "little"):
            raise SystemExit(f"object {i} came back changed")
    side.delete(keys)
    return count * object_bytes / stored_s / 1e9, count * object_bytes / loaded_s / 1e9


class Ours:
    """A storage of ours."""

    def __init__(self, storage: BlockingStorage) -> None:
        self._storage = storage

    def store(self, items: Sequence[Item]) -> None:
        check(self._storage.store(items), Stored)

    def load(self, items: Sequence[Item]) -> None:
        check(self._storage.load(items), Loaded)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self._storage.delete(keys)


class Plain:
    """Files, and nothing else."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self._root = root

    def store(self, items: Sequence[Item]) -> None:
        for item in items:
            fd = os.open(self._root / item.key.name, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
            if os.pwritev(fd, item.buffers, 0) != item.nbytes:
                raise SystemExit("a short write")
            os.close(fd)

    def load(self, items: Sequence[Item]) -> None:
        for item in items:
            fd = os.open(self._root / item.key.name, os.O_RDONLY | os.O_DIRECT)
            if os.preadv(fd, item.buffers, 0) != item.nbytes:
                raise SystemExit("a short read")
            os.close(fd)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            (self._root / key.name).unlink()


def disk(root: Path, nbytes: int) -> DiskStorage:
    """An open kvcore-disk with room for everything."""
    registry = Registry()
    context = Context(make_eviction=lambda name: registry.create("eviction", PluginSpec(name, {}, "benchmark")))
    storage = DiskStorage(DiskConfig.model_validate({"path": str(root), "capacity": f"{4 * nbytes}B"}), context)
    storage.open()
    return storage


def nixl(root: Path, arena: Arena, **params: bool) -> NixlStorage:
    """An open kvcore-nixl that knows the arena."""
    config = NixlConfig.model_validate({"path": str(root), "direct": "on", "params": params})
    storage = NixlStorage(config, Context())
    storage.open()
    storage.register_memory(arena.buffer)
    return storage


def timed(call: Callable[[Sequence[Item]], None], batches: Sequence[Sequence[Item]]) -> float:
    """Seconds that all batches take on `THREADS` threads."""
    numbers = itertools.count()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while (number := next(numbers)) < len(batches):
                call(batches[number])
        except BaseException as error:  # shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    if failures:
        raise SystemExit(f"a batch failed: {failures[0]}")
    return seconds


def check(outcomes: Sequence[object], kind: type) -> None:
    """Every outcome must be of this kind."""
    for outcome in outcomes:
        if not isinstance(outcome, kind):
            raise SystemExit(f"an object failed: {outcome}")


if __name__ == "__main__":
    main()
