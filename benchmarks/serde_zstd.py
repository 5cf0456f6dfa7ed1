"""Lossless compression of real bf16 KV: kvcore-zstd beside plain Zstandard. One JSON row per line.

    python benchmarks/serde_zstd.py [--seconds 1.0] [--payload FILE]

Rates are GB of payload per second on one core, the best of many short runs; `encode.all` and `decode.all` are the sum
of one thread per core on one instance. Without --payload it takes the sample that ships with kvcore; FILE holds bf16
KV, as `make_kv_sample.py --all` writes it. Exits with an error when a decoded object differs from its source.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zstandard

from kvcore.api import Context, ObjectLayout
from kvcore.testing.sample import kv_sample
from kvcore_zstd.config import ZstdConfig
from kvcore_zstd.serde import ZstdSerde

BUDGET = {"ratio": 1.45, "encode": 0.5, "decode": 2.0}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compression of real KV.")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each rate, in seconds")
    parser.add_argument("--payload", type=Path, help="file of bf16 KV, cut into objects of the sample's size")
    args = parser.parse_args()
    sample, layout = kv_sample()
    payload = args.payload.read_bytes() if args.payload else sample
    objects = [payload[i : i + layout.nbytes] for i in range(0, len(payload), layout.nbytes)]
    plain(objects, args.seconds)
    for level in (1, 2):
        ours(level, objects, layout, args.seconds)


def plain(objects: list[bytes], seconds: float) -> None:
    """The rows of Zstandard without planes."""
    compress, decompress = zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress
    packed = [compress(o) for o in objects]
    nbytes = sum(map(len, objects))
    row("plain zstandard, level 1", "ratio", nbytes / sum(map(len, packed)))
    row("plain zstandard, level 1", "encode", rate(lambda: [compress(o) for o in objects], nbytes, seconds))
    row("plain zstandard, level 1", "decode", rate(lambda: [decompress(p) for p in packed], nbytes, seconds))


def ours(level: int, objects: list[bytes], layout: ObjectLayout, seconds: float) -> None:
    """The rows of kvcore-zstd."""
    serde = ZstdSerde(ZstdConfig(level=level), Context())
    name = f"kvcore-zstd, level {level}"
    nbytes = sum(map(len, objects))
    encoded = [serde.encode(memoryview(o), layout) for o in objects]
    row(name, "ratio", nbytes / sum(map(len, encoded)))

    def encode() -> None:
        for source in objects:
            serde.encode(memoryview(source), layout)

    own = threading.local()

    def decode() -> None:
        if not hasattr(own, "into"):
            own.into = bytearray(layout.nbytes)
        for source, original in zip(encoded, objects, strict=True):
            serde.decode(source, memoryview(own.into)[: len(original)], layout)

    row(name, "encode", rate(encode, nbytes, seconds))
    row(name, "decode", rate(decode, nbytes, seconds))
    row(name, "encode.all", rate_of_all(encode, nbytes, seconds))
    row(name, "decode.all", rate_of_all(decode, nbytes, seconds))
    for source, original in zip(encoded, objects, strict=True):
        serde.decode(source, memoryview(own.into)[: len(original)], layout)
        if own.into[: len(original)] != original:
            raise SystemExit(f"{name}: a decoded object differs from its source")


def rate(call: Callable[[], object], nbytes: int, seconds: float) -> float:
    """GB/s of `call`, which handles `nbytes`: its best run within `seconds`, of at least three."""
    best, runs, end = float("inf"), 0, time.perf_counter() + seconds
    while runs < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return nbytes / best / 1e9


def rate_of_all(call: Callable[[], object], nbytes: int, seconds: float) -> float:
    """GB/s of `call` in one thread per core at once."""
    cores = len(os.sched_getaffinity(0))

    def once() -> None:
        threads = [threading.Thread(target=lambda: [call() for _ in range(10)]) for _ in range(cores)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return rate(once, 10 * cores * nbytes, seconds)


def row(name: str, what: str, value: float) -> None:
    """Print one row. `budget` is the least that kvcore-zstd must reach per core."""
    unit = "x" if what == "ratio" else "GB/s"
    budget = BUDGET.get(what) if name.startswith("kvcore") else None
    fields = {"name": name, "what": what, "value": round(value, 3), "unit": unit, "budget": budget}
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
