"""NIXL by our own hands: who failed is known, nothing is given back too early, errors say what to do."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcore.testing.memory import aligned
from kvcore_nixl.agent import BACKENDS, MAX_IO_BYTES, Agent, Job, Piece
from kvcore_nixl.library import load_nixl
from kvcore_nixl.memory import PAGE, Buffers


@pytest.fixture
def agent() -> Agent:
    return Agent(load_nixl(logging.getLogger("kvcore")), BACKENDS["posix"], {})


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[list[int]]:
    """Two files to write, and one that is read-only."""
    (tmp_path / "2").write_bytes(bytes(PAGE))
    found = [os.open(tmp_path / str(i), os.O_RDWR | os.O_CREAT) for i in range(2)]
    found.append(os.open(tmp_path / "2", os.O_RDONLY))
    yield found
    for fd in found:
        os.close(fd)


def test_the_failure_of_one_is_not_that_of_its_neighbours(agent: Agent, fds: list[int]) -> None:
    memory = aligned(3 * PAGE)
    memory[:] = b"x" * len(memory)
    [(start, nbytes)] = Buffers([memory]).places
    agent.register(start, nbytes)
    jobs = [Job(fd, "", [Piece(start, PAGE, 0)]) for fd in (fds[0], fds[2], fds[1])]
    errors = agent.move("WRITE", jobs)
    assert errors[0] == errors[2] == ""
    assert errors[1] == "NIXL_ERR_BACKEND"
    assert not agent.sound
    assert os.pread(fds[1], 2 * PAGE, 0) == b"x" * PAGE
    assert agent.move("WRITE", jobs[:1]) == [""]


def test_a_short_read_is_a_failure(agent: Agent, fds: list[int]) -> None:
    memory = aligned(2 * PAGE)
    [place] = Buffers([memory]).places
    assert agent.move("READ", [Job(fds[2], "", [Piece(place[0], 2 * PAGE, 0)])], [place]) == ["NIXL_ERR_BACKEND"]


def test_memory_outside_is_registered_for_the_call(agent: Agent, fds: list[int]) -> None:
    memory = aligned(PAGE)
    memory[:] = b"y" * PAGE
    [place] = Buffers([memory]).places
    job = Job(fds[0], "", [Piece(place[0], PAGE, 0)])
    assert agent.move("WRITE", [job]) == ["NIXL_ERR_NOT_FOUND"]
    assert agent.move("WRITE", [job], [place, place]) == [""]
    assert agent.move("WRITE", [job]) == ["NIXL_ERR_NOT_FOUND"]


def test_large_pieces_are_cut(agent: Agent, fds: list[int]) -> None:
    memory = aligned(2 * MAX_IO_BYTES + PAGE)
    memory[:] = os.urandom(PAGE) * (len(memory) // PAGE)
    [place] = Buffers([memory]).places
    assert agent.move("WRITE", [Job(fds[0], "", [Piece(*place, 0)])], [place]) == [""]
    assert os.pread(fds[0], len(memory) + 1, 0) == memory


def test_an_error_meanwhile_waits_for_the_transfer(agent: Agent, fds: list[int]) -> None:
    memory = aligned(1 << 20)
    memory[:] = b"z" * len(memory)
    [place] = Buffers([memory]).places

    def fail() -> None:
        raise RuntimeError("meanwhile")

    with pytest.raises(RuntimeError, match="meanwhile"):
        agent.move("WRITE", [Job(fds[0], "", [Piece(*place, 0)])], [place], fail)
    assert os.pread(fds[0], len(memory), 0) == memory


def test_jobs_without_pieces_and_no_jobs(agent: Agent) -> None:
    done: list[int] = []
    assert agent.move("READ", [Job(-1, "", [])], meanwhile=lambda: done.append(1)) == [""]
    assert agent.move("READ", [], meanwhile=lambda: done.append(2)) == []
    assert done == [1, 2]
