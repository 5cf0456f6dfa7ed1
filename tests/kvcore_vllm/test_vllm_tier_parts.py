"""The parts of the secondary tier that need no vLLM: questions, lanes, rows, options."""

import threading
from collections.abc import Iterator
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

import pytest

from kvcore.api import ConfigError
from kvcore.engine import GroupSpec, ModelSpec, ObjectStore
from kvcore.service import open_store
from kvcore_vllm.options import parse_tier_options
from kvcore_vllm.tier_lookups import Lookups, Question
from kvcore_vllm.tier_rows import RowStore
from kvcore_vllm.tier_threads import Lane

ROW, PADDED = 3000, 4096


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


class Asked:
    """Takes questions and answers none by itself."""

    def __init__(self, patience_s: float = 60.0) -> None:
        self.batches: list[tuple[Question, list[bytes]]] = []
        self.lookups = Lookups(lambda question, keys: self.batches.append((question, keys)), lambda: patience_s)


def test_one_batch_per_request_and_step() -> None:
    asked = Asked()
    one, two = asked.lookups.begin("1", ""), asked.lookups.begin("2", "t")
    for question in (one, two, one):
        for number in range(5):
            assert asked.lookups.look(question, key(number)) is None
    asked.lookups.flush()
    asked.lookups.flush()
    assert asked.batches == [(one, [key(n) for n in range(5)]), (two, [key(n) for n in range(5)])]
    one.answer({key(n): n < 3 for n in range(5)})
    assert [asked.lookups.look(one, key(n)) for n in range(5)] == [True, True, True, False, False]
    assert asked.lookups.look(two, key(0)) is None  # its tenant has objects of its own


def test_what_is_not_answered_in_time_is_absent_for_good() -> None:
    asked = Asked(patience_s=0.0)
    question = asked.lookups.begin("1", "")
    assert asked.lookups.look(question, key(1)) is None
    assert asked.lookups.look(question, key(1)) is None  # nobody has been asked yet
    asked.lookups.flush()
    assert asked.lookups.look(question, key(1)) is False
    question.answer({key(1): True})
    assert asked.lookups.look(question, key(1)) is False
    assert asked.lookups.late == 1


def test_later_chunks_have_their_own_time() -> None:
    asked = Asked()
    question = asked.lookups.begin("1", "")
    asked.lookups.look(question, key(1))
    asked.lookups.flush()
    question.answer({key(1): True})
    question.due_s = 0.0
    assert asked.lookups.look(question, key(2)) is None
    asked.lookups.flush()
    assert asked.lookups.look(question, key(2)) is None
    assert asked.lookups.late == 0


def test_what_could_not_be_loaded_is_not_offered_again() -> None:
    asked = Asked()
    question = asked.lookups.begin("1", "")
    asked.lookups.look(question, key(1))
    asked.lookups.flush()
    question.answer({key(1): True})
    question.lost([key(1)])
    assert asked.lookups.look(question, key(1)) is False


def test_a_request_of_nobody_finds_nothing() -> None:
    asked = Asked()
    assert asked.lookups.look(asked.lookups.begin("1", None), key(1)) is False
    asked.lookups.flush()
    assert asked.batches == []


def test_requests_end_and_are_forgotten() -> None:
    asked = Asked()
    asked.lookups.look(asked.lookups.begin("1", ""), key(1))
    asked.lookups.end("1")
    asked.lookups.end("1")
    assert asked.lookups.of("1") is None
    asked.lookups.look(asked.lookups.begin("2", ""), key(1))
    asked.lookups.forget()
    asked.lookups.flush()
    assert [question.tenant for question, _ in asked.batches] == []


def test_a_lane_waits_for_its_tasks() -> None:
    lane, gate, done = Lane("test", 2), threading.Event(), []
    for i in range(4):
        lane.submit(lambda closed, i=i: (gate.wait(), done.append((i, closed))))  # type: ignore[misc]
    assert not lane.wait(0.01)
    gate.set()
    assert lane.wait()
    assert sorted(done) == [(i, False) for i in range(4)]
    lane.close()
    assert lane.join(60)


def test_what_a_closed_lane_has_not_begun_ends_without_the_store() -> None:
    lane, gate, done = Lane("test", 1), threading.Event(), []
    begun = threading.Event()
    lane.submit(lambda closed: (begun.set(), gate.wait()))
    begun.wait()
    lane.submit(done.append)
    lane.close()
    lane.close()
    lane.submit(done.append)  # at once, here
    assert done == [True]
    gate.set()
    assert lane.join(60)
    assert done == [True, True]
    assert lane.wait(0)


def test_a_task_that_raises_costs_its_lane_nothing() -> None:
    lane, done = Lane("test", 1), []
    lane.submit(lambda closed: 1 / 0)
    lane.submit(done.append)
    assert lane.wait(60)
    assert done == [False]
    lane.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    opened = open_store(flags={"l2": [{"storage": {"plugin": "disk", "path": str(tmp_path)}}], "lookup_timeout": "20s"})
    yield opened
    opened.close()


def spec(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "engine": "vllm", "model": "m", "weights": "w", "dtype": "float32", "element_bytes": 4, "layout": "rows",
        "backend": "b", "isa": "vec", "block_tokens": 128, "ranks": 2,
        "groups": (GroupSpec(("row",), (ROW // 2,)), GroupSpec(("row",), (ROW // 2,), 128)),
    }  # fmt: skip
    return ModelSpec(**{**fields, **changes})


def rows(fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * (8 * PADDED)).cast("b", (8, PADDED))


def test_rows_are_stored_and_loaded_in_place(store: ObjectStore) -> None:
    memory = rows()
    flat = memory.cast("B")
    for row in range(8):
        flat[row * PADDED : (row + 1) * PADDED] = bytes([row + 1]) * PADDED
    made = RowStore(store, spec(), memory, {0: 0, 3: 1})
    keys = [key(1), key(1, 3), key(2)]  # one hash, in two groups
    assert made.exists("", keys) == [False] * 3
    assert made.store("", keys, [5, 6, 7]) == [True] * 3
    assert made.exists("", [*keys, key(3), key(2, 3)]) == [True, True, True, False, False]
    other = rows(99)
    again = RowStore(store, spec(), other, {0: 0, 3: 1})
    assert again.load("", [*reversed(keys), key(3)], [0, 1, 2, 3]) == [True, True, True, False]
    told = other.cast("B")
    assert [bytes(told[i * PADDED : i * PADDED + ROW]) for i in range(3)] == [bytes([v]) * ROW for v in (8, 7, 6)]
    assert all(set(told[i * PADDED + ROW : (i + 1) * PADDED]) == {99} for i in range(3))  # the padding stays


def test_tenants_and_renewals_have_names_of_their_own(store: ObjectStore) -> None:
    made = RowStore(store, spec(), rows(), {0: 0, 1: 1})
    assert made.store("a", [key(1)], [0]) == [True]
    assert made.exists("a", [key(1)]) == [True]
    assert made.exists("", [key(1)]) == made.exists("b", [key(1)]) == [False]
    made.renew()
    assert made.exists("a", [key(1)]) == [False]
    assert RowStore(store, spec(), rows(), {0: 0, 1: 1}).exists("a", [key(1)]) == [True]
    assert RowStore(store, spec(weights="x"), rows(), {0: 0, 1: 1}).exists("a", [key(1)]) == [False]


def test_a_storage_that_still_reads_a_row_changes_no_answer(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def hangs(space: Any, hashes: Any, buffers: list[list[memoryview]], group: int, request: str) -> list[bool]:
        held.extend(PickleBuffer(view) for (view,) in buffers)  # as a write(2) does that does not return
        return [True] * len(buffers)  # another tier has it

    made = RowStore(store, spec(), rows(), {0: 0})
    monkeypatch.setattr(store, "store", hangs)
    assert made.store("", [key(1), key(2)], [0, 1]) == [True, True]
    held.clear()


def test_memory_is_let_go(store: ObjectStore) -> None:
    memory = bytearray(8 * PADDED)
    view = memoryview(memory).cast("b", (8, PADDED))
    made = RowStore(store, spec(), view, {0: 0})
    made.store("", [key(1)], [0])
    made.load("", [key(1)], [1])
    made.release()
    view.release()
    memory.append(0)  # raises while anybody holds a view


def test_options() -> None:
    options = parse_tier_options({"config": "a.yaml", "kvcore.l2": [{"storage": "disk"}], "locality": "remote"})
    assert options == ("a.yaml", {"l2": [{"storage": "disk"}]}, "REMOTE")
    assert parse_tier_options({"kvcore.config": "a.yaml"}).config == "a.yaml"


def test_every_wrong_option_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tier_options({"l2": [], "config": 5, "kvcore.load": "sync", "locality": "near", "kvcore.l2": []})
    text = str(caught.value)
    for words in (
        "secondary_tiers: l2: unknown", "did you mean kvcore.l2?", "config: is 5", "kvcore.load: an option of KV",
        "locality: is 'near', allowed are 'LOCAL', 'REMOTE'",
    ):  # fmt: skip
        assert words in text
    assert "kvcore.l2:" not in text
