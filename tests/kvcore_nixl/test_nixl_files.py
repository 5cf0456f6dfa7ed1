"""The directory: what lies where, what is left alone, what is cleaned up, what goes wrong with a file system."""

import fcntl
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nixl_place import in_files

from kvcore.api import MISSING, STORED, Failed, Loaded, ObjectKey, StorageError, Usage
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, make_key, source
from kvcore_nixl.paths import CONTROL, object_path

MIB = 1 << 20
Mount = Callable[[str, int], Path]


def put(driver: Driver, number: int, nbytes: int = 100_000) -> object:
    return driver.store([source(make_key(number), content(number, nbytes), (4096,))])[0]


def get(driver: Driver, number: int) -> object:
    """The object's bytes, or the outcome when it was not loaded."""
    room = Room(4 * MIB)
    (outcome,) = driver.load([room.item(make_key(number))])
    return bytes(room.view[: outcome.nbytes]) if isinstance(outcome, Loaded) else outcome


def place(root: Path, number: int) -> Path:
    return Path(object_path(str(root), make_key(number)))


def unfinished(root: Path) -> list[str]:
    return os.listdir(root / CONTROL)


def kind(outcome: object) -> str:
    assert isinstance(outcome, Failed), outcome
    return outcome.kind


# -- full, read-only, removed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"direct": "off"}, {"params": {"use_uring": True}}], ids=str)
def test_a_full_disk(mounted: Mount, options: dict[str, object]) -> None:
    """Stores fail as `full`, whole batches and single objects; loads go on; room that comes back is used."""
    folder = mounted("tmpfs", 24)
    with in_files(folder / "objects", **options) as driver:
        outcomes = [put(driver, i, 3 * MIB) for i in range(12)]
        stored = [i for i, outcome in enumerate(outcomes) if outcome == STORED]
        assert stored == list(range(len(stored)))
        assert 5 <= len(stored) <= 8
        assert {kind(outcome) for outcome in outcomes[len(stored) :]} == {"full"}
        assert unfinished(folder / "objects") == []
        assert all(get(driver, i) == content(i, 3 * MIB) for i in stored)
        driver.delete([make_key(0)])
        batch = driver.store([source(make_key(i), content(i, 3 * MIB), (4096,)) for i in (20, 21, 22, 23)])
        assert STORED in batch
        assert {kind(outcome) for outcome in batch if outcome != STORED} == {"full"}
        assert unfinished(folder / "objects") == []
    with in_files(folder / "objects", **options) as driver:  # a full disk is no reason not to open
        assert get(driver, 1) == content(1, 3 * MIB)


def test_a_read_only_directory(mounted: Mount, caplog: pytest.LogCaptureFixture) -> None:
    """What is there is loaded; nothing is stored; a delete holds for this process."""
    folder = mounted("tmpfs", 24)
    with in_files(folder) as driver:
        for i in range(3):
            assert put(driver, i) == STORED
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)
    with caplog.at_level(logging.WARNING, "kvcore"), in_files(folder) as driver:
        assert f"{folder} is not writable (Read-only file system): objects are loaded, none is stored" in caplog.text
        assert get(driver, 0) == content(0, 100_000)
        assert kind(put(driver, 7)) == "read_only"
        driver.delete([make_key(0)])
        assert driver.exists([make_key(i) for i in range(4)]) == [False, True, True, False]
        assert get(driver, 0) == MISSING
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True, capture_output=True)
    with in_files(folder) as driver:
        assert get(driver, 0) == content(0, 100_000)
        assert put(driver, 7) == STORED


def test_a_directory_that_is_removed_meanwhile(tmp_path: Path) -> None:
    root = tmp_path / "objects"
    with in_files(root) as driver:
        assert put(driver, 0) == STORED
        shutil.rmtree(root)
        assert get(driver, 0) == MISSING
        assert put(driver, 1) == STORED
        assert get(driver, 1) == content(1, 100_000)


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/kvcore"])
def test_a_directory_that_cannot_be(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot be used.*`path`") as caught, in_files(tmp_path / where):
        pass
    assert str(tmp_path / where) in str(caught.value)


def test_a_file_system_without_o_direct(mounted: Mount, caplog: pytest.LogCaptureFixture) -> None:
    folder = mounted("ramfs", 8)
    with (
        pytest.raises(StorageError, match=r"does not do O_DIRECT .*`direct: auto`"),
        in_files(folder, direct="on"),
    ):
        pass
    with caplog.at_level(logging.WARNING, "kvcore"), in_files(folder) as driver:
        assert caplog.text.count("does not do O_DIRECT: the page cache is used") == 1
        assert put(driver, 1) == STORED
        assert get(driver, 1) == content(1, 100_000)
        assert unfinished(folder) == []


# -- damaged files ---------------------------------------------------------------------------------------------------


def test_files_that_were_cut_or_replaced(tmp_path: Path) -> None:
    """A shorter file is loaded as it is, for the checksum of its frame to find; an empty one, or no file, is none."""
    with in_files(tmp_path) as driver:
        for i in range(6):
            assert put(driver, i) == STORED
        os.truncate(place(tmp_path, 0), 0)
        os.truncate(place(tmp_path, 1), 50_001)
        place(tmp_path, 2).unlink()
        place(tmp_path, 2).mkdir()
        place(tmp_path, 3).unlink()
        os.mkfifo(place(tmp_path, 3))
        place(tmp_path, 4).unlink()
        place(tmp_path, 4).symlink_to(place(tmp_path, 5))
        assert driver.exists([make_key(i) for i in range(6)]) == [False, True, False, False, False, True]
        rooms = [Room(200_000) for _ in range(6)]
        outcomes = driver.load([room.item(make_key(i)) for i, room in enumerate(rooms)])
        assert outcomes == [MISSING, Loaded(50_001), MISSING, MISSING, MISSING, Loaded(100_000)]
        assert rooms[1].view[:50_001] == content(1, 100_000)[:50_001]
        for i in (0, 1, 3, 4):
            assert put(driver, i) == STORED
            assert get(driver, i) == content(i, 100_000)
        assert isinstance(put(driver, 2), Failed)  # a directory is not ours to remove
        assert put(driver, 5) == STORED


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path) -> None:
    """Loads end with an object, a miss or a failure, and go on; nothing hangs."""
    stop = threading.Event()
    with in_files(tmp_path) as driver:
        assert put(driver, 0, 2 * MIB) == STORED
        path = place(tmp_path, 0)

        def cut() -> None:
            while not stop.is_set():
                os.truncate(path, 4096 * 3 + 17)
                os.truncate(path, 2 * MIB)

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            seen = {type(get(driver, 0)) for _ in range(200)}
        finally:
            stop.set()
            cutter.join()
        assert seen <= {bytes, Failed}
        assert put(driver, 0) == STORED
        assert get(driver, 0) == content(0, 100_000)


def test_a_thousand_keys_every_third_missing(tmp_path: Path) -> None:
    with in_files(tmp_path) as driver:
        keys = [make_key(i) for i in range(1000)]
        there = [i % 3 != 2 for i in range(1000)]
        stored = [i for i in range(1000) if there[i]]
        assert driver.store([source(keys[i], content(i, 4096 + i)) for i in stored]) == [STORED] * len(stored)
        assert driver.exists(keys) == there
        rooms = [Room(8192) for _ in keys]
        outcomes = driver.load([room.item(key) for room, key in zip(rooms, keys, strict=True)])
        assert outcomes == [Loaded(4096 + i) if there[i] else MISSING for i in range(1000)]
        assert all(rooms[i].view[: 4096 + i] == content(i, 4096 + i) for i in stored)
        assert driver.usage() == Usage(sum(4096 + i for i in stored), len(stored))
        assert sorted(e.nbytes for e in driver.entries()) == [4096 + i for i in stored]


def test_the_callers_memory_is_let_go(tmp_path: Path) -> None:
    """Not kept by arrays over it: the core reuses memory only when every view has been let go."""
    with in_files(tmp_path) as driver:
        item = source(make_key(0), content(0, 100_000), (4096,))
        assert driver.store([item]) == [STORED]
        room = Room(100_000, (4096,))
        assert driver.load([room.item(make_key(0))]) == [Loaded(100_000)]
        for view in (*item.buffers, *room.buffers):
            view.release()


# -- killed ----------------------------------------------------------------------------------------------------------

WRITER = """
import itertools, sys
from pathlib import Path
from nixl_place import in_files
from kvcore.testing.memory import content, make_key, source
large = source(make_key(0), content("large", 16 << 20), (4096,))
with in_files(Path(sys.argv[1])) as driver:
    print("ready", flush=True)
    for i in itertools.count():
        driver.store([large._replace(key=make_key((i % 9, j))) for j in range(2)])
"""


def test_killed_in_the_middle_of_stores(tmp_path: Path) -> None:
    """What a killed process leaves unfinished goes at the next open, and only that; what it finished is whole."""
    met = 0
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parent
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            give_up = time.monotonic() + 30
            while not unfinished(tmp_path) and time.monotonic() < give_up:
                pass
            child.send_signal(signal.SIGKILL)
        met += bool(unfinished(tmp_path))
        with in_files(tmp_path) as driver:
            assert unfinished(tmp_path) == []
            room = Room(16 * MIB)
            entries = driver.entries()
            for entry in entries[:3]:
                assert driver.load([room.item(entry.key)]) == [Loaded(16 * MIB)]
                assert room.view == content("large", 16 * MIB)
            driver.delete([entry.key for entry in entries])
    assert met, "no kill met a store: the test has shown nothing"


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    with in_files(tmp_path):
        control = tmp_path / CONTROL
        living, dead, foreign = control / "1-0123456789ab-0", control / "2-0123456789ab-0", control / "notes.txt"
        for path in (living, dead, foreign):
            path.write_text("x")
        with living.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with in_files(tmp_path):
                assert sorted(unfinished(tmp_path)) == sorted([living.name, foreign.name])
    with in_files(tmp_path):
        assert unfinished(tmp_path) == [foreign.name]


def test_what_lies_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    """Foreign files, and an object in a directory where it would not be looked for."""
    with in_files(tmp_path) as driver:
        assert put(driver, 0) == STORED
    stray = tmp_path / "zz" / make_key(1).name
    for path in (tmp_path / "notes.txt", place(tmp_path, 0).parent / "notes.txt", stray):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    with in_files(tmp_path) as driver:
        assert [entry.key for entry in driver.entries()] == [make_key(0)]
        assert driver.usage() == Usage(100_000, 1)
        driver.delete([make_key(0), make_key(1)])
        assert driver.usage() == Usage(0, 0)
    assert stray.read_text() == "mine"
    assert len(list(tmp_path.rglob("notes.txt"))) == 2


def test_everything_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with in_files(tmp_path / "objects") as driver:
            assert put(driver, 0) == STORED
    finally:
        os.umask(old)
    for folder, _, names in os.walk(tmp_path / "objects"):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert all(stat.S_IMODE(os.stat(f"{folder}/{name}").st_mode) == 0o600 for name in names)


# -- passive, and the order of use -----------------------------------------------------------------------------------


def test_a_load_is_a_use_unless_the_store_is_only_examined(tmp_path: Path) -> None:
    with in_files(tmp_path) as driver:
        assert put(driver, 0) == STORED
    old = time.time() - 5 * 86400
    os.utime(place(tmp_path, 0), (old, old))

    def used() -> float:
        with in_files(tmp_path, passive=True) as driver:
            assert get(driver, 0) == content(0, 100_000)
            return driver.entries()[0].used_s or 0.0

    assert used() == pytest.approx(old, abs=1)
    assert used() == pytest.approx(old, abs=1)
    with in_files(tmp_path) as driver:
        get(driver, 0)
    assert used() == pytest.approx(time.time(), abs=60)


def test_examining_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file or directory"), in_files(tmp_path / "absent", passive=True):
        pass
    (tmp_path / "notes.txt").write_text("mine")
    with in_files(tmp_path, passive=True) as driver:
        assert driver.entries() == []
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_delete_that_cannot_be_done_is_an_error_when_examining(mounted: Mount) -> None:
    folder = mounted("tmpfs", 24)
    with in_files(folder) as driver:
        assert put(driver, 0) == STORED
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)
    with in_files(folder, passive=True) as driver:
        with pytest.raises(StorageError, match="Read-only file system"):
            driver.delete([make_key(0)])
        assert driver.exists([make_key(0)]) == [True]


def test_names_are_where_they_were_in_earlier_releases(tmp_path: Path) -> None:
    """Another place would empty every cache."""
    key = ObjectKey(bytes(range(16)), bytes(range(32)), 5)
    assert object_path("/r", key) == (
        "/r/eb/000102030405060708090a0b0c0d0e0f-5-000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )
