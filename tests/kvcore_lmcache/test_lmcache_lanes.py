"""Tasks and their events, with an event of the same kind as LMCache's."""

import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from kvcore_lmcache import lanes
from kvcore_lmcache.lanes import Lane

PATIENCE_S = 60.0


class Event:
    """An eventfd, as LMCache's notifier."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self.fd

    def notify(self) -> None:
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1


@pytest.fixture
def lane() -> Iterator[Lane[str]]:
    lane: Lane[str] = Lane("test", 2, Event())
    yield lane
    lane.close(PATIENCE_S)


def result(lane: Lane[str], number: int) -> str:
    """As LMCache's loop: wait for the event, consume it, ask."""
    give_up = time.monotonic() + PATIENCE_S
    while (found := lane.take(number)) is None:
        assert time.monotonic() < give_up
        if select.select([lane.fd], [], [], PATIENCE_S)[0]:
            os.eventfd_read(lane.fd)
    return found


def test_a_task_is_announced_and_told_once(lane: Lane[str]) -> None:
    number = lane.submit(lambda: "done", lambda: "not")
    assert result(lane, number) == "done"
    assert lane.take(number) is None
    assert lane.take(12345) is None


def test_tasks_have_numbers_of_their_own_and_are_told_together(lane: Lane[str]) -> None:
    numbers = [lane.submit(lambda i=i: str(i), lambda: "not") for i in range(50)]  # type: ignore[misc]
    assert len(set(numbers)) == 50
    found: dict[int, str] = {}
    give_up = time.monotonic() + PATIENCE_S
    while len(found) < 50:
        assert time.monotonic() < give_up
        select.select([lane.fd], [], [], PATIENCE_S)
        found |= lane.take_all()
    assert [found[n] for n in numbers] == [str(i) for i in range(50)]


def test_a_task_that_raises_has_its_other_result(lane: Lane[str]) -> None:
    assert result(lane, lane.submit(lambda: str(1 // 0), lambda: "not")) == "not"


def test_a_task_that_hangs_keeps_no_other_waiting(lane: Lane[str]) -> None:
    release = threading.Event()
    hanging = lane.submit(lambda: str(release.wait(PATIENCE_S)), lambda: "not")
    assert result(lane, lane.submit(lambda: "done", lambda: "not")) == "done"
    assert lane.take(hanging) is None
    release.set()
    assert result(lane, hanging) == "True"


def test_a_task_that_has_ended_already_waits_for_no_other(lane: Lane[str]) -> None:
    release = threading.Event()
    hanging = [lane.submit(lambda: str(release.wait(PATIENCE_S)), lambda: "not") for _ in range(2)]
    try:
        number = lane.ended("refused")
        assert number not in hanging
        assert select.select([lane.fd], [], [], 0)[0]
        assert lane.take(number) == "refused"
    finally:
        release.set()


def test_the_end_waits_for_what_runs_and_begins_nothing_more() -> None:
    lane: Lane[str] = Lane("test", 1, Event())
    begun, release = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        release.wait(PATIENCE_S)
        return "done"

    first = lane.submit(work, lambda: "not")
    second = lane.submit(lambda: "done", lambda: "not")
    assert begun.wait(PATIENCE_S)
    assert not lane.close(0.01)  # it says that one still runs
    release.set()
    give_up = time.monotonic() + PATIENCE_S
    while len(found := dict(lane._results)) < 2:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    assert found == {first: "done", second: "not"}
    late = lane.submit(lambda: "done", lambda: "not")
    assert lane.take(late) == "not"


def test_results_that_nobody_asks_for_do_not_pile_up(lane: Lane[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_RESULTS", 5)
    numbers = [lane.submit(lambda: "done", lambda: "not") for _ in range(100)]
    assert result(lane, lane.submit(lambda: "last", lambda: "not")) == "last"
    give_up = time.monotonic() + PATIENCE_S
    while lane._work.qsize():
        assert time.monotonic() < give_up
        time.sleep(0.01)
    assert len([n for n in numbers if lane.take(n)]) <= 5
