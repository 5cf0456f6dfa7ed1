"""Belady's optimum for prefix caching: the most that any policy could hit, knowing the future.

The problem. A cache holds at most `capacity` blocks of equal size. A request hits the leading run of its blocks that
is resident. Then the cache may hold any of the blocks that it held or that the request used; it need not take what it
will not need. Which choice gives the most hits over the whole trace?

The answer. Belady's MIN over single blocks: whenever there are more than `capacity`, the one goes whose next use is
furthest. It is exact here, not only a bound:

1. Hits in a leading run are hits, so no prefix cache has more hits than a cache in which every resident block counts.
   There the stays of blocks from one use to the next are intervals, of which at most `capacity` may overlap. Dropping
   the one that ends last, whenever there are too many, keeps the largest number of them.
2. A request that uses a block uses every block before it, so a block's next use is never before that of the blocks
   before it. Of equal ones, the deeper goes first. So what MIN holds has no holes: a block's predecessors are resident
   whenever it is, and each of its hits lies in a leading run. The bound is reached.

L1 with any policy is such a cache (it holds no more, and stores no block that was not computed), so no policy can be
above. `tests/kvcore_bench/simulate/test_simulate_optimum.py` compares it with all choices there are, on small traces.
"""

from array import array
from heapq import heappop, heappush

from kvcore_bench.simulate.trace import Trace


def next_uses(trace: Trace) -> "array[int]":
    """For each place in `trace.blocks`, the next place with the same block; the length where there is none."""
    blocks = trace.blocks
    uses = array("q", bytes(8 * len(blocks)))
    later = array("q", [len(blocks)]) * trace.distinct
    for place in range(len(blocks) - 1, -1, -1):
        block = blocks[place]
        uses[place] = later[block]
        later[block] = place
    return uses


def optimum(uses: "array[int]", capacity: int) -> int:
    """How many blocks of the trace with these `next_uses` are hit at best, with room for `capacity` blocks.

    A resident block is named by the place of its next use. Places grow with the request, and in it with the depth, so
    the greatest is the one that MIN drops, ties included; and none of the request that is being served.
    """
    end = len(uses)
    hits = held = 0
    resident = bytearray(end)
    furthest: list[int] = []  # negative, for a heap with its greatest first
    for place, use in enumerate(uses):
        if resident[place]:
            held -= 1
            hits += 1
        if use < end:
            resident[use] = True
            heappush(furthest, -use)
            if held < capacity:
                held += 1
            else:
                resident[-heappop(furthest)] = False
    return hits
