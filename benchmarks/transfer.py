"""Copies between paged KV and the arena, for the ways in which engines lay KV out: GB/s, and the ratio to one-thread
`copy_` of the same bytes, taken in turns. One JSON object a line.

    python benchmarks/transfer.py [--rounds N] [NAME ...]

`small` has blocks of 16 tokens, 16 an object; `large` those of vLLM on a CPU, 128 tokens, one an object.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from kvcore.api import ObjectLayout
from kvcore.l1 import Arena
from kvcore.transfer import Copy, PagedCache

# name: (memory layout, layers, bytes of a block, blocks an object, objects)
CASES = {
    "small.one_allocation": ("one", 32, 32768, 16, 12),
    "small.separate": ("separate", 32, 32768, 16, 12),
    "small.split_kv": ("split", 32, 32768, 16, 12),
    "small.interleaved": ("interleaved", 32, 32768, 16, 12),
    "small.mla": ("one", 27, 18432, 16, 24),
    "large.smollm2": ("one", 30, 98304, 1, 64),
    "large.separate": ("separate", 30, 98304, 1, 64),
    "large.mid": ("one", 16, 262144, 1, 48),
}


def layers(kind: str, count: int, blocks: int, nbytes: int) -> list[torch.Tensor]:
    """A layer each, blocks first, of random bytes."""
    if kind == "one":
        return list(torch.randint(0, 255, (count, blocks, nbytes), dtype=torch.uint8))
    if kind == "interleaved":
        return list(torch.randint(0, 255, (blocks, count, nbytes), dtype=torch.uint8).transpose(0, 1))
    if kind == "split":
        shape = (2, blocks, nbytes // 2)
        return [torch.randint(0, 255, shape, dtype=torch.uint8).transpose(0, 1) for _ in range(count)]
    return [torch.randint(0, 255, (blocks, nbytes), dtype=torch.uint8) for _ in range(count)]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run(name: str, rounds: int) -> None:
    kind, count, nbytes, blocks, objects = CASES[name]
    total = blocks * objects
    layout = ObjectLayout(blocks, 1, (nbytes,) * count, "uint8", 1)
    source, target = layers(kind, count, total + 8, nbytes), layers(kind, count, total + 8, nbytes)
    plain_source, plain_target = (torch.full((objects * layout.nbytes,), i, dtype=torch.uint8) for i in (1, 2))
    ids = list(range(total))
    random.Random(1).shuffle(ids)  # scattered, as in a busy engine
    arena = Arena(objects * layout.nbytes)
    copies = [
        Copy(0, i * layout.nbytes, arena.generation(i * layout.nbytes), 0, tuple(ids[i * blocks : (i + 1) * blocks]))
        for i in range(objects)
    ]
    ways: dict[str, Callable[[], object]] = {
        "transfer.store": partial(PagedCache([source], [layout], 0, arena).store, copies),
        "transfer.load": partial(PagedCache([target], [layout], 0, arena).load, copies),
    }
    for way, work in ways.items():
        work()
        rates, ratios = [], []
        for _ in range(rounds):
            before = seconds(lambda: plain_target.copy_(plain_source))
            took = seconds(work)
            after = seconds(lambda: plain_target.copy_(plain_source))
            rates.append(objects * layout.nbytes / took / 1e9)
            ratios.append((before + after) / 2 / took)
        row = {"name": way, "case": name, "value": statistics.median(rates), "unit": "GB/s"}
        print(json.dumps({**row, "ratio_to_limit": round(statistics.median(ratios), 3)}), flush=True)
    if not all(torch.equal(a[ids], b[ids]) for a, b in zip(source, target, strict=True)):
        raise SystemExit(f"{name}: loaded KV differs from stored KV")
    ways.clear()
    arena.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if unknown := set(options.names) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    for name in options.names or CASES:
        run(name, options.rounds)


if __name__ == "__main__":
    main()
