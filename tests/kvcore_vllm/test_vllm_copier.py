import threading

import pytest

from kvcore_vllm.copier import Copier, Layers
from kvcore_vllm.metadata import Load, Save

pytestmark = pytest.mark.vllm


def save(plan: int, req: str = "r") -> Save:
    return Save(plan, req, "a", ())


class Gate:
    """Copies that wait to be let through."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.done: list[int] = []

    def save(self, job: Save, layers: Layers | None) -> bool:
        assert self.open.wait(10)
        self.done.append(job.id)
        return job.id != 13

    def load(self, job: Load, layers: Layers | None) -> set[int]:
        assert self.open.wait(10)
        if job.id == 66:
            raise OSError("gone")
        return {7} & job.blocks


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def copier(gate: Gate):  # type: ignore[no-untyped-def]
    made = Copier(gate.load, gate.save, lambda: None, lambda: None)
    yield made
    gate.open.set()
    made.close()
    made.close()


def test_flush_waits_for_the_named_saves(copier: Copier, gate: Gate) -> None:
    for plan in (1, 13, 3):
        copier.submit("save", save(plan), None)
    assert copier.saving("r")
    threading.Timer(0.05, gate.open.set).start()
    copier.flush([1, 13, 99])
    assert gate.done[:2] == [1, 13]
    copier.flush([3])
    assert not copier.saving("r")
    assert [(job.id, ok) for job, ok in copier.take()[1]] == [(1, True), (13, False), (3, True)]
    assert copier.take() == ([], [])


def test_a_save_that_outlives_its_flush_has_failed(copier: Copier, gate: Gate) -> None:
    copier.submit("save", save(1), None)
    with pytest.raises(TimeoutError):
        copier.flush([1], timeout_s=0.02)
    gate.open.set()
    copier.flush([1])
    assert [(job.id, ok) for job, ok in copier.take()[1]] == [(1, False)]
    copier.submit("save", save(1), None)
    copier.flush([1])
    assert [(job.id, ok) for job, ok in copier.take()[1]] == [(1, True)]  # nothing is kept of it


def test_a_load_that_raises_has_failed_whole(copier: Copier, gate: Gate) -> None:
    gate.open.set()
    copier.submit("load", Load(66, "a", "m", (), frozenset({4, 5})), None)
    copier.submit("load", Load(1, "b", "m", (), frozenset({6})), None)
    loads = []
    while len(loads) < 2:
        loads += copier.take(wait_s=1.0)[0]
    assert [(job.req_id, bad) for job, bad in loads] == [("a", {4, 5}), ("b", set())]


def test_a_part_that_raises_leaves_what_failed_before(copier: Copier, gate: Gate) -> None:
    class Event:
        def synchronize(self) -> None:
            raise OSError("the device is gone")

    gate.open.set()
    copier.submit("load", Load(1, "a", "m", (), frozenset({6, 7}), last=False), None, last=False)
    copier.submit("load", Load(1, "a", "m", (), frozenset({8, 9})), Event())
    loads: list[tuple[Load, set[int]]] = []
    while not loads:
        loads += copier.take(wait_s=1.0)[0]
    assert [bad for _, bad in loads] == [{7, 8, 9}]


def test_the_event_comes_first(copier: Copier, gate: Gate) -> None:
    order = []

    class Event:
        def synchronize(self) -> None:
            order.append(list(gate.done))

    gate.open.set()
    copier.submit("save", save(1), Event())
    copier.flush([1])
    assert order == [[]]
    assert gate.done == [1]
