"""A state machine: random batches against a storage and a plain dict, shrunk to the shortest failure by hypothesis."""

from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvcore.api import Failed, Loaded, Stored
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, make_key, source
from kvcore.testing.storage.base import StorageSuite, loaded

KEYS = tuple(make_key(i // 2, group=i % 2) for i in range(10))
LARGEST = 10_000
_indexes = st.lists(st.integers(0, len(KEYS) - 1), unique=True, max_size=len(KEYS))
_sizes = st.one_of(st.integers(1, 64), st.sampled_from([511, 512, 4095, 4096, 4097]), st.integers(1, LARGEST))
_cuts = st.lists(st.integers(0, LARGEST), max_size=3)


class ModelTests(StorageSuite):
    """Sequences of calls that nobody thought of."""

    model_examples: ClassVar[int] = 25
    """How many random sequences are run."""
    model_steps: ClassVar[int] = 30
    """The length of each."""
    model_shrinks: ClassVar[bool] = True
    """False: report the first failure as it is, without a search for the shortest one (seconds to minutes)."""

    def test_like_a_dict(self, tmp_path: Path) -> None:
        """A random sequence of batches behaves as it would on a dict (where an overwrite may keep the old object)."""
        suite, numbers = self, count()

        class Machine(StorageMachine):
            def __init__(self) -> None:
                super().__init__(suite, tmp_path / f"example-{next(numbers)}")

        phases = [Phase.generate, Phase.shrink] if self.model_shrinks else [Phase.generate]
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=self.model_examples,
                stateful_step_count=self.model_steps,
                phases=phases,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


class StorageMachine(RuleBasedStateMachine):
    """One storage, and for each key the contents that may be there (None stands for missing)."""

    def __init__(self, suite: StorageSuite, place: Path) -> None:
        super().__init__()
        place.mkdir()
        self.suite = suite
        self.place = place
        self.model: dict[int, set[bytes | None]] = {i: {None} for i in range(len(KEYS))}
        self.versions = count()
        self.driver = Driver(suite.make_storage(place)).__enter__()
        self.persistent = self.driver.storage.persistent

    def teardown(self) -> None:
        """Close the storage."""
        self.driver.close()

    @rule(batch=st.lists(st.tuples(st.integers(0, len(KEYS) - 1), _sizes, _cuts), unique_by=lambda t: t[0], max_size=6))
    def store(self, batch: list[tuple[int, int, list[int]]]) -> None:
        """Store a batch, some of it over what is there."""
        data = [content(next(self.versions), nbytes) for _, nbytes, _ in batch]
        items = [source(KEYS[i], blob, cuts) for (i, _, cuts), blob in zip(batch, data, strict=True)]
        for (i, _, _), blob, outcome in zip(batch, data, self.driver.store(items), strict=True):
            assert isinstance(outcome, Stored), f"a store failed: {outcome}"
            before = self.model[i] - {None}
            self.model[i] = before | {blob}

    @rule(indexes=_indexes, cuts=_cuts, extra=st.sampled_from([0, 1, 5000]))
    def load(self, indexes: list[int], cuts: list[int], extra: int) -> None:
        """Load a batch, some of it missing."""
        rooms = [Room(LARGEST + extra, cuts) for _ in indexes]
        outcomes = self.driver.load([room.item(KEYS[i]) for room, i in zip(rooms, indexes, strict=True)])
        for i, room, outcome in zip(indexes, rooms, outcomes, strict=True):
            assert not isinstance(outcome, Failed), f"a load failed: {outcome}"
            got = loaded(room, outcome)
            self.suite.judge(got, list(self.model[i]), f"key {i}")
            assert room.clean_from(outcome.nbytes if isinstance(outcome, Loaded) else len(room.view)), "stray bytes"
            self.model[i] = {got}

    @rule(indexes=_indexes)
    def exists(self, indexes: list[int]) -> None:
        """Ask for a batch."""
        for i, found in zip(indexes, self.driver.exists([KEYS[i] for i in indexes]), strict=True):
            missing = None in self.model[i]
            assert found is not missing or (self.suite.forgets and not found), f"`exists` of key {i} says {found}"

    @rule(indexes=_indexes)
    def delete(self, indexes: list[int]) -> None:
        """Delete a batch, some of it absent."""
        self.driver.delete([KEYS[i] for i in indexes])
        for i in indexes:
            self.model[i] = {None}

    @rule()
    def list(self) -> None:
        """Enumerate, where the storage can."""
        if not self.driver.can_list:
            return
        listed = {entry.key: entry.nbytes for entry in self.driver.entries()}
        for i, key in enumerate(KEYS):
            sizes: set[Any] = {None if data is None else len(data) for data in self.model[i]}
            assert listed.get(key) in sizes or self.suite.forgets, f"`list` says {listed.get(key)} for key {i}: {sizes}"

    @precondition(lambda self: self.persistent)
    @rule()
    def restart(self) -> None:
        """Close and open again."""
        self.driver.close()
        self.driver = Driver(self.suite.make_storage(self.place)).__enter__()
