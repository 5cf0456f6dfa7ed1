"""The arena across processes: the same bytes, the same generations, and clear errors."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.api import ArenaError, parse_size
from kvcore.l1 import Arena, ArenaView
from kvcore.l1.allocator import ALIGN
from kvcore.l1.arena import available_memory

OWNER = """
import json, sys, time
from kvcore.l1 import Arena
arena = Arena(1 << 20)
arena.buffer[:5] = b"hello"
print(json.dumps(arena.descriptor), flush=True)
time.sleep(60)
"""
WORKER = """
import json, sys
from kvcore.l1 import ArenaView
view = ArenaView.attach(json.loads(sys.argv[1]))
print(bytes(view.buffer[:5]).decode(), view.generation(0), view.generation(4096), view.size, view.address % 4096)
view.buffer[100:105] = b"world"
view.close()
"""


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 20)
    yield arena
    arena.close()


@pytest.fixture
def owner() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Another process that owns an arena, and its descriptor."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    descriptor = json.loads(process.stdout.readline())
    yield process, descriptor
    process.kill()
    process.wait()
    process.stdout.close()


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_worker_sees_bytes_and_generations(arena: Arena) -> None:
    arena.buffer[:5] = b"hello"
    arena.bump([ALIGN])
    first = arena.generation(ALIGN)
    arena.bump([ALIGN])
    assert arena.generation(ALIGN) != first
    seen = subprocess.run(
        [sys.executable, "-c", WORKER, json.dumps(arena.descriptor)], capture_output=True, text=True, check=True
    )
    assert seen.stdout.split() == ["hello", "0", str(arena.generation(ALIGN)), str(1 << 20), "0"]
    assert arena.buffer[100:105] == b"world"


def test_a_worker_keeps_its_mapping_when_the_owner_dies(owner: tuple[Any, dict[str, Any]]) -> None:
    process, descriptor = owner
    view = ArenaView.attach(descriptor)
    assert view.buffer[:5] == b"hello"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert view.buffer[:5] == b"hello"  # no SIGBUS: the memory lives as long as its last user
    view.close()
    with pytest.raises(ArenaError, match=rf"cannot attach the arena of process {descriptor['pid']}.*workers must run"):
        ArenaView.attach(descriptor)


def test_another_arena_in_its_place_is_refused(arena: Arena) -> None:
    before = open_files()
    with pytest.raises(ArenaError, match="owner has been replaced"):
        ArenaView.attach({**arena.descriptor, "token": "00" * 16})
    with pytest.raises(ArenaError, match="owner has been replaced"):
        ArenaView.attach({**arena.descriptor, "size": (1 << 20) - ALIGN})
    with pytest.raises(ArenaError, match="cannot map the arena of 1 GiB"):
        ArenaView.attach({**arena.descriptor, "size": 1 << 30})
    assert open_files() == before


def test_slots_lie_where_huge_pages_fit(arena: Arena) -> None:
    assert arena.address % (2 << 20) == 0
    assert arena.descriptor["start"] % (2 << 20) == 0


def test_what_is_written_while_memory_is_faulted_in_stays() -> None:
    arena = Arena(64 << 20)
    try:
        marks = range(0, arena.size, 1 << 20)
        for i, at in enumerate(marks):
            arena.buffer[at] = i + 1
            if i == 8:
                arena.prefault()
        assert arena._prefault is not None
        arena._prefault.join()
        assert [arena.buffer[at] for at in marks] == [i + 1 for i in range(len(marks))]
    finally:
        arena.close()


def test_any_other_file_in_its_place_is_refused(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\0" * (8 << 20))
    with (tmp_path / "file").open("r+b") as file:
        with pytest.raises(ArenaError, match="owner has been replaced"):
            ArenaView.attach({**arena.descriptor, "fd": file.fileno()})
        file.truncate(0)
        with pytest.raises(ArenaError, match="cannot map"):
            ArenaView.attach({**arena.descriptor, "fd": file.fileno()})
    reader, writer = os.pipe()
    with pytest.raises(ArenaError, match="cannot map"):
        ArenaView.attach({**arena.descriptor, "fd": writer})
    os.close(reader)
    os.close(writer)


def test_more_than_memory_names_both_numbers() -> None:
    before = open_files()
    with pytest.raises(ArenaError, match=r"l1\.size is 1024 TiB, but .* of memory are available: lower") as caught:
        Arena(1 << 50)
    told = parse_size(str(caught.value).split("but ")[1].split(" of memory")[0])
    assert 0.5 < told / available_memory() < 2  # it moves from moment to moment
    assert open_files() == before


def test_a_file_that_may_not_grow_is_closed() -> None:
    before, (soft, hard) = open_files(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
    try:
        with pytest.raises(ArenaError, match="cannot create an arena of 64 MiB: File too large"):
            Arena(64 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_files() == before


def test_no_file_is_left_anywhere(arena: Arena) -> None:
    shm = Path("/dev/shm")
    before = set(shm.iterdir()) if shm.is_dir() else set()
    files = open_files()
    second = Arena(8 << 20)
    second.buffer[:] = b"\1" * (8 << 20)
    assert (set(shm.iterdir()) if shm.is_dir() else set()) == before
    view = ArenaView.attach(second.descriptor)
    view.close()
    second.close()
    assert open_files() == files


def test_close_twice() -> None:
    arena = Arena(1 << 20)
    view = ArenaView.attach(arena.descriptor)
    for _ in range(2):
        view.close()
        arena.close()
    with pytest.raises(ArenaError, match="cannot attach"):
        ArenaView.attach(arena.descriptor)


def test_views_outlive_close() -> None:
    arena = Arena(1 << 20)
    part = arena.buffer[4096:8192]
    part[:] = b"\7" * 4096
    arena.close()
    assert part == b"\7" * 4096
    part[0] = 1  # still mapped: no crash
    assert part[0] == 1


def test_prefault_keeps_the_bytes_and_ends_with_close() -> None:
    arena = Arena(64 << 20)
    arena.buffer[:5] = b"hello"
    arena.prefault()
    deadline = time.monotonic() + 10
    while arena._prefault is not None and arena._prefault.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert arena.buffer[:5] == b"hello"
    arena.close()
    again = Arena(256 << 20)
    again.prefault()
    again.close()  # in the middle of it
    assert again._prefault is not None
    assert not again._prefault.is_alive()


@pytest.mark.parametrize("size", [1, ALIGN - 1, ALIGN, 3 * ALIGN + 1])
def test_odd_sizes_are_whole_pages(size: int) -> None:
    arena = Arena(size)
    assert arena.size % ALIGN == 0
    assert 0 <= arena.size - size < ALIGN
    assert arena.address % ALIGN == 0
    assert len(arena.buffer) == arena.size
    arena.bump([arena.size - ALIGN])
    assert arena.generation(arena.size - ALIGN) > 0
    assert bytes(arena.buffer) == b"\0" * arena.size  # the table of generations is not in the payload
    arena.close()
