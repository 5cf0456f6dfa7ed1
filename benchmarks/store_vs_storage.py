"""The object store beside the storage that it stands on. One JSON row per line.

    python benchmarks/store_vs_storage.py [--path DIR] [--rounds 9] [--objects 64] [--kib 1024] [--pieces 1] [--memory]

Both move the same objects between the same buffers, through the same number of threads: the storage by itself gets a
frame (a header page and the payload, as the core gives it) for each object; the store is called as an engine calls it,
and makes and checks the frames. So a row has the time of the storage, that of the store, their ratio, and in processor
time, which other processes disturb less: that of the checksums alone (XXH3 of all payloads), and what the store adds
per object, with them and beside them. Samples take turns; a time is the best of the rounds, the one least disturbed.
With `--memory` the storage is a dict, whose own cost is copying.
"""

import argparse
import gc
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvcore.api import Item, Loaded, ObjectKey, Stored
from kvcore.engine import GroupSpec, ModelSpec
from kvcore.l2 import frame
from kvcore.l2.buffers import headers
from kvcore.plugins import PluginSpec, Registry
from kvcore.service import open_store
from kvcore.testing import aligned


class Sample(NamedTuple):
    """Seconds on the wall and of this process's processor time."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> "Sample":
        return cls(time.perf_counter(), time.process_time())

    @classmethod
    def since(cls, begun: "Sample") -> "Sample":
        now = cls.now()
        return cls(now.wall_s - begun.wall_s, now.cpu_s - begun.cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="The object store beside its storage.")
    parser.add_argument("--path", type=Path, help="directory on the disk to measure (default: the temporary directory)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--objects", type=int, default=64)
    parser.add_argument("--kib", type=int, default=1024, help="KiB of an object")
    parser.add_argument("--pieces", type=int, default=1, help="buffers that an object lies in")
    parser.add_argument("--memory", action="store_true", help="a dict in the place of the disk")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kvcore-store-", dir=args.path))
    try:
        for row in measured(args, root):
            print(json.dumps(row), flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measured(args: argparse.Namespace, root: Path) -> list[dict[str, object]]:
    """A row for stores and one for loads."""
    nbytes, count = args.kib << 10, args.objects
    options = {} if args.memory else {"path": str(root / "alone"), "capacity": f"{8 * args.kib * count}KiB"}
    plugin = "memory" if args.memory else "disk"
    alone = Registry().create("storage", PluginSpec(plugin, options, "bench"))
    alone.open()
    tier = {"plugin": plugin, **({} if args.memory else {**options, "path": str(root / "store")})}
    store = open_store(flags={"l2": [{"storage": tier}]})
    model = ModelSpec("b", "m", "w", "u8", 1, "p", "cpu", "", 16, 1, (GroupSpec(("a",), (nbytes,)),))
    space = store.register(model, "bench/1")
    memory = aligned(nbytes * count)
    for at in range(0, len(memory), nbytes):
        memory[at : at + nbytes] = os.urandom(nbytes)
    step = -(-nbytes // args.pieces)
    buffers = [
        [memory[i * nbytes + at : min(i * nbytes + at + step, (i + 1) * nbytes)] for at in range(0, nbytes, step)]
        for i in range(count)
    ]
    pages = headers(count)
    pool = ThreadPoolExecutor(alone.preferred_concurrency)
    batch = max(1, min(-(-count // (2 * alone.preferred_concurrency)), (32 << 20) // nbytes))  # as a tier cuts them

    def storage(call: Callable[[list[Item]], list[object]], keys: list[ObjectKey], wanted: type) -> Sample:
        items = [Item(k, (p, *b)) for k, p, b in zip(keys, pages, buffers, strict=True)]
        begun = Sample.now()
        outcomes = [o for part in pool.map(call, [items[i : i + batch] for i in range(0, count, batch)]) for o in part]
        took = Sample.since(begun)
        assert all(isinstance(o, wanted) for o in outcomes), outcomes
        return took

    def face(call: Callable[..., list[bool]], hashes: list[bytes]) -> Sample:
        begun = Sample.now()
        done = call(space, hashes, buffers)
        took = Sample.since(begun)
        assert all(done)
        return took

    def sums() -> Sample:
        begun = Sample.now()
        for payload in buffers:
            frame.checksum(payload)
        return Sample.since(begun)

    samples: dict[str, list[tuple[Sample, Sample, Sample]]] = {"store": [], "load": []}
    for round_ in range(args.rounds + 1):
        hashes = [secrets.token_bytes(32) for _ in range(count)]
        keys = [ObjectKey(bytes(16), h) for h in hashes]
        gc.collect()
        turns = [lambda: storage(alone.store, keys, Stored), lambda: face(store.store, hashes)]  # noqa: B023
        loads = [lambda: storage(alone.load, keys, Loaded), lambda: face(store.load, hashes)]  # noqa: B023
        order = (0, 1) if round_ % 2 else (1, 0)
        for name, ways in (("store", turns), ("load", loads)):
            took = {i: ways[i]() for i in order}
            samples[name].append((took[0], took[1], sums()))
        alone.delete(keys)
        store.delete(space, hashes)
    pool.shutdown()
    store.close()
    alone.close()
    rows: list[dict[str, object]] = []
    for name, rounds in samples.items():
        mine = rounds[1:]
        storage_s, store_s = (min(row[i].wall_s for row in mine) for i in (0, 1))
        storage_cpu_s, store_cpu_s, sums_s = (min(row[i].cpu_s for row in mine) for i in (0, 1, 2))
        added = store_cpu_s - storage_cpu_s
        rows.append({
            "what": name, "storage": plugin, "objects": count, "KiB": args.kib, "buffers": args.pieces,
            "storage ms": round(storage_s * 1e3, 2), "store ms": round(store_s * 1e3, 2),
            "ratio": round(store_s / storage_s, 3),
            "checksum us": round(sums_s / count * 1e6, 1),
            "added us": round(added / count * 1e6, 1),
            "beside the checksum us": round((added - sums_s) / count * 1e6, 1),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
