"""What a policy is told, what is counted, and what becomes of one that breaks its contract."""

import gc
import sys
from collections import OrderedDict
from itertools import islice

import pytest
from simulate_samples import trace_of

from kvcore.api import EvictionPolicy
from kvcore.plugins import PluginSpec, Registry
from kvcore_bench.simulate.optimum import next_uses, optimum
from kvcore_bench.simulate.replay import SLOT_BYTES, hashes_of, replay
from kvcore_bench.simulate.trace import read_trace


def builtin(name):
    return Registry().create("eviction", PluginSpec(name, {}, "test"))


class Recorder(EvictionPolicy):
    """Least recently used, written as plainly as can be; keeps what it is told, as places in the trace's tree."""

    def __init__(self, trace):
        self._names = {h: i for i, h in enumerate(hashes_of(trace))}
        self._keys = OrderedDict()
        self.calls = []

    def insert(self, keys, sizes):
        assert set(sizes) == {SLOT_BYTES}
        self._note("insert", keys)
        self._keys.update(dict.fromkeys(keys))

    def touch(self, keys):
        self._note("touch", keys)
        for key in keys:
            self._keys.move_to_end(key)

    def remove(self, keys):
        raise AssertionError("nothing is removed in a simulation")

    def evict(self, nbytes, pinned):
        assert not any(map(pinned, self._keys))
        victims = [self._keys.popitem(last=False)[0] for _ in range(min(-(-nbytes // SLOT_BYTES), len(self._keys)))]
        self._note("evict", victims)
        return victims

    def __len__(self):
        return len(self._keys)

    def _note(self, call, keys):
        self.calls.append((call, [self._names[key.chunk_hash] for key in keys]))


def test_a_policy_hears_what_it_hears_in_l1():
    """Batches, each from the tail of the prompt to its head; blocks that were served are touched, the rest is new."""
    trace = trace_of(["abc", "abde", "xy"])  # a b c = 0 1 2, d e = 3 4, x y = 5 6
    policy = Recorder(trace)
    found = replay(trace, hashes_of(trace), policy, 5)
    assert found[:2] == (2, 0)
    assert policy.calls == [
        ("insert", [2, 1, 0]),
        ("touch", [1, 0]),
        ("insert", [4, 3]),
        ("evict", [2, 1]),  # c was not in the second prompt; then the tail of what was served
    ]


def test_blocks_behind_a_missing_one_serve_nobody_and_are_counted():
    trace = trace_of(["abc", "xyzw", "abc"])
    heads_first = Recorder(trace)
    heads_first.evict = lambda nbytes, pinned: [heads_first._keys.popitem()[0] for _ in range(-(-nbytes // SLOT_BYTES))]
    found = replay(trace, hashes_of(trace), heads_first, 5)
    assert (found.hits, found.stranded) == (0, 1)  # a and b went, c stayed
    assert replay(trace, hashes_of(trace), builtin("lru"), 5)[:2] == (1, 0)


def test_the_builtin_and_the_plain_lru_agree(small):
    trace = read_trace(str(small))
    for capacity in (7, 60, 500, trace.distinct):
        plain = replay(trace, hashes_of(trace), Recorder(trace), capacity)
        assert plain.fault is None
        assert plain[:2] == replay(trace, hashes_of(trace), builtin("lru"), capacity)[:2]
    assert plain.hits == len(trace.blocks) - trace.distinct


@pytest.mark.parametrize("capacity", [10, 10_000])
def test_a_run_leaves_no_memory_behind(small, capacity):
    """L1's objects are invisible to the garbage collector: whoever leaves them in a cycle leaves them for good."""
    trace = read_trace(str(small))
    hashes = hashes_of(trace)
    before = [sys.getrefcount(h) for h in hashes]
    replay(trace, hashes, builtin("lru"), capacity)
    gc.collect()
    assert [sys.getrefcount(h) for h in hashes] == before


def test_a_prompt_longer_than_the_cache_keeps_its_head():
    trace = trace_of(["abcdef", "abcdef"])
    for policy in ("lru", "fifo", "lfu", "s3fifo"):
        assert replay(trace, hashes_of(trace), builtin(policy), 4).hits == 4, policy


def hits(policy, trace, capacity):
    return replay(trace, hashes_of(trace), builtin(policy), capacity).hits


def test_the_builtin_policies_do_what_they_are_known_for():
    scan = trace_of([[f"b{i}"] for i in range(10)] * 9)  # larger than the cache: the next use is the furthest
    assert hits("lru", scan, 5) == hits("fifo", scan, 5) == 0
    assert hits("mru", scan, 5) == 36  # the most for a cache that must take in what it has missed
    assert optimum(next_uses(scan), 5) == 40  # and for one that need not
    rare = (f"once{i}" for i in range(1000))
    hot = trace_of([[name] for _ in range(40) for name in ("hot", "hot", "hot", *islice(rare, 9))])
    best = optimum(next_uses(hot), 8)
    assert hits("lfu", hot, 8) == hits("s3fifo", hot, 8) == best == 119  # all but the first
    assert hits("lru", hot, 8) == 80  # forgotten in each flood
    fresh = trace_of([["old"]] * 99 + [[name] for i in range(50) for name in (f"new{i}", f"new{i}", f"x{i}", f"y{i}")])
    assert hits("lfu", fresh, 2) == hits("lru", fresh, 2) == 98 + 50  # one place is enough, the other is lost to "old"


def broken(method, change):
    class Broken(type(builtin("lru"))):
        pass

    setattr(Broken, method, change)
    return Broken(None, None)


def fails(*args):
    raise KeyError("lost")


FAULTS = {
    "insert raised KeyError": ("insert", fails),
    "touch raised KeyError": ("touch", fails),
    "evict raised KeyError": ("evict", fails),
    "evict returned a NoneType, not a list": ("evict", lambda *args: None),
    "evict named 1 keys that are not resident": ("evict", lambda *args: ["nobody"]),
    "evict named a key twice": ("evict", lambda self, *args: [next(iter(self._batch_of))] * 2),
    "evict freed too little": ("evict", lambda *args: []),
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_policy_that_breaks_its_contract_is_named_with_the_request(text):
    trace = trace_of(["ab", "ab", "cd", "ef", "gh"])
    found = replay(trace, hashes_of(trace), broken(*FAULTS[text]), 4)
    assert found.fault is not None
    assert found.fault.startswith(text)
    assert "(in request " in found.fault
