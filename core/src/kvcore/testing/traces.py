"""Synthetic traces of requests, for `kvcore simulate` and its tests, in the form of Mooncake's.

    python -m kvcore.testing.traces conversation --requests 12000 > chat.jsonl

They have the shape of what public traces show: few system prompts shared by many, turns that come back with all that
was said, long documents, many prompts that never return. Mean lengths and the share of blocks that come again are about
those of Mooncake's traces of the same names; everything else is made up.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

BLOCK_TOKENS = 512


class Mix(NamedTuple):
    """What requests are like. Lengths are means in tokens; `gap_s` is between turns, `arrival_s` between sessions."""

    apps: int
    """System prompts, of which the first are the most used (Zipf)."""
    system: int
    first: int
    turn: int
    reply: int
    turns: float
    """Mean number of requests of a session."""
    gap_s: float
    arrival_s: float


CONVERSATION = Mix(apps=3, system=600, first=11000, turn=900, reply=350, turns=1.9, gap_s=240, arrival_s=0.55)
"""Chat: short system prompts, long documents, several turns."""
TOOL_AGENT = Mix(apps=40, system=5000, first=4000, turn=900, reply=180, turns=1.4, gap_s=60, arrival_s=0.21)
"""Agents: long system prompts with tools, shared by many short sessions."""
MIXES = {"conversation": CONVERSATION, "toolagent": TOOL_AGENT}


def synthetic_trace(mix: Mix, requests: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """So many requests, in order of time, as the objects of a Mooncake trace. The same seed gives the same trace."""
    rng, ids = random.Random(seed), count()  # noqa: S311 - test data
    heads: dict[tuple[int, int], int] = {}  # (app, block) -> id
    systems = [_length(rng, mix.system) for _ in range(mix.apps)]
    popularity = [1 / (rank + 1) for rank in range(mix.apps)]
    waiting: list[tuple[float, int, _Session]] = []
    arrival = 0.0
    for number in count():
        if len(waiting) == 0 or arrival <= waiting[0][0]:
            app = rng.choices(range(mix.apps), popularity)[0]
            shared = systems[app] // BLOCK_TOKENS
            start = [heads.setdefault((app, block), -1) for block in range(shared)]
            for block, block_id in enumerate(start):
                if block_id < 0:
                    start[block] = heads[app, block] = next(ids)
            heappush(waiting, (arrival, number, _Session(start, systems[app] + _length(rng, mix.first))))
            arrival += rng.expovariate(1 / mix.arrival_s)
            continue
        time_s, _, session = heappop(waiting)
        reply = _length(rng, mix.reply)
        whole, part = divmod(session.tokens, BLOCK_TOKENS)
        session.blocks += [next(ids) for _ in range(whole - len(session.blocks))]
        yield {
            "timestamp": round(time_s * 1000),
            "input_length": session.tokens,
            "output_length": reply,
            "hash_ids": [*session.blocks, *([next(ids)] if part else [])],  # a part of a block is another one each time
        }
        requests -= 1
        if not requests:
            return
        if rng.random() < 1 - 1 / mix.turns:
            session.tokens += reply + _length(rng, mix.turn)
            heappush(waiting, (time_s + rng.expovariate(1 / mix.gap_s), number, session))


class _Session:
    """What has been said so far, the coming question included."""

    def __init__(self, blocks: list[int], tokens: int) -> None:
        self.blocks = blocks
        self.tokens = tokens


def _length(rng: random.Random, mean: int) -> int:
    """Most are short, some are many times the mean."""
    return max(1, round(mean * rng.lognormvariate(-0.5, 1.0)))


def main() -> None:
    """Write a trace to stdout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("mix", choices=tuple(MIXES))
    parser.add_argument("--requests", type=int, default=10_000, metavar="N", help="default: 10000")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for record in synthetic_trace(MIXES[args.mix], args.requests, args.seed):
        sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
