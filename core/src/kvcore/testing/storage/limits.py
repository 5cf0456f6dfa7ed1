"""What a storage says about itself is true: its list, its usage, its capacity."""

import time
from pathlib import Path
from threading import Event, Thread

from kvcore.api import Entry, Failed, ObjectKey, Stored
from kvcore.testing.driver import AnyStorage, Driver
from kvcore.testing.memory import content, make_key, source
from kvcore.testing.storage.base import StorageSuite, does_not_apply

CAPACITY_BYTES = 4 << 20
OBJECT_BYTES = 100_003


class LimitTests(StorageSuite):
    """`list`, `usage` and capacity."""

    def test_list_is_consistent(self, driver: Driver) -> None:
        """Each object once, with its size, through stores, overwrites and deletes."""
        if not driver.can_list:
            try:
                driver.call("list")
            except NotImplementedError:
                does_not_apply("the storage does not enumerate")
            raise AssertionError("`list` is not overridden, yet does not raise NotImplementedError")
        assert driver.entries() == [], "`list` of an empty storage is not empty"
        held: dict[ObjectKey, int] = {}
        for i in range(40):
            key = make_key(i, group=i % 4)
            held[key] = 100 + 321 * i
            self.put(driver, key, content(i, held[key]))
        for key in list(held)[::3]:
            self.put(driver, key, content(("over", key), held[key]))
        gone = list(held)[::5]
        driver.delete(gone)
        for key in gone:
            del held[key]
        entries = driver.entries()
        listed = {entry.key: entry.nbytes for entry in entries}
        assert len(listed) == len(entries), "`list` yields a key twice"
        unknown = listed.keys() - held.keys()
        assert not unknown, f"`list` yields {len(unknown)} keys that were deleted or never stored"
        assert self.forgets or len(listed) == len(held), f"`list` yields {len(listed)} of {len(held)} objects"
        wrong = {listed[key]: held[key] for key in listed if listed[key] != held[key]}
        assert not wrong, f"`list` yields wrong sizes (listed: real): {wrong}"

    def test_list_while_storing(self, driver: Driver) -> None:
        """Enumerating a storage that others write to is no error."""
        if not driver.can_list:
            does_not_apply("the storage does not enumerate")
        for round_ in range(5):
            keys = [make_key((round_, i)) for i in range(60)]
            calls = [driver.submit("store", [source(key, b"x" * 100)]) for key in keys]
            driver.entries()
            calls.append(driver.submit("delete", keys[:30]))
            driver.entries()
            for call in calls:
                driver.wait(call, "store or delete")

    def test_list_while_deleting(self, driver: Driver) -> None:
        """What others delete while it is enumerated is no error: it may be left out."""
        if not driver.can_list:
            does_not_apply("the storage does not enumerate")
        keys = [make_key(("listed", i)) for i in range(60)]
        items = [source(key, b"x" * 100) for key in keys]
        listed: list[Entry] = []
        try:
            driver.store(items)
            entries = iter(driver.call("list"))
            listed += [first] if (first := next(entries, None)) is not None else []
            driver.delete(keys)
            listed += entries  # of an iterator: those that are no longer there
            for _ in range(5):
                driver.store(items)
                calls = [driver.submit("delete", [key]) for key in keys]
                listed += driver.entries()
                for call in calls:
                    driver.wait(call, "delete")
        except Exception as error:
            raise AssertionError(f"`list` must bear objects that are deleted meanwhile: {error!r}") from error
        unknown = {entry.key for entry in listed} - set(keys)
        assert not unknown, f"`list` yields {len(unknown)} keys that were never stored"
        assert driver.entries() == [], "`list` yields what was deleted while it was listed"

    def test_usage_is_consistent(self, driver: Driver) -> None:
        """Usage counts what is held: at least the objects' bytes, and the objects exactly."""
        empty = driver.usage()
        if empty is None:
            does_not_apply("the storage does not tell its usage")
            return
        assert empty.objects == 0, f"an empty storage says that it holds {empty.objects} objects"
        keys = [make_key(i) for i in range(30)]
        sizes = [100 + 1234 * i for i in range(30)]
        for i, key in enumerate(keys):
            self.put(driver, key, content(i, sizes[i]))
        for key, size in zip(keys[:10], sizes, strict=False):
            self.put(driver, key, content(("over", key), size))
        full = driver.usage()
        assert full is not None, "`usage` returned None after it had returned an answer"
        if not self.forgets:
            assert full.objects == 30, f"`usage` counts {full.objects} objects of 30 (10 were stored twice)"
            assert full.nbytes >= sum(sizes), f"`usage` counts {full.nbytes} bytes, {sum(sizes)} were stored"
            assert full.nbytes < 4 * sum(sizes), f"`usage` counts {full.nbytes} bytes for {sum(sizes)} stored"
        driver.delete([*keys, make_key("never stored")])
        again = driver.usage()
        assert again == empty, f"`usage` after all was deleted is {again}, it was {empty} when empty"

    def test_usage_after_restart(self, tmp_path: Path) -> None:
        with Driver(self.make_storage(tmp_path)) as driver:
            if not driver.storage.persistent:
                does_not_apply("the storage is not persistent")
            for i in range(20):
                self.put(driver, make_key(i), content(i, 5000 + i))
            before = driver.usage()
        if before is None:
            does_not_apply("the storage does not tell its usage")
        with Driver(self.make_storage(tmp_path)) as driver:
            after = driver.usage()
        assert after == before, f"`usage` after a restart is {after}, it was {before}"

    def test_capacity_holds(self, tmp_path: Path) -> None:
        """Three times the capacity is stored: it is never exceeded, much of it is used, all that is left is whole."""
        with Driver(self._bounded(tmp_path)) as driver:
            n = 3 * CAPACITY_BYTES // OBJECT_BYTES
            for i in range(n):
                item = source(make_key(i), content(i, OBJECT_BYTES), (4096,))
                self._check_refusal(driver.store([item])[0])
                self._check_capacity(driver, tmp_path)
            held = self._held(driver, n)
            self._check_held(held)

    def test_capacity_holds_after_restart(self, tmp_path: Path) -> None:
        n = 2 * CAPACITY_BYTES // OBJECT_BYTES
        with Driver(self._bounded(tmp_path)) as driver:
            if not driver.storage.persistent:
                does_not_apply("the storage is not persistent")
            for i in range(n):
                driver.store([source(make_key(i), content(i, OBJECT_BYTES))])
        with Driver(self._bounded(tmp_path)) as driver:
            self._check_capacity(driver, tmp_path)
            for i in range(n, n + 10):
                self._check_refusal(driver.store([source(make_key(i), content(i, OBJECT_BYTES))])[0])
                self._check_capacity(driver, tmp_path)
            self._check_held(self._held(driver, n + 10))

    def test_capacity_holds_under_concurrency(self, tmp_path: Path) -> None:
        """Eight callers fill it at once; the capacity is sampled all the while."""
        with Driver(self._bounded(tmp_path)) as driver:
            n = 3 * CAPACITY_BYTES // OBJECT_BYTES
            stop, errors = Event(), list[BaseException]()

            def sample() -> None:
                try:
                    while not stop.is_set():
                        self._check_capacity(driver, tmp_path)
                        time.sleep(0.001)
                except BaseException as error:  # raised in the test's own thread below
                    errors.append(error)

            sampler = Thread(target=sample, name="conformance-sampler", daemon=True)
            sampler.start()
            items = [source(make_key(i), content(i, OBJECT_BYTES), (4096,)) for i in range(n)]
            calls = [driver.submit("store", items[start::8]) for start in range(8)]
            for call in calls:
                for outcome in driver.wait(call, "store"):
                    self._check_refusal(outcome)
            stop.set()
            sampler.join(driver.timeout_s)
            if errors:
                raise errors[0]
            self._check_capacity(driver, tmp_path)
            self._check_held(self._held(driver, n))

    def test_object_larger_than_the_capacity(self, tmp_path: Path) -> None:
        """It is refused as `too_large` or `full`, and the storage goes on."""
        with Driver(self._bounded(tmp_path)) as driver:
            limit = driver.storage.max_object_bytes
            if limit is not None and limit <= CAPACITY_BYTES:
                does_not_apply(f"max_object_bytes is {limit}")
            self.put(driver, make_key("small"), content("small", 1000))
            (outcome,) = driver.store([source(make_key("giant"), content("giant", CAPACITY_BYTES + 1))])
            assert isinstance(outcome, Failed), f"an object larger than the capacity must be Failed, not {outcome}"
            assert outcome.kind in ("too_large", "full"), f"the failure's kind must be too_large or full: {outcome}"
            self._check_capacity(driver, tmp_path)
            self.put(driver, make_key("next"), content("next", 1000))
            self.expect(driver, make_key("next"), content("next", 1000), what="stored after one that was too large")

    def test_overwrites_do_not_use_up_the_capacity(self, tmp_path: Path) -> None:
        """Storing one key again and again is not counted again and again: its neighbours stay."""
        with Driver(self._bounded(tmp_path)) as driver:
            neighbour = content("neighbour", OBJECT_BYTES)
            self.put(driver, make_key("neighbour"), neighbour)
            for i in range(2 * CAPACITY_BYTES // OBJECT_BYTES):
                self.put(driver, make_key("again"), content(i % 2, OBJECT_BYTES))
                self._check_capacity(driver, tmp_path)
            self.expect(driver, make_key("neighbour"), neighbour, what="the neighbour of a key stored 80 times")

    def test_deletes_give_room_back(self, tmp_path: Path) -> None:
        with Driver(self._bounded(tmp_path)) as driver:
            n = CAPACITY_BYTES // OBJECT_BYTES // 2
            for round_ in range(4):
                keys = [make_key((round_, i)) for i in range(n)]
                for key in keys:
                    self.put(driver, key, content(key, OBJECT_BYTES))
                for key in keys:
                    self.expect(driver, key, content(key, OBJECT_BYTES), what=f"round {round_} in a half full storage")
                driver.delete(keys)

    def _bounded(self, tmp_path: Path) -> AnyStorage:
        storage = self.make_bounded(tmp_path, CAPACITY_BYTES)
        if storage is None:
            does_not_apply("no `make_bounded` was given: the storage has no capacity of its own")
            raise AssertionError
        return storage

    def _check_capacity(self, driver: Driver, tmp_path: Path) -> None:
        usage = driver.usage()
        if usage is not None:
            assert usage.capacity_bytes == CAPACITY_BYTES, f"`usage` must name the capacity: {usage}"
            assert usage.nbytes <= CAPACITY_BYTES, f"the capacity was exceeded: {usage}"
        if self.overrides("raw_bytes"):
            held = self.raw_bytes(driver.storage, tmp_path)
            assert held <= CAPACITY_BYTES, f"the store really holds {held} bytes, its capacity is {CAPACITY_BYTES}"

    def _held(self, driver: Driver, n: int) -> list[int]:
        """Which of the objects 0 to n-1 are there; each must be whole."""
        held = []
        for i in range(n):
            got = self.get(driver, make_key(i), OBJECT_BYTES)
            self.judge(got, [content(i, OBJECT_BYTES), None], f"object {i} in a full storage")
            if got is not None:
                held.append(i)
        return held

    @staticmethod
    def _check_held(held: list[int]) -> None:
        nbytes = len(held) * OBJECT_BYTES
        assert nbytes <= CAPACITY_BYTES, f"{nbytes} bytes can be loaded from a capacity of {CAPACITY_BYTES}"
        assert nbytes >= CAPACITY_BYTES // 2, f"only {nbytes} bytes are left in a full capacity of {CAPACITY_BYTES}"

    @staticmethod
    def _check_refusal(outcome: object) -> None:
        if isinstance(outcome, Failed):
            assert outcome.kind == "full", f"a storage without room must answer kind `full`: {outcome}"
        else:
            assert isinstance(outcome, Stored), f"`store` must return Stored or Failed, not {outcome!r}"
