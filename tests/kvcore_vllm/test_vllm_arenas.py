"""Which arena a worker copies with, and when it lets go of one."""

from typing import Any

import pytest

from kvcore.api import ArenaError
from kvcore_vllm import arenas
from kvcore_vllm.arenas import Arenas
from kvcore_vllm.metadata import Attach, Load, Save

pytestmark = pytest.mark.vllm


class View:
    def __init__(self, token: str) -> None:
        self.token = token
        self.closed = False
        self.lost: Any = None

    def watch(self, lost: Any) -> None:
        self.lost = lost

    def close(self) -> None:
        self.closed = True


class Machine:
    """What can be attached."""

    def __init__(self) -> None:
        self.there = {"a", "b"}
        self.views: list[View] = []
        self.tries = 0

    def attach(self, attach: Attach) -> View:
        self.tries += 1
        if attach.token not in self.there:
            raise ArenaError(f"no {attach.token}")
        self.views.append(View(attach.token))
        return self.views[-1]


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def mapped(machine: Machine) -> Arenas:
    paged: Any = lambda attach, view: (attach.token, view)  # noqa: E731
    attach: Any = machine.attach
    return Arenas(attach, paged)


def to(token: str) -> Attach:
    return Attach(token, {"token": token}, (), ())


def save(plan: int, arena: str) -> Save:
    return Save(plan, "r", arena, ())


def test_a_copy_has_the_arena_that_its_job_names(mapped: Arenas, machine: Machine) -> None:
    mapped.follow("a", to("a"))
    one = Load(1, "r", "a", (), frozenset())
    mapped.begin([one])
    assert mapped.cache("a") is mapped.cache("a")
    mapped.follow("b", to("b"))
    assert mapped.cache("a")[0] == "a"  # type: ignore[index]
    assert mapped.cache("b")[0] == "b"  # type: ignore[index]
    assert machine.tries == 2


def test_an_arena_whose_time_is_over_goes_with_its_last_copy(mapped: Arenas, machine: Machine) -> None:
    jobs = [save(1, "a"), save(2, "a")]
    mapped.follow("a", to("a"))
    mapped.begin(jobs)
    mapped.cache("a")
    mapped.follow("b", to("b"))
    mapped.end(jobs[0])
    assert mapped.mapped == ["a"]
    assert not machine.views[0].closed
    mapped.end(jobs[1])
    assert mapped.mapped == []
    assert machine.views[0].closed
    with pytest.raises(ArenaError, match="not known"):
        mapped.cache("a")


def test_without_a_server_nothing_stays_mapped(mapped: Arenas, machine: Machine) -> None:
    mapped.follow("a", to("a"))
    mapped.cache("a")
    mapped.follow("", None)
    assert machine.views[0].closed
    mapped.follow("a", None)  # it was only away: nobody says again how to reach it
    mapped.cache("a")
    assert mapped.mapped == ["a"]


def test_a_server_that_dies_while_nothing_runs(mapped: Arenas, machine: Machine) -> None:
    job = save(1, "a")
    mapped.follow("a", to("a"))
    mapped.begin([job])
    mapped.cache("a")
    machine.views[0].lost()
    assert not machine.views[0].closed  # a copy is under way
    mapped.end(job)
    assert machine.views[0].closed
    with pytest.raises(ArenaError, match="not known"):
        mapped.cache("a")
    mapped.follow("b", to("b"))
    mapped.cache("b")
    machine.views[1].lost()
    assert machine.views[1].closed


def test_an_arena_that_cannot_be_had_is_not_tried_at_every_copy(
    mapped: Arenas, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.there = set()
    mapped.follow("a", to("a"))
    for _ in range(5):
        with pytest.raises(ArenaError, match="no a"):
            mapped.cache("a")
    assert machine.tries == 1
    machine.there = {"a"}
    monkeypatch.setattr(arenas, "RETRY_S", 0.0)
    assert mapped.cache("a")[0] == "a"  # type: ignore[index]


def test_an_arena_of_another_shape_is_let_go(machine: Machine) -> None:
    def paged(attach: Attach, view: Any) -> Any:
        raise ValueError("another shape")

    attach: Any = machine.attach
    made = Arenas(attach, paged)
    made.follow("a", to("a"))
    for _ in range(3):
        with pytest.raises(ValueError, match="another shape"):
            made.cache("a")
    assert [view.closed for view in machine.views] == [True]
    assert made.mapped == []


def test_a_job_of_no_arena_fails(mapped: Arenas) -> None:
    mapped.follow("a", to("a"))
    with pytest.raises(ArenaError):
        mapped.cache("")
    mapped.close()
    mapped.close()
    with pytest.raises(ArenaError):
        mapped.cache("a")
