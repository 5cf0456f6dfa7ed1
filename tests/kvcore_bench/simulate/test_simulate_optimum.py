"""The optimum is what the best of all possible caches hits."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_samples import trace_of

from kvcore.plugins import PluginSpec, Registry
from kvcore_bench.simulate.optimum import next_uses, optimum
from kvcore_bench.simulate.replay import hashes_of, replay

POLICIES = ("lru", "lfu", "fifo", "mru", "s3fifo")

prompts = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), min_size=1, max_size=6)
"""Names repeat below different parents, and prompts share heads."""


def by_trial(trace, capacity):
    """The most hits in leading runs, by trying every content of the cache that is possible after each request."""
    best = {frozenset(): 0}
    for _, blocks in trace.requests():
        after = {}
        for held, hits in best.items():
            run = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
            offered = held.union(blocks)
            for count in range(min(capacity, len(offered)) + 1):
                for kept in map(frozenset, combinations(offered, count)):
                    after[kept] = max(after.get(kept, 0), hits + run)
        best = after
    return max(best.values())


@settings(max_examples=150)
@given(prompts, st.integers(1, 3))
def test_it_is_reached_and_not_exceeded_by_any_choice(made, capacity):
    trace = trace_of(made)
    assert optimum(next_uses(trace), capacity) == by_trial(trace, capacity)


def test_known_cases():
    thrash = trace_of([["a"], ["b"], ["c"]] * 4)
    assert [optimum(next_uses(thrash), c) for c in (1, 2, 3)] == [3, 6, 9]  # with one place, one of three is kept
    long = trace_of(["abcdefgh", "x", "abcdefgh"])
    assert [optimum(next_uses(long), c) for c in (1, 5, 8, 99)] == [1, 5, 8, 8]  # a part of a prompt counts
    assert optimum(next_uses(trace_of(["ab", "ba"])), 9) == 0  # the same tokens elsewhere are other blocks


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60)
@given(made=prompts, capacity=st.integers(1, 6))
def test_no_policy_is_above(policy, made, capacity):
    trace = trace_of(made)
    found = replay(trace, hashes_of(trace), Registry().create("eviction", PluginSpec(policy, {}, "test")), capacity)
    assert found.fault is None
    assert found.hits <= optimum(next_uses(trace), capacity)
