"""The storage suite catches broken storages, and says in one sentence what is wrong with each."""

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from storage_samples import AsyncStorage, FileStorage

from kvcore.api import (
    MISSING,
    STORED,
    BlockingStorage,
    Context,
    Entry,
    EvictionPolicy,
    Item,
    Loaded,
    LoadOutcome,
    ObjectKey,
    StoreOutcome,
    Usage,
    fill,
)
from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.builtin.memory import MemoryStorage
from kvcore.builtin.memory_config import MemoryConfig
from kvcore.testing import StorageConformance
from kvcore.testing.driver import AnyStorage, Driver

Make = Callable[[Path], AnyStorage]


def lru(spec: Any) -> EvictionPolicy:
    return LruPolicy(None, None)


class Dict(BlockingStorage):
    """A correct storage, to be broken by its subclasses."""

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, bytes] = {}

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [key in self.objects for key in keys]

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        found = [self.objects.get(item.key) for item in items]
        return [MISSING if data is None else fill(item.buffers, data) for item, data in zip(items, found, strict=True)]

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        for item in items:
            self.objects[item.key] = b"".join(item.buffers)
        return [STORED] * len(items)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self.objects.pop(key, None)


class MissingLast(Dict):
    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        return sorted(super().load(items), key=lambda outcome: outcome is MISSING)


class ReversedBatch(Dict):
    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        buffers = [item.buffers for item in items][::-1]
        return super().load([Item(item.key, b) for item, b in zip(items, buffers, strict=True)])


class RaisesOnMissing(Dict):
    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        return [fill(item.buffers, self.objects[item.key]) for item in items]


class SkipsMissing(Dict):
    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        return super().load([item for item in items if item.key in self.objects])


class KeepsBuffers(Dict):
    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        self.objects.update({item.key: item.buffers[0] for item in items if len(item.buffers) == 1})  # type: ignore[misc]
        return super().store([item for item in items if len(item.buffers) > 1]) or [STORED] * len(items)


class OneBuffer(Dict):
    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        return super().store([Item(item.key, item.buffers[:2]) for item in items])


class Pads(Dict):
    """As direct I/O does that reads whole sectors into the caller's room."""

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        outcomes = super().load(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Loaded) and len(item.buffers) == 1:
                item.buffers[0][outcome.nbytes : -(-outcome.nbytes // 512) * 512] = bytes(
                    min(len(item.buffers[0]), -(-outcome.nbytes // 512) * 512) - outcome.nbytes
                )
        return outcomes


class CutsToTheRoom(Dict):
    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        return [
            fill(item.buffers, self.objects[item.key][: item.nbytes]) if item.key in self.objects else MISSING
            for item in items
        ]


class ShortKeys(Dict):
    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        return super().store([Item(self.short(item.key), item.buffers) for item in items])

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        return super().load([Item(self.short(item.key), item.buffers) for item in items])

    def short(self, key: ObjectKey) -> ObjectKey:
        return ObjectKey(key.namespace, key.chunk_hash[:32], key.group)


class NoGroups(ShortKeys):
    def short(self, key: ObjectKey) -> ObjectKey:
        return ObjectKey(key.namespace, key.chunk_hash)


class NeverDeletes(Dict):
    def delete(self, keys: Sequence[ObjectKey]) -> None:
        pass


class ExistsAlways(Dict):
    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [True] * len(keys)


class WritesLater(Dict):
    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        threading.Timer(0.02, super().load, [items]).start()
        return super().load(items)


class CountsTwice(Dict):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Entry] = []

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        self.log += [Entry(item.key, item.nbytes) for item in items]
        return super().store(items)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self.log = [entry for entry in self.log if entry.key not in keys]
        super().delete(keys)

    def list(self) -> Sequence[Entry]:
        return self.log

    def usage(self) -> Usage:
        return Usage(sum(entry.nbytes for entry in self.log), len(self.log))


class WrongList(CountsTwice):
    def list(self) -> Sequence[Entry]:
        return [Entry(key, 512) for key in self.objects]


class ReadsToList(FileStorage):
    def list(self) -> Iterator[Entry]:  # type: ignore[override]
        for path in sorted(self.root.iterdir()):
            data = path.read_bytes()
            if len(data) == 1000:
                raise ValueError("a file that is cut short")
            yield Entry(ObjectKey.from_name(path.name), len(data))


class UsageGrows(Dict):
    total = 0

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        self.total += sum(item.nbytes for item in items)
        return super().store(items)

    def usage(self) -> Usage:
        return Usage(self.total, len(self.objects))


class Hangs(Dict):
    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        time.sleep(3600)
        return []


class WritesInPlace(FileStorage):
    """No temporary name: a reader, an error or a kill meets half an object."""

    def store_one(self, item: Item) -> StoreOutcome:
        with self.path(item.key).open("wb", buffering=0) as file:
            for buffer in item.buffers:
                file.write(buffer)
                time.sleep(0.001)
        return STORED


class WritesInPlaceSlowly(WritesInPlace):
    """Is nearly always halfway through a write, so that a kill at any instant meets one."""

    def store_one(self, item: Item) -> StoreOutcome:
        with self.path(item.key).open("wb", buffering=0) as file:
            for buffer in item.buffers:
                time.sleep(0.02)
                file.write(buffer)
        return STORED


class LeavesTheTail(FileStorage):
    def store_one(self, item: Item) -> StoreOutcome:
        path = self.path(item.key)
        path.touch()
        with path.open("r+b") as file:
            file.writelines(item.buffers)
        return STORED


class OneTemporaryName(FileStorage):
    """All writers of a key share the temporary file: they write into each other."""

    def store_one(self, item: Item) -> StoreOutcome:
        temporary = self.root / f".{item.key.name}"
        with temporary.open("wb", buffering=0) as file:
            for buffer in item.buffers:
                file.write(buffer)
                time.sleep(0.001)
        with contextlib.suppress(FileNotFoundError):
            temporary.replace(self.path(item.key))
        return STORED


class ForgetsAtRestart(FileStorage):
    def open(self) -> None:
        super().open()
        for path in self.root.iterdir():
            path.unlink()


class Scrambles(FileStorage):
    """Undoes itself, so that only access past the storage shows it."""

    def load_one(self, item: Item) -> LoadOutcome:
        try:
            return fill(item.buffers, bytes(b ^ 1 for b in self.path(item.key).read_bytes()))
        except FileNotFoundError:
            return MISSING

    def store_one(self, item: Item) -> StoreOutcome:
        data = bytes(b ^ 1 for b in b"".join(item.buffers))
        return super().store_one(Item(item.key, [memoryview(data)]))


class LooseCapacity(MemoryStorage):
    def usage(self) -> Usage:
        return Usage(min(self._nbytes, 4 << 20), len(self._objects), 4 << 20)

    def __init__(self) -> None:
        super().__init__(MemoryConfig(), Context())


class LeaksCapacity(MemoryStorage):
    """What was deleted or replaced is still counted."""

    def _drop(self, keys: Sequence[Any]) -> None:
        for key in keys:
            self._objects.pop(key, None)

    def usage(self) -> Usage:
        return Usage(min(self._nbytes, self._capacity or 0), len(self._objects), self._capacity)


class CopiesAfterCancel(AsyncStorage):
    """Copies in a thread, which a cancelled task does not stop."""

    async def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        def work() -> list[LoadOutcome]:
            outcomes: list[LoadOutcome] = []
            for item in items:
                time.sleep(0.001)
                data = self.objects.get(item.key)
                outcomes.append(MISSING if data is None else fill(item.buffers, data))
            return outcomes

        return await asyncio.to_thread(work)


class TornByCancel(AsyncStorage):
    async def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        for item in items:
            self.objects[item.key] = b""
            for buffer in item.buffers:
                self.objects[item.key] += bytes(buffer)
                await asyncio.sleep(0.001)
        return [STORED] * len(items)


def suite_of(make: Make, raw: bool = False) -> StorageConformance:
    class Suite(StorageConformance):
        model_examples = 200
        model_shrinks = False

        def make_storage(self, tmp_path: Path) -> AnyStorage:
            return make(tmp_path)

        def make_bounded(self, tmp_path: Path, capacity_bytes: int) -> AnyStorage:
            return make(tmp_path)

    class RawSuite(Suite):
        def raw_read(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> bytes:
            return (tmp_path / key.name).read_bytes()

        def raw_bytes(self, storage: AnyStorage, tmp_path: Path) -> int:
            assert isinstance(storage, MemoryStorage)
            return sum(map(len, dict(storage._objects).values()))

    return RawSuite() if raw else Suite()


def plain(cls: Callable[[], AnyStorage]) -> Make:
    return lambda place: cls()


def files(cls: Callable[[Path], AnyStorage]) -> Make:
    return cls


def named(cls: Callable[[str], AnyStorage]) -> Make:
    return lambda place: cls(str(place))


def leaky(place: Path) -> LeaksCapacity:
    return LeaksCapacity(MemoryConfig(capacity="4MiB"), Context(make_eviction=lru))  # type: ignore[arg-type]


FAULTS: list[tuple[Make, str, tuple[Any, ...], str]] = [
    (plain(MissingLast), "test_missing_keys_keep_the_order", (), "item .* of a batch|for a room of"),
    (plain(ReversedBatch), "test_missing_keys_keep_the_order", (), "item .* of a batch|not Failed|never stored"),
    (plain(SkipsMissing), "test_missing_keys_keep_the_order", (), "`load` of 24 items returned 16 outcomes"),
    (plain(KeepsBuffers), "test_store_copies_the_buffers", ((),), "reused its buffers"),
    (plain(OneBuffer), "test_several_buffers", ((1, 3, 517), 0), "only the front of an object"),
    (plain(Pads), "test_larger_room", (511, 4096), "changed the room beyond the object's length"),
    (plain(CutsToTheRoom), "test_room_too_small", (4097, 4096), "must be Failed, not Loaded"),
    (plain(ShortKeys), "test_unusual_keys", (), "never stored under this key|among similar ones"),
    (plain(NoGroups), "test_unusual_keys", (), "among similar ones"),
    (plain(NeverDeletes), "test_delete", (), "`exists` is wrong after `delete`"),
    (plain(NeverDeletes), "test_delete_while_loading", (), "after `delete` had returned"),
    (plain(ExistsAlways), "test_missing_keys_keep_the_order", (), "`exists` of a mixed batch is wrong"),
    (plain(WritesLater), "test_load_lets_go_of_the_buffers", (), "changed after `load` had returned"),
    (plain(CountsTwice), "test_list_is_consistent", (), "yields a key twice"),
    (plain(CountsTwice), "test_usage_is_consistent", (), "counts 40 objects of 30"),
    (plain(WrongList), "test_list_is_consistent", (), "wrong sizes"),
    (files(ReadsToList), "test_list_while_deleting", (), "`list` must bear objects that are deleted meanwhile"),
    (plain(UsageGrows), "test_usage_is_consistent", (), "after all was deleted"),
    (plain(Hangs), "test_empty_batches", (), "`exists` did not return within"),
    (files(WritesInPlace), "test_store_while_loading", (), "torn write"),
    (files(WritesInPlace), "test_concurrent_stores_of_one_key", (), "torn write"),
    (files(WritesInPlace), "test_error_halfway_through_a_store", (), "a store that failed halfway"),
    (files(LeavesTheTail), "test_overwrite", (), "torn write|more bytes"),
    (files(OneTemporaryName), "test_concurrent_stores_of_one_key", (), "torn write|could not|failed|mix"),
    (files(ForgetsAtRestart), "test_restart", (), "`exists` is wrong after a restart"),
    (plain(LooseCapacity), "test_capacity_holds", (), "bytes can be loaded from a capacity"),
    (leaky, "test_overwrites_do_not_use_up_the_capacity", (), "neighbour of a key stored 80 times|not stored"),
    (leaky, "test_deletes_give_room_back", (), "round .* in a half full storage|not stored"),
    (named(CopiesAfterCancel), "test_cancelled_load_lets_go_of_the_buffers", (), "after its `load` had been cancelled"),
    (named(TornByCancel), "test_cancelled_store_is_whole_or_absent", (), "after a cancelled store: only the front"),
]


@pytest.mark.parametrize(
    ("make", "test", "arguments", "sentence"),
    FAULTS,
    ids=[f"{number}-{fault[1].removeprefix('test_')}" for number, fault in enumerate(FAULTS)],
)
def test_fault_is_named(make: Make, test: str, arguments: tuple[Any, ...], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=sentence):
        run(suite_of(make), test, arguments, tmp_path)


@pytest.mark.parametrize("cls", [RaisesOnMissing])
def test_error_of_the_storage_is_shown(cls: type[Dict], tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        run(suite_of(plain(cls)), "test_missing_keys_keep_the_order", (), tmp_path)


def test_symmetric_fault_shows_through_raw_access(tmp_path: Path) -> None:
    suite = suite_of(files(Scrambles), raw=True)
    run(suite, "test_round_trip_at_odd_sizes", (4097,), tmp_path)
    with pytest.raises(AssertionError, match="does not hold the 1 bytes that were stored"):
        run(suite, "test_raw_bytes_are_the_object", (), tmp_path)


def test_a_listing_that_ends_at_a_damaged_object_shows(tmp_path: Path) -> None:
    class Damaged(StorageConformance):
        def make_storage(self, tmp_path: Path) -> AnyStorage:
            return ReadsToList(tmp_path)

        def raw_corrupt(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> None:
            os.truncate(tmp_path / key.name, 1000)

    with pytest.raises(AssertionError, match="`list` must bear a damaged object"):
        Damaged().test_damaged_object(tmp_path)


def test_usage_that_lies_shows_through_raw_access(tmp_path: Path) -> None:
    suite = suite_of(plain(LooseCapacity), raw=True)
    with pytest.raises(AssertionError, match="the store really holds"):
        suite.test_capacity_holds_under_concurrency(tmp_path)


@pytest.mark.parametrize("cls", [MissingLast, NeverDeletes, WrongList])
def test_state_machine_finds_it_too(cls: Callable[[], AnyStorage], tmp_path: Path) -> None:
    with pytest.raises((AssertionError, ExceptionGroup)):
        run(suite_of(plain(cls)), "test_like_a_dict", (), tmp_path)


class TestInPlaceSuite(StorageConformance):
    """Not run as a suite (see below): a child process must be able to find it by its name."""

    __test__ = False

    def make_storage(self, tmp_path: Path) -> WritesInPlace:
        return WritesInPlaceSlowly(tmp_path / "objects")


def test_kill_finds_torn_writes(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="torn object"):
        TestInPlaceSuite().test_kill_during_store(tmp_path)


def test_child_that_cannot_store_is_an_error(tmp_path: Path) -> None:
    class Local(TestInPlaceSuite):
        """Cannot be found by its name."""

    with pytest.raises(AssertionError, match="the child process could not store: Traceback"):
        Local().test_kill_during_store(tmp_path)


def test_what_does_not_apply_is_skipped_with_its_reason(tmp_path: Path) -> None:
    suite = suite_of(plain(Dict))
    for test, reason in {
        "test_list_is_consistent": "does not enumerate",
        "test_usage_is_consistent": "does not tell its usage",
        "test_cancelled_store_is_whole_or_absent": "a blocking storage is not cancelled",
        "test_registered_memory": "does not declare zero_copy",
        "test_raw_bytes_are_the_object": "no `raw_read` was given",
    }.items():
        with pytest.raises(pytest.skip.Exception, match=reason):
            call(suite, test, (), tmp_path)


def run(suite: StorageConformance, test: str, arguments: tuple[Any, ...], tmp_path: Path) -> None:
    """Run one test of a suite as pytest would; a skip is an error, for it would prove nothing."""
    try:
        call(suite, test, arguments, tmp_path)
    except pytest.skip.Exception as skip:
        raise RuntimeError(f"{test} was skipped: {skip}") from None


def call(suite: StorageConformance, test: str, arguments: tuple[Any, ...], tmp_path: Path) -> None:
    method = getattr(suite, test)
    if re.search(r"\bdriver\b", " ".join(method.__code__.co_varnames[: method.__code__.co_argcount])):
        with Driver(suite.make_storage(tmp_path), timeout_s=1.0 if "empty" in test else 30.0) as driver:
            method(driver, *arguments) if "raw" not in test else method(driver, tmp_path)
    else:
        method(tmp_path, *arguments)
