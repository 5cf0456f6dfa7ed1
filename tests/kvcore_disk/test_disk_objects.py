"""Objects come and go whole: odd buffers, many objects, the order of use, and several storages in one directory."""

import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_child import blob, key_of
from disk_place import account_locked, files, make_disk, opened

from kvcore.api import STORED, Item, Loaded, ObjectKey
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, aligned, content, make_key, source
from kvcore_disk import transfer
from kvcore_disk.config import DiskConfig, capacity_bytes
from kvcore_disk.paths import object_path

KIB = 1 << 10
MIB = 1 << 20


def put(driver: Driver, *numbers: int, nbytes: int = 100_000) -> None:
    outcomes = driver.store([source(key_of(i), blob(i, nbytes), (4096,)) for i in numbers])
    assert outcomes == [STORED] * len(numbers)


def use(driver: Driver, *numbers: int) -> None:
    assert all(isinstance(o, Loaded) for o in driver.load([Room(MIB).item(key_of(i)) for i in numbers]))


def held(driver: Driver) -> list[int]:
    keys = {entry.key for entry in driver.entries()}
    return [i for i in range(100) if key_of(i) in keys]


# -- buffers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize(
    ("nbytes", "cuts", "offset"),
    [
        (3_000_000, range(1000, 3_000_000, 1000), 0),  # more buffers than one system call takes
        (6_000_000, range(4096, 6_000_000, 4096), 0),  # the same, aligned
        (5 * MIB + 1, (4096,), 0),  # larger than the bounce buffer
        (9 * MIB - 1, (4096, 4097), 0),
        (9 * MIB, (), 1),
        (4096 * 3, (4096,), 512),
        (1, (), 0),
        (4095, (1, 2, 3), 3),
    ],
)
def test_any_buffers(tmp_path: Path, nbytes: int, cuts: object, offset: int, direct: str) -> None:
    data = content(nbytes, nbytes)
    with opened(tmp_path, direct=direct) as driver:
        assert driver.store([source(make_key(0), data, tuple(cuts), offset=offset)]) == [STORED]  # type: ignore[call-overload]
        path = Path(object_path(str(tmp_path), make_key(0)))
        assert path.read_bytes() == data
        for room in (Room(nbytes, tuple(cuts), offset=offset), Room(nbytes + 5000), Room(nbytes, (4096,))):  # type: ignore[call-overload]
            assert driver.load([room.item(make_key(0))]) == [Loaded(nbytes)]
            assert room.view[:nbytes] == data
            assert room.clean_from(nbytes)


def test_aligned_objects_go_straight_between_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the core gives them: a header page and an aligned payload of any length. No copy, one system call each."""
    calls: list[str] = []
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)

        def counted(fd: int, *rest: object, real: Callable[..., int] = real, name: str = name) -> int:
            calls.append(name)
            return real(fd, *rest)

        monkeypatch.setattr(os, name, counted)
    monkeypatch.setattr(transfer, "_own", lambda name, nbytes: pytest.fail(f"{name} was used"))
    with opened(tmp_path, direct="auto") as driver:
        payload = aligned(3 * MIB)
        payload[:] = content(1, 3 * MIB)
        assert driver.store([Item(make_key(1), [aligned(4096), payload])]) == [STORED]
        into = aligned(3 * MIB)
        assert driver.load([Item(make_key(1), [aligned(4096), into])]) == [Loaded(3 * MIB + 4096)]
        assert into == payload
        assert calls == ["pwritev", "preadv"]
        if driver.storage._direct:  # type: ignore[union-attr]  # tmpfs says yes and uses the page cache all the same
            assert cached_pages(Path(object_path(str(tmp_path), make_key(1)))) in (0, None)


def cached_pages(path: Path) -> int | None:
    """Pages of a file in the page cache; None where nothing can tell."""
    if shutil.which("fincore") is None:
        return None
    done = subprocess.run(["fincore", "-bnro", "PAGES", str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_the_kernel_is_asked_about_alignment_once_and_others_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    real = transfer._own

    def own(name: str, nbytes: int) -> memoryview:
        used.append(name)
        return real(name, nbytes)

    monkeypatch.setattr(transfer, "_own", own)
    with opened(tmp_path, direct="on") as driver:
        data = content("odd", 50_001)
        assert driver.store([source(make_key(0), data, (4096,), offset=1)]) == [STORED]
        assert "bounce" in used
        assert Path(object_path(str(tmp_path), make_key(0))).read_bytes() == data
        assert driver.storage._direct  # type: ignore[union-attr]


@pytest.mark.parametrize("offset", [0, 1], ids=["pages", "bounced"])
def test_nothing_of_another_object_is_written_behind_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    """Whole pages are written and cut off: what was cut off is zero."""
    behind: list[bytes] = []
    real = os.ftruncate

    def truncate(fd: int, nbytes: int) -> None:
        behind.append(Path(f"/proc/self/fd/{fd}").read_bytes()[nbytes:])
        real(fd, nbytes)

    monkeypatch.setattr(os, "ftruncate", truncate)
    storage = make_disk(tmp_path, direct="on")
    storage.open()
    for i, nbytes in enumerate((3 * 4096 - 1, 2 * 4096 + 10)):  # the second comes after a fuller page
        assert storage.store([source(make_key(i), b"\xff" * nbytes, offset=offset)]) == [STORED]
    storage.close()
    assert behind == [bytes(1), bytes(4086)]


# -- many ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_index_of_100_000_objects_is_rebuilt_in_seconds(tmp_path: Path) -> None:
    count = 100_000
    root = tmp_path / "objects"
    try:
        for i in range(count):
            path = object_path(str(root), make_key(i))
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), 0o700)
                fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.truncate(fd, 5000)
            os.close(fd)
        with Driver(make_disk(root, "1GiB"), timeout_s=60) as driver:
            pass
        begun = time.perf_counter()
        with Driver(make_disk(root, "1GiB"), timeout_s=60) as driver:
            seconds = time.perf_counter() - begun
            print(f"\nindex of {count} objects rebuilt in {seconds:.2f} s")
            usage = driver.usage()
            assert usage is not None
            assert usage.objects == count
            assert usage.nbytes == count * 8192
            assert driver.exists([make_key(0), make_key(count - 1), make_key(count)]) == [True, True, False]
        assert seconds < 10
        with Driver(make_disk(root, "100MiB"), timeout_s=60) as driver:  # a smaller capacity holds at once
            usage = driver.usage()
            assert usage is not None
            assert usage.objects == 12_800
    finally:
        shutil.rmtree(root, ignore_errors=True)


# -- the order of use ------------------------------------------------------------------------------------------------


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path, "400KiB") as driver:  # four objects
        for i in (1, 2, 3, 4):
            put(driver, i)
        use(driver, 2)
        use(driver, 1)
    with opened(tmp_path, "400KiB") as driver:
        put(driver, 5)
        assert held(driver) == [1, 2, 4, 5]
        put(driver, 6)
        assert held(driver) == [1, 2, 5, 6]
        put(driver, 7)
        assert held(driver) == [1, 5, 6, 7]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("by", ["store", "load"])
def test_the_head_of_a_prefix_outlives_its_tail(tmp_path: Path, by: str, restart: bool) -> None:
    with opened(tmp_path, "600KiB") as driver:  # six objects
        put(driver, *((0, 1, 2, 3) if by == "store" else (3, 1, 0, 2)))
        if by == "load":
            use(driver, 0, 1, 2, 3)
        if not restart:
            put(driver, 10)
            put(driver, 11)
            put(driver, 12)
            put(driver, 13)
            assert held(driver) == [0, 1, 10, 11, 12, 13]
    if restart:
        with opened(tmp_path, "210KiB") as driver:
            assert held(driver) == [0, 1]


def test_other_policies_are_plugins(tmp_path: Path) -> None:
    with opened(tmp_path, "400KiB", eviction="mru") as driver:
        for i in (1, 2, 3, 4, 5):
            put(driver, i)
        assert held(driver) == [1, 2, 3, 5]


# -- several storages ------------------------------------------------------------------------------------------------


def test_two_storages_see_each_others_objects(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        put(one, 1, 2)
        assert two.exists([key_of(1), key_of(2), key_of(3)]) == [True, True, False]
        use(two, 1, 2)
        two.delete([key_of(1)])
        room = Room(MIB)
        assert not isinstance(one.load([room.item(key_of(1))])[0], Loaded)
        assert one.exists([key_of(1), key_of(2)]) == [False, True]
        put(two, 1)
        use(one, 1)
        for driver in (one, two):
            usage = driver.usage()
            assert usage is not None
            assert usage.nbytes == 2 * 102_400


def test_two_storages_evict_each_others_objects(tmp_path: Path) -> None:
    with opened(tmp_path, "1MiB") as one, opened(tmp_path, "1MiB") as two:
        put(one, *range(10))
        put(two, 50, 51)  # knows none of the ten until it needs their room
        assert len(held(one)) == 10
        assert {50, 51} <= set(held(one))
        for i in range(10):
            room = Room(MIB)
            (outcome,) = one.load([room.item(key_of(i))])
            assert isinstance(outcome, Loaded) is (i in held(one))
        put(one, *range(20, 30))
        put(two, *range(60, 70))
        put(two, *range(70, 75))
        assert held(one)[-1] == 74
        with account_locked(tmp_path) as counted:
            assert counted == sum(files(tmp_path).values()) <= MIB


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fsync", [False, True])
def test_fsync_is_called_for_the_object_and_for_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    synced: list[str] = []
    real = os.fsync

    def sync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    with opened(tmp_path, fsync=fsync) as driver:
        put(driver, 1)
        put(driver, 1)
    folder = os.path.dirname(object_path(str(tmp_path), key_of(1)))
    if not fsync:
        assert synced == []
        return
    objects = [path for path in synced if "/writing/" in path]
    assert len(objects) == 2
    assert synced[0] == objects[0]  # the bytes before the name
    assert synced[1:3] == [str(tmp_path), os.path.dirname(folder)]  # the new folders
    assert synced[3] == folder
    assert synced[4:] == [objects[1], folder]


def test_capacity_as_a_share(tmp_path: Path) -> None:
    assert capacity_bytes("auto", 600, 400) == 500
    assert capacity_bytes("80%", 600, 400) == 800
    assert capacity_bytes(123, 600, 400) == 123
    with opened(tmp_path, "1%") as driver:
        usage = driver.usage()
        assert usage is not None
        assert usage.capacity_bytes is not None
        free = shutil.disk_usage(tmp_path).free
        assert 0.5 * free < 100 * usage.capacity_bytes < 2 * free


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("capacity", "50", "50GiB"),
        ("capacity", 50, "50GiB"),
        ("capacity", "0GiB", "no room"),
        ("capacity", "101%", "between 0% and 100%"),
        ("capacity", "0%", "between 0% and 100%"),
        ("path", "", "empty path"),
        ("direct", "yes", "'auto', 'on' or 'off'"),
        ("eviction", 3, "lru"),
        ("fsnc", True, "Extra inputs"),
    ],
)
def test_bad_options_are_refused_with_what_is_allowed(option: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DiskConfig.model_validate({"path": "/tmp/x", option: value})


def test_the_default_path_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(DiskConfig().path) == "/somewhere/kvcore/disk"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert str(DiskConfig().path) == "~/.cache/kvcore/disk"


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(Path("objects")) as driver:
        monkeypatch.chdir("/")
        put(driver, 1)
        use(driver, 1)
    assert len(files(tmp_path / "objects")) == 1


def test_the_plugin_module_is_light() -> None:
    """It is imported for every `plugins list`-like look; pydantic and the storage come with the component."""
    code = "import sys, kvcore_disk.plugin; print('pydantic' in sys.modules, 'kvcore_disk.storage' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_keys_have_names_of_bounded_length() -> None:
    longest = ObjectKey(b"\xff" * 16, b"\xff" * 64, 2**31 - 1)
    assert len(longest.name) <= 255
    assert mmap.PAGESIZE == transfer.PAGE
