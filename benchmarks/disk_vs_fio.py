"""kvcore-disk beside fio: same block size, same number of jobs, O_DIRECT, new files. One JSON row per line.

    python benchmarks/disk_vs_fio.py [--path DIR] [--rounds 7] [--mib 512] [--object-mib 32 3] [--jobs 1 2 4]

Ours stores and loads objects (a header page and an aligned payload, as the core gives them) through as many threads as
the storage prefers, or as `--jobs` says. fio writes and reads as many bytes, one file per job. They take turns, each
round in another order, and a ratio is the median over the rounds; rates are the best, in GB/s of payload. Nothing is
read from the page cache: both use O_DIRECT, and as root the page cache is dropped before each run.
Exits with an error when an object comes back changed.
"""

import argparse
import contextlib
import json
import os
import queue
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcore.api import Context, Item, Loaded, ObjectKey, Stored
from kvcore.plugins import PluginSpec, Registry
from kvcore.testing import aligned
from kvcore_disk.config import DiskConfig
from kvcore_disk.storage import DiskStorage

BUDGET = 0.95
HEADER_BYTES = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description="kvcore-disk beside fio.")
    parser.add_argument("--path", type=Path, help="directory on the disk to measure (default: the temporary directory)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds after one that is dropped")
    parser.add_argument("--mib", type=int, default=512, help="MiB per round and side")
    parser.add_argument("--object-mib", type=int, nargs="+", default=[32, 3], help="sizes of an object")
    parser.add_argument("--jobs", type=int, nargs="+", help="threads and fio jobs (default: what the storage prefers)")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed; on Debian and Ubuntu: apt-get install fio")
    for object_mib in args.object_mib:
        for jobs in args.jobs or [DiskStorage.preferred_concurrency]:
            root = Path(tempfile.mkdtemp(prefix="kvcore-disk-", dir=args.path))
            try:
                compare(root, object_mib << 20, args.mib << 20, jobs, args.rounds)
            finally:
                shutil.rmtree(root, ignore_errors=True)


def compare(root: Path, object_bytes: int, nbytes: int, jobs: int, rounds: int) -> None:
    """The rows of one object size and one number of jobs."""
    count = nbytes // object_bytes // jobs * jobs
    ours, fio = Ours(root / "kvcore", object_bytes, count, jobs), Fio(root / "fio", object_bytes, count, jobs)
    rates: dict[str, list[tuple[float, float]]] = {"store": [], "load": []}
    for round_ in range(rounds + 1):
        sides: list[tuple[Callable[[], float], Callable[[], float]]] = [(ours.store, ours.load), (fio.write, fio.read)]
        order = (0, 1) if round_ % 2 else (1, 0)
        for what, way in (("store", 0), ("load", 1)):
            result = [0.0, 0.0]
            for side in order:
                drop_caches()
                result[side] = sides[side][way]()
            if round_:
                rates[what].append((result[0], result[1]))
    ours.close()
    for what, pairs in rates.items():
        ratio = statistics.median(mine / limit for mine, limit in pairs)
        row = {
            "name": f"disk.{what}",
            "object_mib": object_bytes >> 20,
            "jobs": jobs,
            "value": round(max(mine for mine, _ in pairs), 3),
            "limit": round(max(limit for _, limit in pairs), 3),
            "unit": "GB/s",
            "ratio": round(ratio, 3),
            "ratios": sorted(round(mine / limit, 2) for mine, limit in pairs),
            "budget": BUDGET,
            "met": ratio >= BUDGET,
        }
        print(json.dumps(row), flush=True)


class Ours:
    """A storage and objects to store, a batch of one per call, as the core does with objects of these sizes."""

    def __init__(self, root: Path, object_bytes: int, count: int, jobs: int) -> None:
        registry = Registry()
        context = Context(make_eviction=lambda name: registry.create("eviction", PluginSpec(name, {}, "benchmark")))
        capacity = f"{2 * count * (object_bytes + HEADER_BYTES) + (1 << 20)}B"
        self._storage = DiskStorage(DiskConfig.model_validate({"path": str(root), "capacity": capacity}), context)
        self._storage.open()
        self._jobs, self._nbytes = jobs, count * object_bytes
        pattern = os.urandom(1 << 20) * (object_bytes >> 20)
        self._memory: list[list[memoryview]] = []
        for i in range(count):
            header, payload = aligned(HEADER_BYTES), aligned(object_bytes)
            payload[:] = pattern
            payload[:8] = i.to_bytes(8, "little")
            self._memory.append([header, payload])
        self._keys: list[ObjectKey] = []

    def store(self) -> float:
        """GB/s of storing every object under a new name."""
        self._storage.delete(self._keys)
        self._keys = [ObjectKey(b"benchmark".ljust(16), os.urandom(32)) for _ in self._memory]
        return self._run(lambda item: isinstance(self._storage.store([item])[0], Stored))

    def load(self) -> float:
        """GB/s of loading every object."""
        for header, payload in self._memory:
            header[:8] = payload[:8] = bytes(8)
        rate = self._run(lambda item: isinstance(self._storage.load([item])[0], Loaded))
        if any(int.from_bytes(payload[:8], "little") != i for i, (_, payload) in enumerate(self._memory)):
            raise SystemExit("an object came back changed")
        return rate

    def close(self) -> None:
        self._storage.close()

    def _run(self, call: Callable[[Item], bool]) -> float:
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        for key, buffers in zip(self._keys, self._memory, strict=True):
            items.put(Item(key, buffers))
        failures: list[Item] = []

        def work() -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    item = items.get_nowait()
                    if not call(item):
                        failures.append(item)

        seconds = timed(work, self._jobs)
        if failures:
            raise SystemExit(f"{len(failures)} objects failed")
        return self._nbytes / seconds / 1e9


class Fio:
    """As many bytes in blocks of an object, one file per job."""

    def __init__(self, folder: Path, block_bytes: int, blocks: int, jobs: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._command: Sequence[str] = (
            "fio", "--name=kv", f"--directory={folder}", f"--bs={block_bytes}",
            f"--size={blocks // jobs * block_bytes}", f"--numjobs={jobs}", "--thread", "--ioengine=psync",
            "--direct=1", "--group_reporting", "--output-format=json",
        )  # fmt: skip

    def write(self) -> float:
        """GB/s into new files."""
        for file in self._folder.iterdir():
            file.unlink()
        return self._run("write")

    def read(self) -> float:
        """GB/s from what was written last."""
        return self._run("read")

    def _run(self, way: str) -> float:
        done = subprocess.run([*self._command, f"--rw={way}"], capture_output=True, text=True, check=True)
        report = json.loads(done.stdout[done.stdout.index("{") :])
        return float(report["jobs"][0][way]["bw_bytes"]) / 1e9


def timed(work: Callable[[], None], jobs: int) -> float:
    """Seconds that `jobs` threads need for `work`."""
    threads = [threading.Thread(target=work) for _ in range(jobs)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def drop_caches() -> None:
    """Write back and forget cached pages, where that is allowed. Names and inodes stay: opening a storage reads them."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


if __name__ == "__main__":
    main()
