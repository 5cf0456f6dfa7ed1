"""Loading ahead of a conversation's next turn: the same trace of requests with kvcore-prefetch and without.

    python benchmarks/prefetch.py [--mix chat|agents|once] [--seconds 120] [--path DIR]

Replays requests in real time through a `CacheEngine` with L1 and a disk tier (O_DIRECT). Each looks up its prompt,
waits for the answer, retrieves, releases, and stores the chunks that it had to compute, as an engine would; nothing is
computed, and no bytes are copied to a device. Objects have 512 KiB. The mixes are made up:

    chat    conversations whose next turn comes after 6 s, most between 3 and 12, beside documents that nobody asks for
            again and that push them out of L1
    agents  conversations only, whose next turn comes after 6 s, most between 4 and 9, in an L1 that is too small
    once    documents only: nobody comes back

One JSON line per run: what was found where, the time to a lookup's answer for turns that could have been found, what
was brought ahead and what became of it, and what the disk delivered.
"""

import argparse
import heapq
import json
import logging
import random
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.engine import CacheEngine, GroupSpec, ModelSpec

OBJECT_BYTES = 512 << 10
FIRST, TURN, DOCUMENT = (8, 16), (1, 3), (24, 56)
"""Chunks of a first prompt, of what a turn and its answer add, and of a document: from, to."""
WORKERS = 4


class Mix(NamedTuple):
    """Conversations and documents that begin, a second; the chance that a turn is followed by another, and after how
    long (seconds, log-normal)."""

    conversations: float
    documents: float
    returns: float = 0.9
    median_s: float = 6.0
    sigma: float = 0.6


MIXES = {"chat": Mix(0.25, 3.0), "agents": Mix(1.0, 0.0, 0.85, sigma=0.25), "once": Mix(0.0, 4.0)}


class Request(NamedTuple):
    at: float
    conversation: int
    turn: int
    chunks: int
    returns: float


def trace(mix: Mix, seconds: float, seed: int) -> list[Request]:
    """Requests in order of time."""
    rng, numbers = random.Random(seed), count()
    requests: list[Request] = []
    waiting: list[Request] = []
    for per_second, chunks, returns in (
        (mix.conversations, FIRST, mix.returns),
        (mix.documents, DOCUMENT, 0.0),
    ):
        at = rng.expovariate(per_second) if per_second else seconds
        while at < seconds:
            waiting.append(Request(at, next(numbers), 0, rng.randint(*chunks), returns))
            at += rng.expovariate(per_second)
    heapq.heapify(waiting)
    while waiting and (request := heapq.heappop(waiting)).at < seconds:
        requests.append(request)
        if rng.random() < request.returns:
            at = request.at + mix.median_s * rng.lognormvariate(0, mix.sigma)
            longer = request.chunks + rng.randint(*TURN)
            heapq.heappush(waiting, request._replace(at=at, turn=request.turn + 1, chunks=longer))
    return requests


def replay(requests: list[Request], root: Path, l1: str, hooks: list[Any]) -> dict[str, Any]:
    flags = {
        "l1.size": l1,
        "chunk_tokens": 16,
        "l2": [{"name": "disk", "storage": {"plugin": "disk", "path": str(root)}, "read": "always"}],
        "hooks": hooks,
        "log_level": "info",
    }
    engine = CacheEngine.open(flags=flags)
    spec = ModelSpec(
        "replay", "m", "w", "bfloat16", 2, "LBHNC", "CPU", "", 16, 1, (GroupSpec(("a",), (OBJECT_BYTES,)),)
    )
    space = engine.register(spec)
    answers: list[Answer] = []
    late: list[float] = []
    begun = time.perf_counter()

    def serve(request: Request) -> None:
        late.append(time.perf_counter() - begun - request.at)
        hashes = [f"{request.conversation:016d}{i:016d}".encode() for i in range(request.chunks)]
        ids = [list(range(request.chunks))]
        asked = time.perf_counter()
        lookup = engine.lookup(space, hashes)
        lookup.wait(30)
        found = lookup.poll() or 0
        answered = time.perf_counter() - asked
        if found:
            engine.retrieve(lookup, 0, ids)
        answers.append((request, answered, lookup.sources.get("l1", 0), lookup.sources.get("disk", 0)))
        engine.release(lookup)
        engine.publish(engine.reserve(space, hashes, found, request.chunks, ids).id)

    with ThreadPoolExecutor(WORKERS) as pool:
        for request in requests:
            time.sleep(max(0.0, begun + request.at - time.perf_counter()))
            pool.submit(serve, request).add_done_callback(lambda done: done.result())
    stats = engine.stats()
    engine.close()
    return summary(answers, late, stats)


Answer = tuple[Request, float, int, int]
"""A request, the seconds to its lookup's answer, and how many chunks came from L1 and from the disk."""


def summary(answers: list[Answer], late: list[float], stats: dict[str, float]) -> dict[str, Any]:
    again = [a for a in answers if a[0].turn]
    halves = {"first half": again[: len(again) // 2], "second half": again[len(again) // 2 :]}
    became = {x: int(stats.get(f'kvcore_prefetch_objects_total{{cause="next_turn",became="{x}"}}', 0))
              for x in ("brought", "used", "wasted")}  # fmt: skip
    return {
        "requests": len(answers),
        "next turns": len(again),
        **{
            name: {
                "in L1": round(sum(l1 for _, _, l1, _ in some) / max(1, sum(l1 + disk for _, _, l1, disk in some)), 3),
                "whole in L1": round(sum(disk == 0 for *_, disk in some) / max(1, len(some)), 3),
                **{f"p{q} ms": round(1e3 * quantile([t for _, t, _, _ in some], q / 100), 1) for q in (50, 90, 99)},
            }
            for name, some in halves.items()
        },
        "ahead": became,
        "disk read MiB": round(stats.get('kvcore_tier_bytes_total{tier="disk",op="load"}', 0) / (1 << 20)),
        "late p99 ms": round(1e3 * quantile(late, 0.99), 1),
    }


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def main() -> None:
    logging.basicConfig(format="%(relativeCreated)d %(message)s")
    parser = argparse.ArgumentParser(description="A trace with kvcore-prefetch and without.")
    parser.add_argument("--mix", choices=tuple(MIXES), action="append", help="default: all of them")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--path", type=Path, help="directory on the disk to use (default: the temporary directory)")
    parser.add_argument("--l1", default="400MiB")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for name in args.mix or MIXES:
        requests = trace(MIXES[name], args.seconds, args.seed)
        for hooks in ([], ["prefetch"]):
            root = Path(tempfile.mkdtemp(prefix="kvcore-prefetch-", dir=args.path))
            try:
                row = replay(requests, root, args.l1, hooks)
            finally:
                shutil.rmtree(root)
            print(json.dumps({"mix": name, "hooks": hooks, **row}), flush=True)


if __name__ == "__main__":
    main()
