"""Small traces, made in memory."""

import json
from array import array

from kvcore_bench.simulate.trace import Trace


def trace_of(prompts, block_tokens=512):
    """A trace of prompts that are lists of names of blocks; equal names after equal ones are the same block."""
    nodes, blocks, ends = {}, array("I"), array("q")
    for prompt in prompts:
        parent = -1
        for name in prompt:
            parent = nodes.setdefault((parent, name), len(nodes))
            blocks.append(parent)
        ends.append(len(blocks))
    times = array("d", map(float, range(len(prompts))))
    return Trace("made", "Mooncake", block_tokens, times, ends, blocks, len(nodes), len(blocks) * block_tokens)


def lines_of(records):
    return "".join(f"{json.dumps(record)}\n" for record in records)
