"""Across processes: what survives a close, a kill, damage, and a second instance."""

import subprocess
import time
from pathlib import Path

from kvcore.api import Loaded, ObjectKey, Stored
from kvcore.testing.child import child_command
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, make_key, source
from kvcore.testing.storage import crash
from kvcore.testing.storage.base import StorageSuite, does_not_apply, loaded


class RestartTests(StorageSuite):
    """Persistence, crashes, damage, several instances."""

    def test_restart(self, tmp_path: Path) -> None:
        """A persistent storage finds its objects again, and only those."""
        self._need_persistent(tmp_path)
        keys = [make_key(i, group=i % 3) for i in range(20)]
        with Driver(self.make_storage(tmp_path)) as driver:
            for i, key in enumerate(keys):
                self.put(driver, key, content(i, 1000 + 777 * i), (100,))
            driver.delete(keys[::4])
        with Driver(self.make_storage(tmp_path)) as driver:
            if not self.forgets:
                assert driver.exists(keys) == [i % 4 != 0 for i in range(20)], "`exists` is wrong after a restart"
            for i, key in enumerate(keys):
                expected = None if i % 4 == 0 else content(i, 1000 + 777 * i)
                self.judge(self.get(driver, key, 20_000), [expected], f"object {i} of 20 after a restart")
            self.put(driver, keys[0], b"new life")
            self.expect(driver, keys[0], b"new life", what="stored after a restart over a deleted key")

    def test_restart_without_traffic(self, tmp_path: Path) -> None:
        """Opening and closing an empty place, twice, is no error."""
        for _ in range(2):
            with Driver(self.make_storage(tmp_path)) as driver:
                assert driver.exists([make_key(0)]) == [False], "an empty storage says that it holds a key"

    def test_kill_during_store(self, tmp_path: Path) -> None:
        """A process killed at a random instant leaves whole objects only, and the next one needs no clean-up."""
        self._need_persistent(tmp_path)
        if not self.crashable:
            does_not_apply("the suite was told that a child process cannot make this storage (crashable = False)")
        for round_ in range(3):
            self._kill_a_writer(tmp_path, delay_s=0.01 + 0.07 * round_)
            with Driver(self.make_storage(tmp_path)) as driver:
                anchor = crash.blob(crash.ANCHOR, 1)
                self.expect(driver, make_key(crash.ANCHOR), anchor, what="stored before the process was killed")
                for name in crash.NAMES:
                    got = self.get(driver, make_key(name), crash.MAX_BYTES)
                    assert got is None or crash.is_whole(name, got), (
                        f"after a kill, key {name} holds a torn object of {len(got)} bytes"
                    )
                self.put(driver, make_key("after"), content(round_, 5000))
                driver.delete([make_key("after"), make_key(crash.ANCHOR)])

    def test_second_instance(self, tmp_path: Path) -> None:
        """Two open instances over one place never read half objects; with `shared` each sees what the other stored."""
        with Driver(self.make_storage(tmp_path)) as one:
            shared = one.storage.shared
            if not shared and not self.several_instances:
                does_not_apply("neither `shared` nor `several_instances` is declared")
            with Driver(self.make_storage(tmp_path)) as two:
                keys = [make_key(i) for i in range(8)]
                for i, key in enumerate(keys):
                    old, new = content(("one", i), 70_000), content(("two", i), 50_000 + i)
                    self.put(one, key, old)
                    self.judge(
                        self.get(two, key, 80_000), [old] if shared else [old, None], "stored by another instance"
                    )
                    calls = [one.submit("store", [source(key, old)]), two.submit("store", [source(key, new)])]
                    got = self.get(one, key, 80_000)
                    self.judge(got, [old, new, None], "loaded while two instances store")
                    for call in calls:
                        (outcome,) = one.wait(call, "store")
                        assert outcome == Stored(), f"one of two instances could not store: {outcome}"
                    for driver in (one, two):
                        got = self.get(driver, key, 80_000)
                        self.judge(got, [old, new] if shared else [old, new, None], "stored by two instances")
                two.delete(keys[:4])
                for i, key in enumerate(keys[:4]):
                    allowed = [None] if shared else [None, content(("one", i), 70_000), content(("two", i), 50_000 + i)]
                    self.judge(self.get(one, key, 80_000), allowed, "deleted by another instance")

    def test_raw_object_loads(self, tmp_path: Path) -> None:
        """An object that was put into the store past the storage is loaded as it is."""
        self.need("raw_write")
        key, data = make_key("raw"), content("raw", 10_001)
        with Driver(self.make_storage(tmp_path)) as driver:
            persistent = driver.storage.persistent
            if not persistent:
                self.raw_write(driver.storage, tmp_path, key, data)
                self.expect(driver, key, data, what="an object written past the storage")
        if persistent:
            self.raw_write(self.make_storage(tmp_path), tmp_path, key, data)
            with Driver(self.make_storage(tmp_path)) as driver:
                self.expect(driver, key, data, what="an object written past the storage")

    def test_damaged_object(self, tmp_path: Path) -> None:
        """Damage is `Missing`, `Failed`, or the damaged bytes (the frame's checksum finds those); neighbours load."""
        self.need("raw_corrupt")
        bad, good = make_key("bad"), make_key("good")
        data = {key: content(key, 30_001) for key in (bad, good)}
        with Driver(self.make_storage(tmp_path)) as driver:
            for key in (bad, good):
                self.put(driver, key, data[key], (4096,))
            if not driver.storage.persistent:
                self.raw_corrupt(driver.storage, tmp_path, bad)
                self._check_damage(driver, bad, good, data[good])
                return
        self.raw_corrupt(self.make_storage(tmp_path), tmp_path, bad)
        with Driver(self.make_storage(tmp_path)) as driver:
            self._check_damage(driver, bad, good, data[good])

    def _check_damage(self, driver: Driver, bad: ObjectKey, good: ObjectKey, data: bytes) -> None:
        if driver.can_list:
            try:
                listed = {entry.key for entry in driver.entries()}
            except Exception as error:
                raise AssertionError(f"`list` must bear a damaged object: {error!r}") from error
            assert listed <= {bad, good}, "`list` yields a key that was never stored"
            assert good in listed or self.forgets, "`list` lacks the neighbour of a damaged object"
        rooms = [Room(30_001), Room(30_001)]
        outcomes = driver.load([rooms[0].item(bad), rooms[1].item(good)])
        if isinstance(outcomes[0], Loaded):
            assert rooms[0].clean_from(outcomes[0].nbytes), (
                "a damaged object was loaded with another length than `Loaded` says"
            )
        self.judge(loaded(rooms[1], outcomes[1]), [data], "the neighbour of a damaged object")
        driver.delete([bad])
        self.judge(self.get(driver, bad, 30_001), [None], "a damaged object that was deleted")
        self.put(driver, bad, data)
        self.expect(driver, bad, data, what="stored again in the place of a damaged object")

    def _need_persistent(self, tmp_path: Path) -> None:
        if not self.make_storage(tmp_path).persistent:
            does_not_apply("the storage is not persistent")

    def _kill_a_writer(self, tmp_path: Path, delay_s: float) -> None:
        """Run `crash.main` in a child process until it has stored something, then kill it after `delay_s`."""
        command = child_command(crash.__name__, type(self), str(tmp_path))
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            line = child.stdout.readline()
            time.sleep(delay_s)
            child.kill()
            if line != b"ready\n":
                raise AssertionError(f"the child process could not store: {child.stderr.read().decode()[-2000:]}")
