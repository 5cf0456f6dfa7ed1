"""The built-in eviction policies keep the contract, and each its own order."""

from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


class Plain:
    """The order of `lru`, `fifo` and `mru`, key by key: what goes first comes first."""

    def __init__(self, kind: type[EvictionPolicy]) -> None:
        self.newest, self.moves = kind is MruPolicy, kind is not FifoPolicy
        self.keys: dict[int, int] = {}

    def use(self, sizes: dict[int, int]) -> None:
        known = {key: size for key, size in sizes.items() if key in self.keys and not self.moves}
        others = {key: size for key, size in sizes.items() if key not in known}
        rest = {key: known.get(key, size) for key, size in self.keys.items() if key not in others}
        self.keys = {**others, **rest} if self.newest else {**rest, **others}

    def evict(self, nbytes: int, pinned: set[int]) -> list[int]:
        victims = []
        for key in [key for key in self.keys if key not in pinned]:
            if nbytes <= 0:
                break
            victims.append(key)
            nbytes -= self.keys.pop(key)
        return victims


@pytest.mark.parametrize("kind", [LruPolicy, FifoPolicy, MruPolicy, LfuPolicy, S3FifoPolicy])
def test_a_key_may_be_named_twice(kind: type[EvictionPolicy]) -> None:
    policy = kind(None, None)
    policy.insert(["a", "b", "a"], [1, 1, 1])
    policy.touch(["a", "b", "b", "a"])
    policy.touch(["a", "a"])
    assert len(policy) == 2
    assert sorted(policy.evict(10, nothing)) == ["a", "b"]


@pytest.mark.parametrize("kind", [LruPolicy, FifoPolicy, MruPolicy])
@settings(max_examples=200, deadline=None, database=None)
@given(data=st.data())
def test_batches_are_in_the_order_of_their_keys(kind: type[EvictionPolicy], data: st.DataObject) -> None:
    policy, plain = kind(None, None), Plain(kind)
    some = st.one_of(
        st.lists(st.integers(0, 20), unique=True, max_size=8),
        st.tuples(st.integers(0, 20), st.integers(0, 8)).map(lambda r: list(range(r[0], min(21, r[0] + r[1])))),
    )
    for _ in range(data.draw(st.integers(1, 15))):
        what, keys = data.draw(st.sampled_from(["insert", "touch", "remove", "evict"])), data.draw(some)
        if what == "insert":
            sizes = [data.draw(st.sampled_from([10, 10, 10, 7]))] * len(keys)
            policy.insert(keys, sizes)
            plain.use(dict(zip(keys, sizes, strict=True)))
        elif what == "touch":
            policy.touch(keys)
            if plain.moves:
                plain.use({key: plain.keys[key] for key in keys if key in plain.keys})
        elif what == "remove":
            policy.remove(keys)
            plain.keys = {key: size for key, size in plain.keys.items() if key not in keys}
        else:
            nbytes = data.draw(st.integers(0, 60))
            assert policy.evict(nbytes, set(keys).__contains__) == plain.evict(nbytes, set(keys))
        assert len(policy) == len(plain.keys)
    assert policy.evict(10_000, nothing) == list(plain.keys)


class Sliced(list[int]):
    """Counts what is copied of it."""

    copied = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.copied += len(found) if isinstance(at, slice) else 0
        return found


def test_keys_of_two_batches_in_turns_cost_no_more_the_more_there_are() -> None:
    policy, batches = LruPolicy(None, None), (Sliced(range(0, 2000, 2)), Sliced(range(1, 2000, 2)))
    for batch in batches:
        policy.insert_new(batch, 1)
    policy.touch(range(2000))
    assert sum(batch.copied for batch in batches) <= 4000
    assert policy.evict(2000, nothing) == list(range(2000))


@pytest.mark.parametrize("kind", [LruPolicy, FifoPolicy, MruPolicy])
def test_nothing_is_kept_of_most_keys_that_left_a_batch(kind: type[LruPolicy]) -> None:
    policy = kind(None, None)
    policy.insert(range(1000), range(1, 1001))
    policy.remove(range(990))
    (batch,) = policy._batches
    assert isinstance(batch.sizes, dict)
    assert (len(policy), len(batch.keys) < 20, len(batch.sizes) < 20) == (10, True, True)
    assert sorted(map(str, policy.evict(10_000, nothing))) == sorted(map(str, range(990, 1000)))


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
