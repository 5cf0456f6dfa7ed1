"""The capacity holds, and what a killed process leaves is found, whoever else uses the directory."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_child import Children, blob, is_whole, key_of
from disk_place import CONTROL, account_locked, files, make_disk, opened, set_account, unfinished

from kvcore.api import STORED, Failed, Loaded, StorageError
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, source
from kvcore_disk import account, transfer
from kvcore_disk.account import Account

MIB = 1 << 20


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children() as children:
        yield children


def check_settled(driver: Driver, root: Path, living: int = 1) -> int:
    """Nothing unfinished, all objects whole, the account equal to the files. How many objects there are."""
    assert unfinished(root) == []
    assert len(os.listdir(root / CONTROL / "live")) == living
    with account_locked(root) as counted:
        assert counted == sum(files(root).values())
    entries = driver.entries()
    for entry in entries:
        room = Room(entry.nbytes + 100)
        (outcome,) = driver.load([room.item(entry.key)])
        assert outcome == Loaded(entry.nbytes)
        assert is_whole(bytes(room.view[: entry.nbytes]))
    usage = driver.usage()
    assert usage is not None
    assert usage.capacity_bytes is not None
    assert usage.nbytes <= usage.capacity_bytes
    assert usage.objects == len(entries)
    return len(entries)


def test_three_processes_never_exceed_the_capacity(tmp_path: Path, children: Children) -> None:
    capacity = 6 * MIB
    with opened(tmp_path, "6MiB"):
        pass
    pids = [
        children.run("write", root=str(tmp_path), capacity="6MiB", seed=seed, seconds=3, threads=2) for seed in range(3)
    ]
    end = time.monotonic() + 3.2
    most = samples = most_unfinished = 0
    while time.monotonic() < end:
        with account_locked(tmp_path) as counted:
            held = sum(files(tmp_path).values())
            most_unfinished = max(most_unfinished, len(unfinished(tmp_path)))
        assert held <= counted <= capacity
        most = max(most, held)
        samples += 1
        time.sleep(0.002)
    assert [children.kill(pid, 0) for pid in pids] == [0, 0, 0]
    assert samples > 50
    assert most > 0.6 * capacity, "the writers were too slow to try the capacity"
    assert most_unfinished > 1, "no two writes were ever in flight at once"
    with opened(tmp_path, "6MiB") as driver:
        check_settled(driver, tmp_path)


def test_killed_writers_leave_nothing_behind(tmp_path: Path, children: Children) -> None:
    chance = random.Random(7)
    caught = objects = 0
    for round_ in range(25):
        pids = [
            children.run("write", root=str(tmp_path), capacity="3MiB", seed=round_ * 2 + i, seconds=30)
            for i in range(2)
        ]
        for pid in pids:
            time.sleep(chance.uniform(0.01, 0.09))
            assert children.kill(pid) == -signal.SIGKILL
        caught += bool(unfinished(tmp_path))
        with opened(tmp_path, "3MiB") as driver:
            objects += check_settled(driver, tmp_path)
    assert caught > 3, "hardly a writer was killed in the middle of a write"
    assert objects > 50


def test_a_new_storage_cleans_up_while_others_live(tmp_path: Path, children: Children) -> None:
    with opened(tmp_path, "3MiB") as witness:
        for round_ in range(5):
            pid = children.run("write", root=str(tmp_path), capacity="3MiB", seed=round_, seconds=30)
            time.sleep(0.08)
            children.kill(pid)
            with opened(tmp_path, "3MiB") as driver:
                check_settled(driver, tmp_path, living=2)
            assert witness.store([source(key_of(99), blob(99, 300_000))]) != []
    with opened(tmp_path, "3MiB") as driver:
        check_settled(driver, tmp_path)


def test_room_that_a_dead_process_held_is_found_when_it_is_needed(tmp_path: Path, children: Children) -> None:
    with opened(tmp_path, "1MiB") as driver:
        report = tmp_path.parent / f"{tmp_path.name}.json"
        pid = children.run("fork_and_wait", root=str(tmp_path), report=str(report))
        wait_for(report)
        children.kill(pid)
        os.kill(json.loads(report.read_text())[0], signal.SIGKILL)
        assert len(unfinished(tmp_path)) == 1
        (outcome,) = driver.store([source(key_of(5), blob(5, MIB - 40))])  # all there is
        assert not isinstance(outcome, Failed), outcome
        check_settled(driver, tmp_path)


def test_a_fork_does_not_keep_its_dead_parent_alive(tmp_path: Path, children: Children) -> None:
    report = tmp_path.parent / f"{tmp_path.name}.json"
    pid = children.run("fork_and_wait", root=str(tmp_path), report=str(report))
    wait_for(report)
    orphan, refused = json.loads(report.read_text())
    try:
        children.kill(pid)
        assert "closed" in refused
        assert len(unfinished(tmp_path)) == 1
        with opened(tmp_path, "8MiB") as driver:
            assert check_settled(driver, tmp_path) == 1
    finally:
        os.kill(orphan, signal.SIGKILL)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.005)


def test_processes_that_open_at_once(tmp_path: Path, children: Children) -> None:
    root = tmp_path / "new"
    pids = [children.run("open_and_close", root=str(root), capacity="3MiB", times=30) for _ in range(4)]
    assert [children.kill(pid, 0) for pid in pids] == [0] * 4
    with opened(root, "3MiB") as driver:
        assert check_settled(driver, root) == 30


def test_a_count_that_is_too_high_is_set_right_when_room_is_needed(tmp_path: Path) -> None:
    """As after a kill between two steps."""
    with opened(tmp_path, "2MiB") as driver, opened(tmp_path, "2MiB") as other:
        other.store([source(key_of(0), blob(0, 100_000))])
        set_account(tmp_path, 2 * MIB)
        assert not isinstance(driver.store([source(key_of(1), blob(1, 1_500_000))])[0], Failed)
        check_settled(driver, tmp_path, living=2)


@pytest.mark.parametrize("damage", [b"", bytes(8), bytes(32), b"\xff" * 32, (5).to_bytes(8, "little") * 4])
def test_an_account_that_somebody_has_overwritten_is_counted_anew(tmp_path: Path, damage: bytes) -> None:
    """Before anything is stored by its numbers: nobody passes the capacity."""
    with opened(tmp_path, "2MiB") as driver, opened(tmp_path, "2MiB") as other:
        for i in range(6):
            assert other.store([source(key_of(i), blob(i, 300_000))]) == [STORED]
        (tmp_path / CONTROL / "account").write_bytes(damage)
        for i in range(6, 12):
            assert driver.store([source(key_of(i), blob(i, 300_000))]) == [STORED]
            assert sum(files(tmp_path).values()) <= 2 * MIB
        check_settled(driver, tmp_path, living=2)
        (tmp_path / CONTROL / "account").write_bytes(damage)
        other.delete([key_of(11)])
        usage = driver.usage()
        assert usage is not None
        assert (usage.nbytes, usage.objects) == (sum(files(tmp_path).values()), len(driver.entries()))
        check_settled(other, tmp_path, living=2)
    with opened(tmp_path, "2MiB") as driver:
        check_settled(driver, tmp_path)


def test_usage_counts_the_objects_of_all_processes(tmp_path: Path, children: Children) -> None:
    with opened(tmp_path) as driver:
        assert driver.store([source(key_of(0), blob(0, 1000))]) == [STORED]
        pid = children.run("write", root=str(tmp_path), capacity="64MiB", seed=1, seconds=0.3)
        assert children.kill(pid, 0) == 0
        assert driver.store([source(key_of(0), blob(0, 9000))]) == [STORED]  # replaced: still one
        usage = driver.usage()
        assert usage is not None
        assert usage.objects == len(driver.entries()) > 1
        driver.delete([key_of(0), key_of(99)])
        assert driver.usage().objects == len(driver.entries()) == usage.objects - 1  # type: ignore[union-attr]


def test_a_lock_that_another_process_keeps_is_waited_for_and_then_a_timeout(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it was stopped in the middle."""
    monkeypatch.setattr(account, "LOCK_S", 0.3)
    ready = tmp_path.parent / f"{tmp_path.name}.ready"
    with opened(tmp_path) as driver:
        assert driver.store([source(key_of(0), blob(0, 1000))]) == [STORED]
        pid = children.run("hold_the_lock", root=str(tmp_path), ready=str(ready))
        wait_for(ready)
        begun = time.monotonic()
        (outcome,) = driver.store([source(key_of(1), blob(1, 1000))])
        assert isinstance(outcome, Failed)
        assert outcome.kind == "timeout"
        assert "has had the lock of .kvcore/account for 0.3 s" in outcome.reason
        with pytest.raises(StorageError, match=r"has had the lock of \.kvcore/account"):
            driver.delete([key_of(0)])
        assert time.monotonic() - begun < 5
        assert isinstance(driver.load([Room(MIB).item(key_of(0))])[0], Loaded), "loading needs no lock"
        children.kill(pid)
        assert driver.store([source(key_of(1), blob(1, 1000))]) == [STORED]
    with opened(tmp_path) as driver:
        assert check_settled(driver, tmp_path) == 2


def test_close_while_a_write_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, leaves nothing, and touches no descriptor that may be another file's by then."""
    inside, go_on = threading.Event(), threading.Event()
    real = transfer._write_all

    def slow(fd: int, views: list[memoryview], offset: int = 0) -> None:
        real(fd, views, offset)
        inside.set()
        go_on.wait(10)

    monkeypatch.setattr(transfer, "_write_all", slow)
    storage = make_disk(tmp_path, "4MiB")
    storage.open()
    outcomes: list[object] = []
    thread = threading.Thread(target=lambda: outcomes.extend(storage.store([source(key_of(0), blob(0, 100_000))])))
    thread.start()
    assert inside.wait(10)
    storage.close()
    others = [os.open(tmp_path.parent / f"{tmp_path.name}-{i}", os.O_RDWR | os.O_CREAT) for i in range(8)]
    go_on.set()
    thread.join(10)
    assert [type(o) for o in outcomes] == [Failed]
    assert [os.fstat(fd).st_size for fd in others] == [0] * 8
    for fd in others:
        os.close(fd)
    monkeypatch.undo()
    with opened(tmp_path, "4MiB") as driver:
        assert check_settled(driver, tmp_path) == 0


def test_accounts_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = Account(str(tmp_path)), Account(str(tmp_path))
    order: list[str] = []

    def enter() -> None:
        with second.locked():
            order.append("second")

    with first.locked(), first.locked():
        thread = threading.Thread(target=enter)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    first.close()
    first.close()
    with pytest.raises(OSError, match="closed"), first.locked():
        pass
    with second.locked():
        second.recount(4096, 1)
        assert second.counts() == (4096, 1)
        assert second.used == 4096
        path = second.begin(8192)
        Path(path).touch()
        assert second.used == 12288
        second.cancel(path)
        second.cancel(path)
        assert second.used == 4096
    second.close()
