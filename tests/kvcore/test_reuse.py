"""`write: reused`: a tier is written what has been asked for again, by whatever way, once; and nothing else."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine import contents, hashes, opened, put, spec

from kvcore.api import Failed, ObjectKey
from kvcore.control.reuse import Reuse
from kvcore.engine import CacheEngine, Space
from kvcore.l1 import ObjectSpace

NEAR_FAR = "l2: [{name: near, storage: memory}, {name: far, storage: memory, write: reused}]\n"
FAR = "l2: [{name: far, storage: memory, write: reused}]\n"


class Table:
    """As much of an `ObjectSpace` as is looked at."""

    def __init__(self, namespace: bytes = b"n" * 16, group: int = 0) -> None:
        self.namespace, self.group = namespace, group


SPACE: Any = Table()

# -- what is remembered ------------------------------------------------------------------------------------------------


def test_the_first_time_is_not_enough_and_the_second_is_by_either_way() -> None:
    reuse, keys = Reuse(), hashes(4)
    assert reuse.published(SPACE, keys) == []
    assert reuse.published(SPACE, keys[:2]) == keys[:2]
    assert reuse.asked(SPACE, keys) == keys[2:]  # the others were offered
    assert reuse.asked(SPACE, keys) == []
    assert reuse.published(SPACE, keys) == keys  # the tier must have lost them


def test_what_a_tier_did_not_take_is_offered_again_when_asked_for() -> None:
    reuse, keys = Reuse(), hashes(3)
    reuse.published(SPACE, keys)
    assert reuse.asked(SPACE, keys) == keys
    reuse.refused([ObjectKey(SPACE.namespace, keys[1], 0), ObjectKey(SPACE.namespace, b"never heard of", 0)])
    assert reuse.asked(SPACE, keys) == [keys[1]]


def test_the_same_hash_elsewhere_is_another_object() -> None:
    reuse, keys = Reuse(), hashes(2)
    reuse.published(SPACE, keys)
    assert reuse.published(Table(group=1), keys) == []  # type: ignore[arg-type]
    assert reuse.published(Table(b"m" * 16), keys) == []  # type: ignore[arg-type]


def test_the_oldest_are_forgotten_and_offered_once_more() -> None:
    reuse, old, new = Reuse(8), hashes(8, "old"), hashes(4, "new")
    reuse.asked(SPACE, old)
    reuse.published(SPACE, new)
    assert len(reuse) == 8
    assert reuse.asked(SPACE, old) == old[:4]
    assert reuse.published(SPACE, old[4:]) == []  # forgotten in turn: as if new


def test_many_are_forgotten_at_once() -> None:
    """One by one each would cost as much as were forgotten before it."""
    reuse = Reuse(320)
    reuse.published(SPACE, hashes(321))
    assert len(reuse) == 300
    assert reuse.asked(SPACE, hashes(321)[21:]) == hashes(321)[21:]


@given(
    st.lists(st.tuples(st.sampled_from(["published", "asked"]), st.lists(st.integers(0, 9), unique=True)), max_size=30)
)
def test_nothing_is_offered_before_its_second_time_nor_twice_to_who_asks(calls: list[tuple[str, list[int]]]) -> None:
    reuse, keys = Reuse(), hashes(10)
    times = [0] * 10
    offered: set[int] = set()
    for call, numbers in calls:
        got = [keys.index(h) for h in getattr(reuse, call)(SPACE, [keys[i] for i in numbers])]
        expected = [i for i in numbers if (times[i] if call == "published" else i not in offered)]
        assert got == expected
        offered.update(got)
        for i in numbers:
            times[i] += 1


# -- in an engine ------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], tuple[CacheEngine, Space]]]:
    with ExitStack() as stack:

        def open_(text: str) -> tuple[CacheEngine, Space]:
            engine = opened(tmp_path, text)
            stack.callback(engine.close)
            return engine, engine.register(spec())

        yield open_


def held(engine: CacheEngine, tier: str) -> dict[ObjectKey, bytes]:
    (found,) = (t for t in engine.manager.tiers if t.name == tier)
    objects: dict[ObjectKey, bytes] = found.storage._objects
    return objects


def names(engine: CacheEngine, tier: str) -> set[bytes]:
    assert engine.drain() == 0
    return {k.chunk_hash for k in held(engine, tier)}


def count(engine: CacheEngine, name: str) -> float:
    return engine.metrics.values().get(f"kvcore_{name}", 0.0)


def test_what_is_computed_once_is_held_back_and_counted(make: Any) -> None:
    engine, space = make(NEAR_FAR)
    keys = hashes(6)
    put(engine, space, keys)
    assert names(engine, "near") == set(keys)
    assert names(engine, "far") == set()
    assert count(engine, 'tier_held_back_total{tier="far"}') == 6
    assert count(engine, 'tier_dropped_total{tier="far",reason="queue_full"}') == 0


def test_a_hit_in_l1_is_a_use(make: Any) -> None:
    engine, space = make(FAR)
    keys = hashes(6)
    put(engine, space, keys)
    assert contents(engine, space, keys[:4]) == [1, 2, 3, 4]
    assert names(engine, "far") == set(keys[:4])
    engine.clear(space)
    assert contents(engine, space, keys) == [1, 2, 3, 4]
    assert engine.l1.usage()["leases"] == 0


def test_what_the_engine_holds_itself_is_in_use(make: Any) -> None:
    engine, space = make(FAR)
    keys = hashes(6)
    put(engine, space, keys)
    lookup = engine.lookup(space, [*keys[:4], *hashes(2, "new")], first=3)
    assert lookup.wait(10)
    engine.release(lookup)
    assert names(engine, "far") == set(keys[:4])


def test_a_hit_is_written_once(make: Any) -> None:
    engine, space = make(FAR)
    keys = hashes(4)
    put(engine, space, keys)
    asked = engine.manager.tiers[0].storage
    questions: list[int] = []
    real = asked.exists
    asked.exists = lambda ks: (questions.append(len(ks)), real(ks))[1]
    for _ in range(5):
        assert contents(engine, space, keys) == [1, 2, 3, 4]
        engine.drain()
    assert sum(questions) == 4  # before the only store
    assert count(engine, 'tier_operations_total{tier="far",op="store",outcome="ok"}') == 4


def test_computed_again_is_asked_for_again(make: Any) -> None:
    engine, space = make(FAR)
    keys = hashes(4)
    put(engine, space, keys)
    engine.drain()
    engine.clear(space)  # as if evicted
    assert contents(engine, space, keys) == []
    put(engine, space, keys)
    assert names(engine, "far") == set(keys)


def test_a_hit_in_another_tier_is_a_use_wherever_it_stands(make: Any) -> None:
    before = "l2: [{name: far, storage: memory, write: reused}, {name: near, storage: memory}]\n"
    for text in (NEAR_FAR, before):
        engine, space = make(text)
        keys = hashes(4)
        put(engine, space, keys)
        assert names(engine, "far") == set()
        engine.clear(space)
        assert contents(engine, space, keys) == [1, 2, 3, 4]
        assert names(engine, "far") == set(keys)
        assert engine.l1.usage()["leases"] == 0
        engine.close()


def test_promotion_may_be_off(make: Any) -> None:
    engine, space = make(
        "l2: [{name: far, storage: memory, write: reused, promote: false}, {name: near, storage: memory}]\n"
    )
    keys = hashes(4)
    put(engine, space, keys)
    engine.drain()
    engine.clear(space)
    assert contents(engine, space, keys) == [1, 2, 3, 4]
    assert names(engine, "far") == set()


def test_what_l1_gave_up_and_is_asked_for_again_is_written(make: Any) -> None:
    engine, space = make(
        "l2: [{name: under, storage: memory, write: evicted}, {name: far, storage: memory, write: reused}]\n"
    )
    few = hashes(4, "few")
    put(engine, space, few)
    for i in range(2 * engine.manager.arena.size // (4 * space.groups[0].nbytes)):
        put(engine, space, hashes(4, f"p{i}"))
        engine.drain()
    assert set(few) <= names(engine, "under")
    assert names(engine, "far") == set()
    assert contents(engine, space, few) == [1, 2, 3, 4]
    assert names(engine, "far") == set(few)
    assert engine.l1.usage()["leases"] == 0


def test_a_store_that_failed_is_tried_again_at_the_next_use(make: Any) -> None:
    engine, space = make(FAR)
    keys = hashes(3)
    put(engine, space, keys)
    storage = engine.manager.tiers[0].storage
    real = storage.store
    storage.store = lambda items: [Failed("no", "full")] * len(items)
    assert contents(engine, space, keys) == [1, 2, 3]
    assert names(engine, "far") == set()
    storage.store = real
    assert contents(engine, space, keys) == [1, 2, 3]
    assert names(engine, "far") == set(keys)


def test_other_tiers_are_written_as_before(make: Any) -> None:
    engine, space = make(
        "l2: [{name: all, storage: memory}, {name: none, storage: memory, write: none}, "
        "{name: far, storage: memory, write: reused}]\n"
    )
    keys = hashes(4)
    put(engine, space, keys)
    contents(engine, space, keys)
    assert names(engine, "all") == names(engine, "far") == set(keys)
    assert names(engine, "none") == set()
    assert isinstance(engine.object_space(space, 0), ObjectSpace)
