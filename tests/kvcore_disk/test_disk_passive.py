"""A disk storage that is examined, not served from (`Context.passive`): it changes nothing but what it is told to."""

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_place import CONTROL, account_locked, files, make_disk, opened

from kvcore.api import STORED, Context, Item, Loaded, ObjectKey, StorageError
from kvcore.cli import main
from kvcore.plugins import PluginSpec, Registry
from kvcore.testing.driver import Driver
from kvcore_disk.config import DiskConfig
from kvcore_disk.paths import object_path
from kvcore_disk.storage import DiskStorage

NBYTES = 64 << 10


def passive(root: Path, capacity: str = "64MiB") -> Driver:
    registry = Registry()
    context = Context(
        make_eviction=lambda name: registry.create("eviction", PluginSpec(name, {}, "test")), passive=True
    )
    config = DiskConfig.model_validate({"path": str(root), "capacity": capacity})
    return Driver(DiskStorage(config, context))


def key_of(number: int) -> ObjectKey:
    return ObjectKey(b"passive".ljust(16), number.to_bytes(32, "big"))


def item_of(number: int) -> Item:
    return Item(key_of(number), (memoryview(bytearray(NBYTES)),))


def fill(root: Path, count: int) -> None:
    with opened(root) as driver:
        assert driver.store([item_of(i) for i in range(count)]) == [STORED] * count


def test_a_smaller_capacity_evicts_nothing(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    with passive(tmp_path, "100KiB") as driver:
        assert len(driver.entries()) == 20
        usage = driver.usage()
        assert usage is not None
        assert (usage.objects, usage.nbytes) == (20, 20 * NBYTES)
    with opened(tmp_path, "100KiB") as driver:  # what serves from it does
        assert len(driver.entries()) == 1


def test_a_load_is_no_use(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    path = object_path(str(tmp_path), key_of(0))
    old = time.time() - 5 * 86400  # so old that the kernel itself would set the time of access
    os.utime(path, (old, old))
    with passive(tmp_path) as driver:
        driver.load([item_of(0)])
        used = {entry.key: entry.used_s for entry in driver.entries()}
    assert used[key_of(0)] == pytest.approx(old, abs=1)
    assert used[key_of(1)] == pytest.approx(time.time(), abs=60)
    with opened(tmp_path) as driver:
        driver.load([item_of(0)])
        assert {e.key: e.used_s for e in driver.entries()}[key_of(0)] == pytest.approx(time.time(), abs=60)


def test_deleting_keeps_the_account_right(tmp_path: Path) -> None:
    fill(tmp_path, 6)
    with opened(tmp_path) as engine, passive(tmp_path) as driver:
        driver.delete([key_of(i) for i in range(4)])
        with account_locked(tmp_path) as counted:
            assert counted == sum(files(tmp_path).values()) == 2 * NBYTES
        assert engine.store([item_of(9)]) == [STORED]


def test_what_is_no_store_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file or directory"), passive(tmp_path / "absent"):
        pass
    assert not (tmp_path / "absent").exists()
    (tmp_path / "notes.txt").write_text("mine")
    with passive(tmp_path) as driver:
        assert driver.entries() == []
        with pytest.raises(StorageError, match="has never been opened by an engine"):
            driver.delete([key_of(0)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_delete_in_a_read_only_directory_is_an_error(mounted: Callable[[str, int], Path]) -> None:
    """For an engine it is none: it hides the object from itself."""
    folder = mounted("tmpfs", 24)
    fill(folder, 3)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)
    with passive(folder) as driver:
        assert len(driver.entries()) == 3
        with pytest.raises(StorageError, match="is not writable"):
            driver.delete([key_of(0)])
        assert driver.exists([key_of(0)]) == [True]
    with opened(folder) as driver:
        driver.delete([key_of(0)])
        assert driver.exists([key_of(0)]) == [False]


def test_the_command_line_over_a_read_only_directory(
    mounted: Callable[[str, int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = mounted("tmpfs", 24)
    fill(folder, 3)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)
    config = tmp_path / "kvcore.yaml"
    config.write_text(f"l2: [{{storage: {{plugin: disk, path: '{folder}', capacity: 16MiB}}}}]\n")
    assert main(["store", "ls", "--config", str(config)]) == 0
    assert main(["store", "verify", "--config", str(config), "--delete"]) == 1  # these objects are no frames
    assert main(["store", "rm", "--config", str(config), "--all", "--yes"]) == 1
    out, err = capsys.readouterr()
    assert out.count("corrupt  ") == 3
    assert err.count(f"tier disk: delete: {folder} is not writable") == 2
    assert len(list(folder.glob("?/?/*"))) == 3


def test_it_is_not_passive_unless_told(tmp_path: Path) -> None:
    assert not Context().passive
    assert dataclasses.replace(Context(), passive=True).passive
    Driver(make_disk(tmp_path / "made")).__enter__().close()
    assert (tmp_path / "made" / CONTROL).is_dir()


def test_engines_do_not_wait_for_it(tmp_path: Path) -> None:
    """A scan of a million objects takes half a minute: it must not hold the lock of stores, nor keep an index."""
    fill(tmp_path, 20)
    with passive(tmp_path) as driver:
        with account_locked(tmp_path):  # what follows would wait for it, and a scan beside it is no harm
            assert len(driver.entries()) == 20
            assert driver.exists([key_of(3), key_of(99)]) == [True, False]
            assert driver.load([item_of(3)]) == [Loaded(NBYTES)]
        storage = driver.storage
        assert isinstance(storage, DiskStorage)
        assert not storage._index
