"""The conformance suite of eviction policies. Subclass `EvictionConformance` and give `make_policy`."""

from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvcore.api import EvictionPolicy
from kvcore.testing.memory import make_key

_indexes = st.lists(st.integers(0, 30), unique=True, max_size=12)


class _Opaque:
    """A key of which a policy can know nothing but its identity."""


KEYS: dict[str, Callable[[int], Hashable]] = {
    "ObjectKey": make_key,
    "bytes": lambda i: make_key(i).chunk_hash,
    "int": lambda i: i,
    "opaque": lambda i: _Opaque(),
}


def nothing(key: Hashable) -> bool:
    """Nothing is pinned."""
    return False


class EvictionConformance:
    """All tests of an eviction policy. They say nothing about its order, which is the policy's own.

    class TestAcmePolicy(EvictionConformance):
        def make_policy(self):
            return AcmePolicy(AcmeConfig(), context())
    """

    model_shrinks: ClassVar[bool] = True
    """False: report the first failure of the state machine as it is, without a search for the shortest one."""

    def make_policy(self) -> EvictionPolicy:
        """A fresh policy."""
        raise NotImplementedError("override make_policy(self) and return an eviction policy")

    # The tests.

    def test_empty_policy(self) -> None:
        policy = self.make_policy()
        assert len(policy) == 0, "a fresh policy knows keys"
        assert policy.evict(100, nothing) == [], "an empty policy found victims"
        policy.insert([], [])
        policy.touch([])
        policy.remove([])
        assert len(policy) == 0, "empty batches made keys known"

    @pytest.mark.parametrize("kind", KEYS)
    def test_evicts_each_key_once(self, kind: str) -> None:
        policy, keys = self.make_policy(), [KEYS[kind](i) for i in range(100)]
        policy.insert(keys, [10] * 100)
        assert len(policy) == 100, f"{len(policy)} keys are known of 100 that were inserted"
        gone: list[Hashable] = []
        while victims := self.evict(policy, 70):
            gone += victims
        assert len(gone) == len(set(gone)), "a key was evicted twice"
        assert set(gone) == set(keys), f"{len(set(gone) & set(keys))} of 100 keys could be evicted"
        assert len(policy) == 0, "keys are known after all were evicted"

    def test_frees_enough_and_not_much_more(self) -> None:
        policy = self.make_policy()
        sizes: dict[Hashable, int] = {i: 10 + i * 7 % 50 for i in range(200)}
        policy.insert(list(sizes), list(sizes.values()))
        for nbytes in (1, 9, 10, 59, 60, 100, 500):
            freed = sum(sizes[key] for key in self.evict(policy, nbytes))
            assert freed >= nbytes, f"{freed} bytes were freed, {nbytes} were asked for, and more were there"
            assert freed <= 2 * nbytes + 60, f"{freed} bytes were freed where {nbytes} were asked for"
        assert self.evict(policy, 0) == [], "`evict` of 0 bytes chose a victim"

    def test_frees_what_there_is(self) -> None:
        policy = self.make_policy()
        policy.insert(["a", "b"], [10, 20])
        assert sorted(map(str, self.evict(policy, 1000))) == ["a", "b"], "`evict` of more than there is must take all"

    def test_pinned_keys_stay(self) -> None:
        policy, keys = self.make_policy(), list(range(100))
        policy.insert(keys, [1] * 100)
        policy.touch(keys[::2])
        pinned = set(keys[:10] + keys[45:55] + keys[90:])
        victims = self.evict(policy, 1000, pinned)
        assert set(victims) == set(keys) - pinned, "all keys but the pinned ones must go when all room is asked for"
        assert len(policy) == len(pinned), f"{len(policy)} keys are known, {len(pinned)} were pinned and must be"
        assert set(self.evict(policy, 1000)) == pinned, "keys that were pinned could not be evicted later"

    def test_all_pinned(self) -> None:
        policy, keys = self.make_policy(), list(range(50))
        policy.insert(keys, [1] * 50)
        for _ in range(3):
            assert self.evict(policy, 10, set(keys)) == [], "a victim was chosen although all keys were pinned"
        assert len(policy) == 50, "pinned keys were forgotten"
        assert set(self.evict(policy, 50)) == set(keys), "keys that were pinned could not be evicted later"

    def test_few_pinned_keys_cost_little(self) -> None:
        """Evicting one key at a time does not ask for every known key whether it is pinned."""
        policy, keys = self.make_policy(), list(range(20_000))
        policy.insert(keys, [1] * len(keys))
        pinned, calls = set(keys[:5] + keys[-5:]), count()

        def ask(key: Hashable) -> bool:
            next(calls)
            return key in pinned

        for _ in range(200):
            assert len(policy.evict(1, ask)) == 1, "no victim was found although few keys were pinned"
        asked = next(calls)
        assert asked <= 200 * 50, f"{asked} keys were asked about to evict 200 of 20000 with 10 pinned"

    def test_known_key_is_touched_and_resized(self) -> None:
        policy = self.make_policy()
        policy.insert(["a", "b"], [100, 100])
        policy.insert(["b", "c", "a"], [10, 10, 10])
        assert len(policy) == 3, f"a key was inserted twice and is counted so: {len(policy)} keys, not 3"
        assert len(self.evict(policy, 30)) == 3, "the size of a key that was inserted again must be its new one"

    def test_unknown_keys_are_ignored(self) -> None:
        policy = self.make_policy()
        policy.insert(["a"], [10])
        policy.touch(["x", "a", "y"])
        assert len(policy) == 1, "touching unknown keys made them known"
        policy.remove(["x", "y", "z"])
        assert len(policy) == 1, "removing unknown keys changed what is known"
        assert self.evict(policy, 100) == ["a"], "a key that was never inserted was evicted"
        policy.touch(["a"])
        policy.remove(["a"])
        assert len(policy) == 0, "touching a key that was evicted made it known"

    def test_removed_keys_are_forgotten(self) -> None:
        policy, keys = self.make_policy(), list(range(40))
        policy.insert(keys, [1] * 40)
        policy.touch(keys[::3])
        policy.remove(keys[::2])
        assert len(policy) == 20, f"{len(policy)} keys are known after half of 40 were removed"
        policy.insert(keys[:2], [1, 1])
        assert set(self.evict(policy, 100)) == {0, *keys[1::2]}, "what is left after `remove` is not what was kept"

    def test_keys_come_back(self) -> None:
        """A key that was evicted can be inserted again, any number of times."""
        policy = self.make_policy()
        for round_ in range(30):
            keys = [(round_ + i) % 50 for i in range(20)]
            policy.insert(keys, [1] * 20)
            policy.touch(keys[::2])
            assert len(policy) <= 20, "evicted keys are still counted"
            assert len(self.evict(policy, 20)) == 20, f"round {round_}: not all of 20 keys could be evicted"

    def test_like_a_set(self) -> None:
        """A random sequence of calls behaves as it would on a dict of sizes."""
        suite = self

        class Machine(PolicyMachine):
            def __init__(self) -> None:
                super().__init__(suite)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=100,
                stateful_step_count=40,
                phases=[Phase.generate, Phase.shrink] if self.model_shrinks else [Phase.generate],
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    # Helpers.

    def evict(self, policy: EvictionPolicy, nbytes: int, pinned: "set[Any] | None" = None) -> list[Hashable]:
        """`policy.evict`, checked: a list, no pinned key in it, no key twice, each forgotten."""
        pinned = pinned or set()
        before = len(policy)
        victims = policy.evict(nbytes, pinned.__contains__)
        assert isinstance(victims, list), f"`evict` must return a list, not {type(victims).__name__}"
        assert len(set(victims)) == len(victims), "a key stands twice among the victims"
        assert not pinned.intersection(victims), "a pinned key was evicted"
        assert len(policy) == before - len(victims), (
            f"{len(policy)} keys are known after {len(victims)} of {before} were evicted"
        )
        return victims


class PolicyMachine(RuleBasedStateMachine):
    """One policy, and the sizes of the keys that it must know."""

    def __init__(self, suite: EvictionConformance) -> None:
        super().__init__()
        self.suite = suite
        self.policy = suite.make_policy()
        self.sizes: dict[Hashable, int] = {}

    @rule(keys=_indexes, size=st.sampled_from([10, 10, 10, 1, 77]), step=st.sampled_from([0, 0, 0, 1]))
    def insert(self, keys: Sequence[int], size: int, step: int) -> None:
        """Insert, some of it known; often all of one size, as in L1."""
        self.policy.insert(keys, [size + i * step for i in range(len(keys))])
        self.sizes.update((key, size + i * step) for i, key in enumerate(keys))

    @rule(keys=_indexes)
    def touch(self, keys: Sequence[int]) -> None:
        """Touch, some of it unknown."""
        self.policy.touch(keys)

    @rule(keys=_indexes)
    def remove(self, keys: Sequence[int]) -> None:
        """Remove, some of it unknown."""
        self.policy.remove(keys)
        for key in keys:
            self.sizes.pop(key, None)

    @rule(nbytes=st.integers(0, 400), pinned=st.sets(st.integers(0, 30)))
    def evict(self, nbytes: int, pinned: set[int]) -> None:
        """Evict with some keys pinned."""
        victims = self.suite.evict(self.policy, nbytes, pinned)
        unknown = [key for key in victims if key not in self.sizes]
        assert not unknown, f"keys were evicted that are not known: {unknown}"
        freed = sum(self.sizes.pop(key) for key in victims)
        left = [key for key in self.sizes if key not in pinned]
        assert freed >= nbytes or not left, f"{freed} of {nbytes} bytes were freed and {len(left)} keys could still go"

    @invariant()
    def same_count(self) -> None:
        """The policy knows as many keys as the model."""
        assert len(self.policy) == len(self.sizes), f"{len(self.policy)} keys are known, not {len(self.sizes)}"
