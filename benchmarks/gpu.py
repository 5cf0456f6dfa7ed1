"""Paged KV on an NVIDIA GPU to and from the arena: GB/s, and the ratio to one pinned cudaMemcpyAsync of as many bytes,
taken in turns; then what a matmul loses while KV is copied beside it. One JSON object a line.

    python benchmarks/gpu.py [--rounds N] [--device N] [NAME ...]      (or: make bench-gpu)

`auto` is what kvcore chooses; `direct` and `staged` force one way, `torch` the one without CuPy. `layer` copies the
layers of a call one by one, as layer-by-layer loading does.
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvcore.api import ObjectLayout
from kvcore.l1 import Arena
from kvcore.transfer import Copy, PagedCache
from kvcore.transfer.cuda import gpu_of
from kvcore.transfer.cuda.lanes import Speeds
from kvcore.transfer.cuda.support import obstacle

# name: (memory layout, layers, bytes of a block, blocks an object, objects)
CASES = {
    "llama8b.layers_first": ("one", 32, 65536, 2, 96),
    "llama8b.blocks_first": ("interleaved", 32, 65536, 2, 96),
    "llama8b.kv_apart": ("split", 32, 65536, 2, 96),
    "llama8b.large_objects": ("one", 32, 65536, 16, 12),
    "llama70b.tp8": ("one", 80, 8192, 4, 96),
    "deepseek.mla": ("one", 61, 18432, 2, 96),
}
FORCED = {"direct": Speeds(1e30, 1.0, 0.0), "staged": Speeds(1.0, 1e30, 0.0)}


def layers(kind: str, count: int, blocks: int, nbytes: int, device: torch.device) -> list[torch.Tensor]:
    """A layer each, blocks first, of random bytes."""
    make = partial(torch.randint, 0, 255, dtype=torch.uint8, device=device)
    if kind == "one":
        return list(make((count, blocks, nbytes)))
    if kind == "interleaved":
        return list(make((blocks, count, nbytes)).transpose(0, 1))
    return [make((2, blocks, nbytes // 2)).transpose(0, 1) for _ in range(count)]


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


@contextmanager
def forced(way: str, device: torch.device) -> Iterator[None]:
    """Have copies take one way."""
    gpu = gpu_of(device.index)
    if way not in FORCED or gpu is None:
        yield
        return
    before = gpu.save.speeds, gpu.load.speeds
    gpu.save.speeds, gpu.load.speeds = (replace(FORCED[way], groups=s.groups) for s in before)
    try:
        yield
    finally:
        gpu.save.speeds, gpu.load.speeds = before


def ready(cache: PagedCache) -> PagedCache:
    """Once its arena is pinned."""
    for movers in cache._movers:
        for mover in movers:
            if not getattr(mover, "arena", None) or not mover.arena.wait():
                raise SystemExit("the arena could not be pinned: what is measured would not be what users get")
    return cache


def tell(name: str, case: str, value: float, unit: str, **more: Any) -> None:
    print(json.dumps({"name": name, "case": case, "value": value, "unit": unit, **more}), flush=True)


def run(name: str, rounds: int, device: torch.device) -> None:
    kind, count, nbytes, blocks, objects = CASES[name]
    total = blocks * objects
    layout = ObjectLayout(blocks, 1, (nbytes,) * count, "uint8", 1)
    size = objects * layout.nbytes
    source, target = (layers(kind, count, total + 8, nbytes, device) for _ in range(2))
    there, here = torch.zeros(size, dtype=torch.uint8, device=device), torch.zeros(size, dtype=torch.uint8).pin_memory()
    ids = list(range(total))
    random.Random(1).shuffle(ids)  # scattered, as in a busy engine
    arena = Arena(size)
    copies = [
        Copy(0, i * layout.nbytes, arena.generation(i * layout.nbytes), 0, tuple(ids[i * blocks : (i + 1) * blocks]))
        for i in range(objects)
    ]
    for way in ("auto", "direct", "staged", "torch", "layer"):
        rows = False if way == "torch" else None
        save, load = (PagedCache([t], [layout], 0, arena, rows=rows) for t in (source, target))
        if way != "torch":
            ready(save), ready(load)
        parts = [range(i, i + 1) for i in range(count)] if way == "layer" else [None]
        with forced(way, device):
            for direction, call, into, out in (("store", save.store, here, there), ("load", load.load, there, here)):
                limit = partial(into.copy_, out, non_blocking=True)
                work = lambda call=call, parts=parts: [call(copies, part) for part in parts]  # noqa: E731
                work(), limit()
                rates, ratios = [], []
                for _ in range(rounds):
                    before, took, after = seconds(limit), seconds(work), seconds(limit)
                    rates.append(size / took / 1e9)
                    ratios.append((before + after) / 2 / took)
                ratio = round(statistics.median(ratios), 3)
                tell(f"gpu.{direction}.{way}", name, statistics.median(rates), "GB/s", ratio_to_limit=ratio)
        if not all(torch.equal(a[ids], b[ids]) for a, b in zip(source, target, strict=True)):
            raise SystemExit(f"{name}, {way}: loaded KV differs from stored KV")
        beside(f"gpu.matmul.{way}", name, partial(save.store, copies), way, device)
        for t in target:
            t.zero_()
        del save, load, work, call
    arena.close()


def beside(name: str, case: str, copy: Callable[[], object], way: str, device: torch.device) -> None:
    """How much longer matmuls of a prefill take while KV is saved over and over by another thread."""
    a = torch.randn((4096, 4096), dtype=torch.bfloat16, device=device)
    work = lambda: [a @ a for _ in range(200)]  # noqa: E731
    work()
    alone = statistics.median(seconds(work) for _ in range(5))
    stop = threading.Event()
    rounds = 0

    def save() -> None:
        nonlocal rounds
        torch.cuda.set_stream(torch.cuda.Stream(device))
        while not stop.is_set():
            copy()
            rounds += 1

    with forced(way, device):
        thread = threading.Thread(target=save)
        thread.start()
        stream = torch.cuda.current_stream(device)
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            stream.synchronize()
            taken.append(time.perf_counter() - began)
        stop.set()
        thread.join()
    tell(name, case, statistics.median(taken) / alone, "x", saves=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args()
    if unknown := set(options.names) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if not torch.cuda.is_available() or torch.version.hip:
        sys.exit("benchmarks/gpu.py needs an NVIDIA GPU that torch can use, and torch sees none here")
    if why := obstacle("cuda"):
        sys.exit(f"benchmarks/gpu.py measures the CUDA kernels: {why}")
    device = torch.device("cuda", options.device)
    torch.cuda.set_device(device)
    gpu = gpu_of(options.device)
    if gpu is None:
        sys.exit("the CUDA kernels cannot be used on this device: the line above says why")
    for direction, speeds in (("store", gpu.save.speeds), ("load", gpu.load.speeds)):
        tell(f"gpu.start.{direction}", torch.cuda.get_device_name(device), speeds.staged / 1e9, "GB/s", **vars(speeds))
    for name in options.names or CASES:
        run(name, options.rounds, device)


if __name__ == "__main__":
    main()
