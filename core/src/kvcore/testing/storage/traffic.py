"""Many callers at once: every load finds a whole object or none."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from kvcore.api import Failed, Item, Loaded, ObjectKey, Stored
from kvcore.testing.driver import Driver, Result
from kvcore.testing.memory import Room, content, make_key, source, split
from kvcore.testing.storage.base import StorageSuite, does_not_apply, loaded


class TrafficTests(StorageSuite):
    """Concurrency, interruption, and closing under load."""

    def test_concurrent_stores_of_one_key(self, driver: Driver) -> None:
        """Whoever wins, one version is there, whole, while they write and afterwards."""
        key = make_key("contended")
        versions = [content(("version", i), 60_000 + 1111 * i) for i in range(8)]
        with self._reading(driver, key, [None, *versions]) as seen:
            for _ in range(5):
                calls = [driver.submit("store", [source(key, data, (4096,))]) for data in versions]
                for call in calls:
                    (outcome,) = driver.check_store([source(key, b"")], driver.wait(call, "store"))
                    assert isinstance(outcome, Stored), f"one of 8 concurrent stores of a key failed: {outcome}"
        assert seen, "no load finished while stores were running"
        self.expect(driver, key, *versions, what="after 8 concurrent stores of one key")

    def test_concurrent_stores_of_many_keys(self, driver: Driver) -> None:
        keys = [make_key(i) for i in range(64)]
        data = [content(i, 10_000 + 321 * i) for i in range(64)]
        batches = [range(start, 64, 8) for start in range(8)]
        calls = [driver.submit("store", [source(keys[i], data[i], (512,)) for i in batch]) for batch in batches]
        for call, batch in zip(calls, batches, strict=True):
            outcomes = driver.check_store([source(keys[i], b"") for i in batch], driver.wait(call, "store"))
            assert all(o == Stored() for o in outcomes), f"a store failed under concurrency: {outcomes}"
        rooms = [Room(40_000) for _ in keys]
        loads = [driver.submit("load", [rooms[i].item(keys[i]) for i in batch]) for batch in batches]
        for call, batch in zip(loads, batches, strict=True):
            items = [rooms[i].item(keys[i]) for i in batch]
            for i, outcome in zip(batch, driver.check_load(items, driver.wait(call, "load")), strict=True):
                self.judge(loaded(rooms[i], outcome), [data[i]], f"object {i} of 64 stored by 8 callers")

    def test_delete_while_loading(self, driver: Driver) -> None:
        """A load that meets a delete finds the whole object or reports that it has none."""
        key, data = make_key("deleted"), content("deleted", 300_000)
        for _ in range(20):
            self.put(driver, key, data)
            rooms = [Room(len(data)) for _ in range(4)]
            loads = [driver.submit("load", [room.item(key)]) for room in rooms[:2]]
            delete = driver.submit("delete", [key])
            loads += [driver.submit("load", [room.item(key)]) for room in rooms[2:]]
            for room, call in zip(rooms, loads, strict=True):
                (outcome,) = driver.check_load([room.item(key)], driver.wait(call, "load"))
                if isinstance(outcome, Loaded):
                    self.judge(loaded(room, outcome), [data], "a load while the key was deleted")
            driver.wait(delete, "delete")
            self.judge(self.get(driver, key, len(data)), [None], "after `delete` had returned")

    def test_store_while_loading(self, driver: Driver) -> None:
        """A load that meets an overwrite finds the old or the new object, never a mix."""
        key = make_key("replaced")
        versions = [content(("replaced", i), 200_000 - 37_777 * (i % 3)) for i in range(12)]
        self.put(driver, key, versions[0])
        with self._reading(driver, key, versions):
            for data in versions[1:]:
                self.put(driver, key, data, (4096,))

    def test_error_halfway_through_a_store(self, driver: Driver) -> None:
        """A store that dies after its first buffer (here the second one is gone) leaves no half object behind."""
        fresh, kept, other = make_key("fresh"), make_key("kept"), make_key("other")
        old = content("old", 30_000)
        self.put(driver, kept, old)
        for key in (fresh, kept):
            good = split(memoryview(content(("torn", key), 30_000)), (4096, 8192))
            good[1].release()
            try:
                driver.call("store", [Item(key, good)])
            except AssertionError:
                raise
            except Exception:  # noqa: S110  any error will do: the store was sabotaged
                pass
        self.judge(self.get(driver, fresh, 40_000), [None], "a store that failed halfway")
        self.expect(driver, kept, old, what="a store that failed halfway over an older object")
        self.put(driver, other, b"still alive")
        self.expect(driver, other, b"still alive", what="after a store that failed halfway")

    def test_cancelled_store_is_whole_or_absent(self, driver: Driver) -> None:
        """A store that is cancelled at its deadline leaves a whole object or none, and the storage goes on."""
        if not driver.cancellable:
            does_not_apply("a blocking storage is not cancelled")
        for i in range(30):
            key, data = make_key(("cancelled", i)), content(i, 200_000)
            call = driver.submit("store", [source(key, data, (4096,))])
            time.sleep(i * 0.0002)
            call.cancel()
            self.judge(self.get(driver, key, len(data)), [None, data], "after a cancelled store")
            self.put(driver, key, data)
            self.expect(driver, key, data, what="stored again after a cancelled store")

    def test_cancelled_load_lets_go_of_the_buffers(self, driver: Driver) -> None:
        """Nothing writes into the caller's memory once a load was cancelled: it may be another object's by then."""
        if not driver.cancellable:
            does_not_apply("a blocking storage is not cancelled; the core keeps the memory until the call returns")
        keys = [make_key(i) for i in range(8)]
        for i, key in enumerate(keys):
            self.put(driver, key, content(i, 500_000))
        for i in range(20):
            rooms = [Room(500_000) for _ in keys]
            call = driver.submit("load", [room.item(key) for room, key in zip(rooms, keys, strict=True)])
            time.sleep(i * 0.0002)
            call.cancel()
            driver.call("ping")  # the loop has run the cancelled task to its end
            for room in rooms:
                room.poison()
            time.sleep(0.02)
            if not all(room.clean_from(0) for room in rooms):
                raise AssertionError("the caller's buffers changed after its `load` had been cancelled")

    def test_close_during_traffic(self, tmp_path: Path) -> None:
        """`close` returns while calls are in flight; each of them ends, and nothing half written is found later."""
        keys = [make_key(i) for i in range(24)]
        data = [content(i, 150_000 + i) for i in range(24)]
        driver = Driver(self.make_storage(tmp_path))
        calls: list[Result] = []
        rooms: list[tuple[Room, bytes, Result]] = []
        with driver:
            driver.store([source(key, blob) for key, blob in zip(keys[:8], data[:8], strict=True)])
            for i in range(24):
                calls.append(driver.submit("store", [source(keys[i], data[i], (4096,))]))
                room = Room(len(data[i % 8]))
                rooms.append((room, data[i % 8], driver.submit("load", [room.item(keys[i % 8])])))
                calls.append(driver.submit("exists", keys))
        for call in calls:
            self._ended(driver, call)
        for room, blob, call in rooms:
            outcomes = self._ended(driver, call)
            if outcomes is not None and isinstance(outcomes[0], Loaded):
                self.judge(loaded(room, outcomes[0]), [blob], "a load while the storage was closed")
        with Driver(self.make_storage(tmp_path)) as again:
            for key, blob in zip(keys, data, strict=True):
                self.judge(self.get(again, key, len(blob)), [None, blob], "opened again after a close under load")

    @staticmethod
    def _ended(driver: Driver, call: Result) -> list[object] | None:
        """The outcomes of a call that met `close`; None when it failed or was cancelled. It must not hang."""
        try:
            result: list[object] = driver.wait(call, "a call that was in flight at `close`")
        except AssertionError:
            raise
        except BaseException:  # the storage was closed under it: any error, or CancelledError
            return None
        return result

    @contextmanager
    def _reading(self, driver: Driver, key: ObjectKey, allowed: Sequence[bytes | None]) -> Iterator[list[bytes | None]]:
        """Load `key` over and over while the body runs; what was found must be one of `allowed`. Yields the finds."""
        stop = Event()
        finds: list[bytes | None] = []
        errors: list[BaseException] = []
        room = Room(max(len(data) for data in allowed if data is not None))

        def read() -> None:
            try:
                while not stop.is_set() or not finds:
                    (outcome,) = driver.load([room.item(key)])
                    assert not isinstance(outcome, Failed), f"a load failed while the key was stored: {outcome}"
                    got = loaded(room, outcome)
                    self.judge(got, allowed, "a load while the key was stored")
                    finds.append(got)
            except BaseException as error:  # raised in the test's own thread below
                errors.append(error)

        reader = Thread(target=read, name="conformance-reader", daemon=True)
        reader.start()
        try:
            yield finds
        finally:
            stop.set()
            reader.join(driver.timeout_s)
        if errors:
            raise errors[0]
