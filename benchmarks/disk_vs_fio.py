"""kvcore-disk beside fio: same block size, same number of jobs, O_DIRECT, new files. One JSON row per line.

    python benchmarks/disk_vs_fio.py [--path DIR] [--rounds 5] [--mib 1024] [--object-mib 32 3] [--jobs 1 2 4]

Ours stores and loads objects (a header page and an aligned payload, as the core gives them) through as many threads as
the storage prefers, or as `--jobs` says. fio writes and reads as many files of an object's size, each in one block and
with as many jobs; like ours it allocates as it writes, but its rate leaves out the making of files. They take
turns, each round in another order; a ratio is the median over the rounds, a rate the best, in GB/s of payload. Both use
O_DIRECT, and as root the page cache is dropped before each load. Of short runs fio says too much, since it takes its
longest job for the time of all: keep `--mib` at many objects per job.

Each thread and each job has one buffer of huge pages. For a device that takes the segments of a transfer one by one (a
virtual disk) small pages that lie scattered cost up to half of the rate, by luck, on either side. `--arena` shows that:
every object lies in an arena then, as in an engine, whose pages are huge where the system allows it (at `advise` in
`/sys/kernel/mm/transparent_hugepage/shmem_enabled`). Exits with an error when an object comes back changed.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcore.api import Context, Item, Loaded, ObjectKey, Stored
from kvcore.l1 import Arena
from kvcore.plugins import PluginSpec, Registry
from kvcore.testing import aligned
from kvcore_disk.config import DiskConfig
from kvcore_disk.storage import DiskStorage

BUDGET = 0.95
HEADER_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="kvcore-disk beside fio.")
    parser.add_argument("--path", type=Path, help="directory on the disk to measure (default: the temporary directory)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one that is dropped")
    parser.add_argument("--mib", type=int, default=1024, help="MiB per round and side")
    parser.add_argument("--object-mib", type=int, nargs="+", default=[32, 3], help="sizes of an object")
    parser.add_argument("--arena", action="store_true", help="objects lie in an arena; see above")
    parser.add_argument("--jobs", type=int, nargs="+", help="threads and fio jobs (default: what the storage prefers)")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed; on Debian and Ubuntu: apt-get install fio")
    for object_mib in args.object_mib:
        for jobs in args.jobs or [DiskStorage.preferred_concurrency]:
            root = Path(tempfile.mkdtemp(prefix="kvcore-disk-", dir=args.path))
            try:
                compare(root, object_mib << 20, args.mib << 20, jobs, args.rounds, args.arena)
            finally:
                shutil.rmtree(root, ignore_errors=True)


def compare(root: Path, object_bytes: int, nbytes: int, jobs: int, rounds: int, in_arena: bool) -> None:
    """The rows of one object size and one number of jobs."""
    count = nbytes // object_bytes // jobs * jobs
    arena = Arena(count * object_bytes) if in_arena else None
    ours, fio = Ours(root / "kvcore", object_bytes, count, jobs, arena), Fio(root / "fio", object_bytes, count, jobs)
    rates: dict[str, list[tuple[float, float]]] = {"store": [], "load": []}
    for round_ in range(rounds + 1):
        sides: list[tuple[Callable[[], float], Callable[[], float]]] = [(ours.store, ours.load), (fio.write, fio.read)]
        order = (0, 1) if round_ % 2 else (1, 0)
        for what, way in (("store", 0), ("load", 1)):
            result = [0.0, 0.0]
            for side in order:
                if way:
                    drop_caches()
                result[side] = sides[side][way]()
            if round_:
                rates[what].append((result[0], result[1]))
    ours.close()
    if arena is not None:
        arena.close()
    for what, pairs in rates.items():
        ratio = statistics.median(mine / limit for mine, limit in pairs)
        row = {
            "name": f"disk.{what}",
            "object_mib": object_bytes >> 20,
            "jobs": jobs,
            "memory": "arena" if in_arena else "huge pages",
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

    def __init__(self, root: Path, object_bytes: int, count: int, jobs: int, arena: Arena | None) -> None:
        registry = Registry()
        context = Context(make_eviction=lambda name: registry.create("eviction", PluginSpec(name, {}, "benchmark")))
        capacity = f"{2 * count * (object_bytes + HEADER_BYTES) + (1 << 20)}B"
        self._storage = DiskStorage(DiskConfig.model_validate({"path": str(root), "capacity": capacity}), context)
        self._storage.open()
        self._count, self._object_bytes = count, object_bytes
        self._headers = [aligned(HEADER_BYTES) for _ in range(jobs)]
        self._payloads = [huge_pages(object_bytes) for _ in range(jobs)]
        if arena is not None:
            self._payloads = [arena.buffer[i * object_bytes : (i + 1) * object_bytes] for i in range(count)]
        pattern = os.urandom(1 << 20) * (object_bytes >> 20)
        for payload in self._payloads:
            payload[:] = pattern
        self._keys: list[ObjectKey] = []

    def store(self) -> float:
        """GB/s of storing every object under a new name."""
        self._storage.delete(self._keys)
        self._keys = [ObjectKey(b"benchmark".ljust(16), os.urandom(32)) for _ in range(self._count)]

        def call(number: int, item: Item) -> bool:
            item.buffers[1][-8:] = number.to_bytes(8, "little")
            return isinstance(self._storage.store([item])[0], Stored)

        return self._run(call)

    def load(self) -> float:
        """GB/s of loading every object."""

        def call(number: int, item: Item) -> bool:
            item.buffers[1][-8:] = bytes(8)
            outcome = self._storage.load([item])[0]
            return isinstance(outcome, Loaded) and item.buffers[1][-8:] == number.to_bytes(8, "little")

        return self._run(call)

    def close(self) -> None:
        self._storage.close()
        self._payloads.clear()

    def _run(self, call: Callable[[int, Item], bool]) -> float:
        numbers = itertools.count()
        failures: list[int] = []

        def work(job: int) -> None:
            while (number := next(numbers)) < self._count:
                payload = self._payloads[job if len(self._payloads) < self._count else number]
                if not call(number, Item(self._keys[number], (self._headers[job], payload))):
                    failures.append(number)

        seconds = timed(work, len(self._headers))
        if failures:
            raise SystemExit(f"{len(failures)} objects failed or came back changed")
        return self._count * self._object_bytes / seconds / 1e9


class Fio:
    """As many files of one block each."""

    def __init__(self, folder: Path, block_bytes: int, blocks: int, jobs: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._env = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        self._command: Sequence[str] = (
            "fio", "--name=kv", f"--directory={folder}", f"--bs={block_bytes}",
            f"--size={blocks // jobs * block_bytes}", f"--nrfiles={blocks // jobs}", "--file_service_type=sequential",
            f"--numjobs={jobs}", "--thread", "--ioengine=psync",
            "--direct=1", "--fallocate=none", "--group_reporting", "--output-format=json",
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
        command = [*self._command, f"--rw={way}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=self._env)
        report = json.loads(done.stdout[done.stdout.index("{") :])
        return float(report["jobs"][0][way]["bw_bytes"]) / 1e9


def huge_pages(nbytes: int) -> memoryview:
    """Memory of `nbytes` in huge pages, where the system has them."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES
    return memoryview(memory)[start : start + nbytes]


def timed(work: Callable[[int], None], jobs: int) -> float:
    """Seconds that `jobs` threads need for `work`."""
    threads = [threading.Thread(target=work, args=(job,)) for job in range(jobs)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def drop_caches() -> None:
    """Write back and forget cached pages, where that is allowed. Not names and inodes: opening a storage reads them."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


if __name__ == "__main__":
    main()
