"""What the disk can do: fio, or a loop of `pwritev` and `preadv` where fio is not installed."""

import json
import mmap
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvcore_bench.speed.measure import Sampler


class Limit(NamedTuple):
    """Samplers of a write into new files and of a read of what was written last, in GB/s."""

    write: Sampler
    read: Sampler
    note: str


def fio_limit(root: Path, block_bytes: int, blocks: int, depth: int) -> Limit:
    """fio with O_DIRECT: `depth` threads, one block per system call, a file of its own per thread."""
    folder = root / "fio"
    folder.mkdir()
    jobs = min(depth, blocks)

    def fio(way: str) -> float:
        if way == "write":
            for file in folder.iterdir():
                file.unlink()
        done = subprocess.run(
            [
                "fio", "--name=kv", f"--directory={folder}", f"--rw={way}", f"--bs={block_bytes}",
                f"--size={blocks // jobs * block_bytes}", f"--numjobs={jobs}", "--thread", "--ioengine=psync",
                "--direct=1", "--fallocate=none", "--group_reporting", "--output-format=json",
            ],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        report = json.loads(done.stdout[done.stdout.index("{") :])
        return float(report["jobs"][0][way]["bw_bytes"]) / 1e9

    return Limit(
        lambda: fio("write"), lambda: fio("read"), f"limit: fio, psync, {jobs} jobs, bs {block_bytes >> 20} MiB"
    )


def raw_limit(root: Path, block_bytes: int, blocks: int, depth: int) -> Limit:
    """The same by system calls of our own, through the page cache where the file system refuses O_DIRECT."""
    folder = root / "raw"
    folder.mkdir()
    jobs = min(depth, blocks)
    buffers = [mmap.mmap(-1, block_bytes) for _ in range(jobs)]
    for buffer in buffers:
        buffer.write(os.urandom(1 << 20) * (block_bytes >> 20))
    flags = os.O_CREAT | os.O_RDWR

    def each(job: int, call: Callable[[int, mmap.mmap], int]) -> None:
        for i in range(job, blocks, jobs):
            try:
                fd = os.open(folder / str(i), flags | os.O_DIRECT, 0o600)
            except OSError:
                fd = os.open(folder / str(i), flags, 0o600)
            try:
                if call(fd, buffers[job]) != block_bytes:
                    raise OSError("a short transfer")
            finally:
                os.close(fd)

    def sample(call: Callable[[int, mmap.mmap], int]) -> float:
        begun = time.perf_counter()
        with ThreadPoolExecutor(jobs) as pool:  # waits for its threads, also when interrupted
            list(pool.map(lambda job: each(job, call), range(jobs)))
        return blocks * block_bytes / (time.perf_counter() - begun) / 1e9

    def write() -> float:
        for file in folder.iterdir():
            file.unlink()
        return sample(lambda fd, buffer: os.pwritev(fd, [buffer], 0))

    note = f"limit: pwritev and preadv, {jobs} threads, {block_bytes >> 20} MiB (fio is not installed)"
    return Limit(write, lambda: sample(lambda fd, buffer: os.preadv(fd, [buffer], 0)), note)
