"""Full, read-only, refusing and wrong file systems; things in the way. Loads go on, other files are not touched."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_child import Children, blob, is_whole, key_of
from disk_place import CONTROL, account_locked, files, make_disk, opened, unfinished

from kvcore.api import MISSING, STORED, Failed, Item, Loaded, StorageError
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, source
from kvcore_disk.account import Account
from kvcore_disk.paths import object_path
from kvcore_disk.storage import DiskStorage

MIB = 1 << 20
Mount = Callable[[str, int], Path]


def put(driver: Driver, number: int, nbytes: int = 100_000) -> object:
    return driver.store([source(key_of(number), blob(number, nbytes), (4096,))])[0]


def get(driver: Driver, number: int) -> bytes | None:
    """The object, or None when it is missing; it must not fail."""
    room = Room(4 * MIB)
    (outcome,) = driver.load([room.item(key_of(number))])
    assert not isinstance(outcome, Failed), outcome
    return bytes(room.view[: outcome.nbytes]) if isinstance(outcome, Loaded) else None


def place(root: Path, number: int) -> Path:
    return Path(object_path(str(root), key_of(number)))


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True, capture_output=True)


# -- full ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_file_system_smaller_than_the_capacity(mounted: Mount, kind: str, direct: str) -> None:
    """Old objects make room for new ones; nothing torn is left, and the count stays right."""
    root = mounted(kind, 24) / "objects"
    with opened(root, "1GiB", direct=direct) as driver:
        outcomes = [put(driver, i, MIB) for i in range(50)]
        assert outcomes == [STORED] * 50
        there = [i for i in range(50) if get(driver, i) is not None]
        assert there[-1] == 49
        assert 8 < len(there) < 24
        assert all(is_whole(get(driver, i) or b"") for i in there)
        assert unfinished(root) == []
        with account_locked(root) as counted:
            assert counted == sum(files(root).values())


@pytest.mark.timeout(30)
def test_the_folder_of_unfinished_writes_was_tidied_away(tmp_path: Path) -> None:
    """A cleaner of empty directories costs one object, and neither this storage nor another hangs."""
    with opened(tmp_path / "objects", "1GiB") as driver:
        assert put(driver, 1) == STORED
        shutil.rmtree(tmp_path / "objects" / CONTROL / "writing")
        outcomes = [put(driver, i) for i in (2, 3, 4)]
        assert outcomes[1:] == [STORED, STORED]
        with opened(tmp_path / "objects", "1GiB") as other:
            assert get(other, 1) is not None
            assert put(other, 5) == STORED


@pytest.mark.parametrize("what", ["empty", "directory", "socket"])
def test_an_object_replaced_by_something_else_is_stored_again(tmp_path: Path, what: str) -> None:
    root = tmp_path / "objects"
    with opened(root, "1GiB") as driver:
        assert put(driver, 1) == STORED
        path = place(root, 1)
        path.unlink()
        if what == "empty":
            path.touch()
        elif what == "directory":
            path.mkdir()
        else:
            listener = socket.socket(socket.AF_UNIX)
            here = os.getcwd()
            os.chdir(path.parent)  # a socket's path is short
            try:
                listener.bind("s")
                os.rename("s", path.name)
            finally:
                os.chdir(here)
                listener.close()
        assert get(driver, 1) is None
        assert driver.exists([key_of(1)]) == [False]
        assert put(driver, 1) == STORED
        assert get(driver, 1) is not None


def test_a_file_system_out_of_inodes(mounted: Mount) -> None:
    """There are bytes to spare, but no file can be made: old objects make room all the same."""
    folder = mounted("tmpfs", 64)
    remount(folder, "nr_inodes=400")
    root = folder / "objects"
    with opened(root, "1GiB") as driver:
        outcomes = [put(driver, i, 5000) for i in range(600)]
        # a store that needs a new directory may fail; one that follows finds room again
        assert outcomes.count(STORED) > 500
        assert get(driver, 599) is not None or outcomes[599] != STORED
        assert unfinished(root) == []


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_file_system_full_of_other_things(mounted: Mount, kind: str) -> None:
    """What the cache has goes first; then stores fail as `full`; then there is room again."""
    folder = mounted(kind, 24)
    root = folder / "objects"
    with opened(root, "1GiB") as driver:
        assert put(driver, 0, MIB) == STORED
        fill_up(folder / "others")
        assert put(driver, 1, MIB) == STORED  # in the room of the first
        assert get(driver, 0) is None
        fill_up(folder / "more")
        failed = put(driver, 2, 3 * MIB)
        assert isinstance(failed, Failed)
        assert failed.kind == "full"
        assert unfinished(root) == []
    with opened(root, "1GiB") as driver:  # a full file system is no reason not to open
        failed = put(driver, 3, 3 * MIB)
        assert isinstance(failed, Failed)
        assert failed.kind == "full"
        (folder / "others").unlink()
        assert put(driver, 4, 3 * MIB) == STORED
        assert is_whole(get(driver, 4) or b"")


def fill_up(path: Path) -> None:
    with pytest.raises(OSError, match="No space"), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(65_536))


def test_objects_larger_than_the_system_allows_a_file_to_be(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: a real EFBIG. Nothing is evicted for it, since that would not help."""
    report = tmp_path / "report"
    with Children() as children:
        assert children.kill(children.run("limited", root=str(tmp_path / "objects"), report=str(report)), 0) == 0
    outcomes, used = json.loads(report.read_text())
    assert outcomes[0] == "Stored()"
    assert all("too_large" in outcome for outcome in outcomes[1:])
    assert used == sum(files(tmp_path / "objects").values()) == 32_768


def test_an_object_larger_than_the_capacity_evicts_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, "1MiB") as driver:
        put(driver, 0)
        failed = put(driver, 1, MIB + 1)
        assert isinstance(failed, Failed)
        assert failed.kind == "too_large"
        assert get(driver, 0) is not None
        assert put(driver, 2, MIB - 32) == STORED  # the digest takes 32 bytes
        assert get(driver, 0) is None


# -- read-only -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_read_only_from_the_start(mounted: Mount, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = mounted(kind, 24)
    with opened(folder) as driver:
        for i in range(4):
            assert put(driver, i) == STORED
    os.truncate(place(folder, 3), 0)
    remount(folder, "ro")
    with caplog.at_level(logging.WARNING, "kvcore"), opened(folder) as driver:
        assert "is not writable" in caplog.text
        assert is_whole(get(driver, 0) or b"")
        assert get(driver, 3) is None
        failed = put(driver, 9)
        assert isinstance(failed, Failed)
        assert failed.kind == "read_only"
        driver.delete([key_of(1)])  # holds for this process
        assert driver.exists([key_of(i) for i in range(5)]) == [True, False, True, False, False]
        assert get(driver, 1) is None
        assert len(driver.entries()) == 3
    remount(folder, "rw")
    with opened(folder) as driver:
        assert get(driver, 1) is not None
        assert put(driver, 9) == STORED


def test_read_only_all_of_a_sudden(mounted: Mount) -> None:
    """By `chattr +i`: a file system that is in use for writing cannot be remounted."""
    folder = mounted("ext4", 24)
    with opened(folder, "200KiB") as driver:
        assert put(driver, 0) == STORED
        immutable = [str(place(folder, 0).parent), str(folder / CONTROL / "writing")]
        subprocess.run(["chattr", "+i", *immutable], check=True)
        try:
            assert is_whole(get(driver, 0) or b"")
            for number in (1, 0, 2):  # 1 and 2 would have to evict
                failed = put(driver, number)
                assert isinstance(failed, Failed)
                assert failed.kind == "read_only"
            with pytest.raises(StorageError):
                driver.delete([key_of(0)])
            assert is_whole(get(driver, 0) or b"")
        finally:
            subprocess.run(["chattr", "-i", *immutable], check=True)
        for number in (1, 2, 3):  # what could not be evicted then is evicted now
            assert put(driver, number) == STORED
        assert get(driver, 0) is None
        with account_locked(folder) as counted:
            assert counted == sum(files(folder).values())


def test_a_device_that_fails(mounted: Mount) -> None:
    """What ext4 does after an error of its device: some kernels still read. Nothing is raised, nothing is torn."""
    folder = mounted("ext4", 24)
    with opened(folder) as driver:
        assert put(driver, 0) == STORED
        remount(folder, "abort")
        room = Room(200_000)
        (outcome,) = driver.load([room.item(key_of(0))])
        assert isinstance(outcome, Failed) or is_whole(bytes(room.view[: outcome.nbytes]))  # type: ignore[union-attr]
        assert isinstance(put(driver, 1), Failed)
        with pytest.raises(StorageError):
            driver.delete([key_of(0)])


# -- O_DIRECT refused ------------------------------------------------------------------------------------------------


def refuse_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", refusing)


def refuse_at_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)

        def refusing(fd: int, *rest: object, real: Callable[..., int] = real) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, *rest)

        monkeypatch.setattr(os, name, refusing)


@pytest.mark.parametrize("refuse", [refuse_at_open, refuse_at_transfer])
def test_without_o_direct_the_page_cache_is_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[[pytest.MonkeyPatch], None],
) -> None:
    with opened(tmp_path, direct="on") as driver:
        assert put(driver, 0) == STORED
    refuse(monkeypatch)
    with caplog.at_level(logging.WARNING, "kvcore"), opened(tmp_path) as driver:
        assert is_whole(get(driver, 0) or b"")
        assert put(driver, 1) == STORED
        assert is_whole(get(driver, 1) or b"")
        assert caplog.text.count("does not do O_DIRECT") == 1
    with pytest.raises(StorageError, match=r"does not do O_DIRECT.*direct: auto"), opened(tmp_path, direct="on"):
        pass
    assert unfinished(tmp_path) == []
    with opened(tmp_path, direct="off") as driver:
        assert is_whole(get(driver, 1) or b"")


def test_a_real_file_system_without_o_direct(mounted: Mount) -> None:
    root = mounted("ramfs", 8)
    with pytest.raises(StorageError, match="does not do O_DIRECT"), opened(root, direct="on"):
        pass
    with opened(root) as driver:
        assert put(driver, 1) == STORED
        assert is_whole(get(driver, 1) or b"")
        assert sum(files(root).values()) == 102_400


# -- wrong directories -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/kvcore"])
def test_a_directory_that_cannot_be_is_an_error_with_the_remedy(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be used") as caught, opened(tmp_path / where):
        pass
    text = str(caught.value)
    assert str(tmp_path / where) in text
    assert "`path`" in text
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("where", [CONTROL, f"{CONTROL}/live", f"{CONTROL}/writing"])
def test_a_file_where_the_account_should_be(tmp_path: Path, where: str) -> None:
    (tmp_path / where).parent.mkdir(exist_ok=True)
    (tmp_path / where).write_text("in the way")
    with pytest.raises(StorageError, match="`path`"), opened(tmp_path):
        pass
    assert (tmp_path / where).read_text() == "in the way"


def test_a_directory_where_the_account_should_be(tmp_path: Path) -> None:
    (tmp_path / CONTROL / "account").mkdir(parents=True)
    with pytest.raises(StorageError, match="`path`"), opened(tmp_path):
        pass


@pytest.mark.parametrize("capacity", ["64MiB", "220KiB"])
def test_a_directory_that_is_removed_while_it_is_used(tmp_path: Path, capacity: str) -> None:
    """One store fails, then everything is made anew, in two storages alike."""
    root = tmp_path / "objects"
    with opened(root, capacity) as one, opened(root, capacity) as two:
        assert put(one, 0) == STORED
        shutil.rmtree(root)
        assert get(one, 0) is None
        assert get(two, 0) is None
        for driver in (one, two):
            assert isinstance(put(driver, 1), Failed)
            assert put(driver, 1) == STORED
            assert put(driver, 2) == STORED
        shutil.rmtree(place(root, 2).parent)
        assert put(one, 2) == STORED
        assert is_whole(get(two, 2) or b"")
    with opened(root, capacity) as one:
        assert is_whole(get(one, 2) or b"")


def test_threads_that_find_the_directory_gone_make_one_account_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, together = tmp_path / "objects", threading.Barrier(2)
    made: list[Account] = []

    class Slow(Account):
        def __init__(self, *args: Any) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(1)  # for a second one
            super().__init__(*args)
            made.append(self)

    with opened(root) as driver:
        storage: Any = driver.storage
        old = storage._account
        shutil.rmtree(root)
        monkeypatch.setattr("kvcore_disk.storage.Account", Slow)
        threads = [threading.Thread(target=storage._start_anew, args=(old,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert made == [storage._account]
        assert put(driver, 1) == STORED
        with account_locked(root) as counted:
            assert counted == sum(files(root).values())


def test_everything_is_private(tmp_path: Path) -> None:
    old = os.umask(0o000)
    try:
        with opened(tmp_path / "objects") as driver:
            assert put(driver, 0) == STORED
            for folder, folders, names in os.walk(tmp_path / "objects"):
                assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
                for name in names:
                    assert stat.S_IMODE(os.stat(f"{folder}/{name}").st_mode) == 0o600
                assert folders or names or folder.endswith("/writing")
    finally:
        os.umask(old)


# -- foreign and damaged files ---------------------------------------------------------------------------------------


def test_foreign_files_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, "1MiB") as driver:
        assert put(driver, 0) == STORED
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_bytes(b"precious")
    name, bucket = place(tmp_path, 0).name, place(tmp_path, 0).parent
    foreign = [
        tmp_path / "README",
        tmp_path / name,  # an object's name, in the wrong directory
        tmp_path / "a" / "notes",
        bucket / "notes.txt",
        bucket / name.upper(),
        bucket / f"{name}.tmp",
        bucket / ("0" * 32 + "-0-" + "0" * 64),  # belongs into another bucket
        tmp_path / CONTROL / "writing" / "notes",
        tmp_path / CONTROL / "live" / "notes",
        tmp_path / "z" / "z" / "notes",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"foreign")
    for number, make in ((50, os.symlink), (51, os.symlink), (52, os.mkdir), (53, os.mkfifo)):
        place(tmp_path, number).parent.mkdir(parents=True, exist_ok=True)
        make(*((outside if number == 50 else "nowhere",) if make is os.symlink else ()), place(tmp_path, number))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING, "kvcore"), opened(tmp_path, "1MiB") as driver:
        assert "foreign files" in caplog.text
        assert [e.key for e in driver.entries()] == [key_of(0)]
        usage = driver.usage()
        assert usage is not None
        assert usage.nbytes == 102_400
        odd = [key_of(i) for i in range(50, 54)]
        assert driver.exists(odd) == [False] * 4
        assert driver.load([Room(1000).item(k) for k in odd]) == [MISSING] * 4  # a pipe would block
        driver.delete(odd)
        for i in range(1, 40):  # evicts what it can
            assert put(driver, i) == STORED
        assert driver.usage().nbytes <= MIB  # type: ignore[union-attr]
    assert [path.read_bytes() for path in foreign] == [b"foreign"] * len(foreign)
    assert os.readlink(place(tmp_path, 50)) == str(outside)
    assert os.readlink(place(tmp_path, 51)) == "nowhere"
    assert place(tmp_path, 52).is_dir()
    assert place(tmp_path, 53).is_fifo()
    with opened(tmp_path, "1MiB") as driver:
        assert put(driver, 50) == STORED  # the link goes, what it pointed to stays
        assert put(driver, 52) == STORED  # and so does an empty directory
        assert unfinished(tmp_path) == ["notes"]
        with account_locked(tmp_path) as counted:
            assert counted == sum(e.nbytes + -e.nbytes % 4096 for e in driver.entries())
    assert outside.read_bytes() == b"precious"


def test_damaged_files_are_shorter_or_missing_and_can_be_replaced(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        for i in range(3):
            assert put(driver, i) == STORED
        os.truncate(place(tmp_path, 0), 0)
        os.truncate(place(tmp_path, 1), 50_001)
        assert get(driver, 0) is None
        assert get(driver, 1) == blob(1, 100_000)[:50_001]  # the frame's checksum, in the core, finds this
        assert put(driver, 0) == STORED
        assert put(driver, 1) == STORED
        assert get(driver, 0) == blob(0, 100_000)
        assert get(driver, 1) == blob(1, 100_000)
    os.truncate(place(tmp_path, 2), 0)
    with opened(tmp_path) as driver:
        assert driver.exists([key_of(2)]) == [False]
        assert put(driver, 2) == STORED
        with account_locked(tmp_path) as counted:
            assert counted == sum(files(tmp_path).values())


def test_what_a_power_loss_has_emptied_is_removed_with_the_next_start(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        for i in range(3):
            assert put(driver, i) == STORED
    os.truncate(place(tmp_path, 1), 0)
    mine = place(tmp_path, 1).with_name("mine")
    mine.touch()
    with opened(tmp_path) as driver:
        assert not place(tmp_path, 1).exists()
        assert mine.exists()  # the name of no object
        assert len(driver.entries()) == 2
        assert get(driver, 2) is not None
        with account_locked(tmp_path) as counted:
            assert counted == sum(n for p, n in files(tmp_path).items() if n)


def test_an_empty_object_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        assert isinstance(driver.store([source(key_of(0), b"")])[0], Failed)
        assert driver.entries() == []


def test_calls_outside_of_open_and_close_are_harmless(tmp_path: Path) -> None:
    storage = make_disk(tmp_path)
    storage.close()
    assert isinstance(storage.store([source(key_of(0), b"early")])[0], Failed)
    storage.open()
    storage.close()
    storage.close()
    assert isinstance(storage.store([source(key_of(0), b"late")])[0], Failed)


# -- a batch that does not fit ---------------------------------------------------------------------------------------


def batch(numbers: range, nbytes: int) -> list[Item]:
    return [source(key_of(i), blob(i, nbytes), (4096,)) for i in numbers]


def test_of_a_batch_larger_than_the_capacity_the_front_is_kept(tmp_path: Path) -> None:
    """What was there before goes; what was accepted stays; the rest is refused, each time in the same way."""
    root = tmp_path / "objects"
    for policy in ("lru", "fifo", "lfu", "mru"):
        with opened(root / policy, f"{4 * (MIB + 4096)}B", eviction=policy) as driver:
            assert [put(driver, 100 + i, MIB) for i in range(4)] == [STORED] * 4
            for round_ in range(3):
                numbers = range(20 * round_, 20 * round_ + 12)
                outcomes = driver.store(batch(numbers, MIB))
                assert outcomes[:4] == [STORED] * 4
                assert {o.kind for o in outcomes[4:] if isinstance(o, Failed)} == {"full"}
                assert len(outcomes) == 12
                there = [is_whole(get(driver, i) or b"") for i in numbers]
                assert there == [True] * 4 + [False] * 8
            assert put(driver, 200, MIB) == STORED, "nothing stays pinned"


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_of_a_batch_larger_than_the_file_system_the_front_is_kept(mounted: Mount, kind: str) -> None:
    root = mounted(kind, 8) / "objects"
    with opened(root, "1GiB") as driver:
        usage = driver.usage()
        assert usage is not None
        assert usage.capacity_bytes is not None
        assert usage.capacity_bytes <= 8 * MIB, "what the file system leaves"
        outcomes = driver.store(batch(range(20), MIB))
        kept = outcomes.count(STORED)
        assert kept >= 6
        assert outcomes[:kept] == [STORED] * kept
        assert {o.kind for o in outcomes[kept:] if isinstance(o, Failed)} == {"full"}
        assert [is_whole(get(driver, i) or b"") for i in range(20)] == [True] * kept + [False] * (20 - kept)
        assert put(driver, 30, MIB) == STORED
        assert sum(get(driver, i) is not None for i in range(20)) >= kept - 2, "little more is given up than is needed"
        assert unfinished(root) == []


# -- odd entries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_an_odd_entry_is_a_miss_of_one_object(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """It says nothing of the file system, and goes when its object is stored again."""
    root = tmp_path / "objects"
    with opened(root, "64MiB") as driver:
        assert isinstance(driver.storage, DiskStorage)
        assert [put(driver, i) for i in (1, 2)] == [STORED] * 2
        direct = driver.storage._direct
        path = place(root, 1)
        path.unlink()
        os.mkfifo(path) if kind == "fifo" else path.mkdir()
        assert get(driver, 1) is None
        assert get(driver, 2) is not None
        assert driver.storage._direct == direct
        assert "O_DIRECT" not in caplog.text or not direct
        assert put(driver, 1) == STORED
        assert get(driver, 1) is not None


def test_a_directory_that_is_not_empty_is_left_alone_and_named(tmp_path: Path) -> None:
    root = tmp_path / "objects"
    with opened(root, "64MiB") as driver:
        assert put(driver, 1) == STORED
        path = place(root, 1)
        path.unlink()
        path.mkdir()
        (path / "somebodys").touch()
        refused = put(driver, 1)
        assert isinstance(refused, Failed)
        assert str(path) in refused.reason
        assert refused.kind == "corrupt", "an answer: the storage works"
        assert (path / "somebodys").exists()
        assert put(driver, 2) == STORED
        assert unfinished(root) == []
