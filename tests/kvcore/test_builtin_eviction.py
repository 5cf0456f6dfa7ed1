"""The built-in eviction policies keep the contract, and each its own order."""

from collections.abc import Hashable

import pytest

from kvcore.api import EvictionPolicy
from kvcore.builtin.eviction_fifo import FifoPolicy
from kvcore.builtin.eviction_lfu import MAX_USES, LfuPolicy
from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.builtin.eviction_mru import MruPolicy
from kvcore.builtin.eviction_s3fifo import S3FifoPolicy
from kvcore.testing import EvictionConformance
from kvcore.testing.eviction import nothing


def drain(policy: EvictionPolicy) -> str:
    """All keys in the order in which they go."""
    order: list[Hashable] = []
    while victims := policy.evict(1, nothing):
        order += victims
    return "".join(map(str, order))


def filled(policy: EvictionPolicy, keys: str = "abcdef") -> EvictionPolicy:
    policy.insert(list(keys), [10] * len(keys))
    return policy


class TestLru(EvictionConformance):
    def make_policy(self) -> LruPolicy:
        return LruPolicy(None, None)

    def test_order(self) -> None:
        assert drain(filled(self.make_policy())) == "abcdef"

    def test_use_moves_to_the_back_in_order(self) -> None:
        policy = filled(self.make_policy())
        policy.touch(["c", "x", "a"])
        policy.insert(["b", "g", "d"], [10, 10, 10])
        assert drain(policy) == "efcabgd"

    def test_pinned_keep_their_place(self) -> None:
        policy = filled(self.make_policy())
        assert policy.evict(20, lambda key: key in {"a", "c", "e"}) == ["b", "d"]
        assert drain(policy) == "acef"


class TestFifo(EvictionConformance):
    def make_policy(self) -> FifoPolicy:
        return FifoPolicy(None, None)

    def test_use_does_not_matter(self) -> None:
        policy = filled(self.make_policy())
        policy.touch(["a", "b"])
        policy.insert(["a", "g"], [10, 10])
        assert policy.evict(20, lambda key: key == "a") == ["b", "c"]
        assert drain(policy) == "adefg"


class TestMru(EvictionConformance):
    def make_policy(self) -> MruPolicy:
        return MruPolicy(None, None)

    def test_newest_batch_goes_first_and_tail_before_head_in_it(self) -> None:
        policy = filled(filled(self.make_policy(), "abc"), "def")
        assert drain(policy) == "defabc"

    def test_use_moves_to_the_front(self) -> None:
        policy = filled(filled(self.make_policy(), "abc"), "def")
        policy.touch(["b", "x"])
        policy.insert(["a", "g"], [10, 10])
        assert policy.evict(20, lambda key: key == "a") == ["g", "b"]
        assert drain(policy) == "adefc"


class TestLfu(EvictionConformance):
    def make_policy(self) -> LfuPolicy:
        return LfuPolicy(None, None)

    def test_least_used_goes_first_then_least_recent(self) -> None:
        policy = filled(self.make_policy())
        policy.touch(["a", "b", "c"])
        policy.touch(["a"])
        policy.insert(["d"], [10])
        assert policy.evict(10, lambda key: key == "e") == ["f"]
        assert drain(policy) == "ebcda"

    def test_new_keys_are_found_after_old_ones_were_evicted(self) -> None:
        policy = filled(self.make_policy())
        policy.touch(list("abcdef"))
        assert policy.evict(10, nothing) == ["a"]
        policy.insert(["g"], [10])
        assert policy.evict(10, nothing) == ["g"]

    def test_uses_are_counted_up_to_a_limit(self) -> None:
        policy = filled(self.make_policy(), "ab")
        for _ in range(MAX_USES + 10):
            policy.touch(["a"])
        for _ in range(MAX_USES):
            policy.touch(["b"])
        assert drain(policy) == "ab"


class Named:
    """A key as L1 has them: another object at every stay, with the name in `key`."""

    def __init__(self, key: str) -> None:
        self.key = key


class TestS3Fifo(EvictionConformance):
    def make_policy(self) -> S3FifoPolicy:
        return S3FifoPolicy(None, None)

    def test_scan_does_not_push_out_what_is_used(self) -> None:
        policy = self.make_policy()
        hot = [f"hot{i}" for i in range(80)]
        policy.insert(hot, [1] * 80)
        policy.touch(hot)
        policy.touch(hot)
        policy.insert([f"fill{i}" for i in range(20)], [1] * 20)
        for i in range(1000):
            policy.evict(1, nothing)
            policy.insert([f"scan{i}"], [1])
            if i % 10 == 0:
                policy.touch(hot)
        left = {key for key in map(str, policy.evict(1000, nothing)) if key.startswith("hot")}
        assert left == set(hot)

    def test_one_use_is_not_enough_to_stay(self) -> None:
        policy = filled(self.make_policy(), "abc")
        policy.touch(["a", "b"])
        policy.touch(["b"])
        assert drain(policy) == "acb"

    @pytest.mark.parametrize("make", [str, Named], ids=["itself", "by its name"])
    def test_ghost_comes_back_to_the_main_queue(self, make: type) -> None:
        policy = self.make_policy()
        policy.insert([make(str(i)) for i in range(20)], [1] * 20)
        (ghost,) = policy.evict(1, nothing)
        again = make(str(getattr(ghost, "key", ghost)))
        policy.insert([again], [1])
        order = []
        for _ in range(17):
            order += policy.evict(1, nothing)
        assert again not in order, "a key that came back soon was treated as a new one"

    def test_ghosts_are_bounded(self) -> None:
        policy = self.make_policy()
        for i in range(5000):
            policy.insert([i], [1])
            if len(policy) > 100:
                policy.evict(1, nothing)
        assert len(policy._ghost) <= 100
        assert len(policy._uses) == len(policy._small) + len(policy._main) == len(policy)
