"""Storages that fail on purpose: the seed decides, and what the core makes of it is a miss and never more."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from storage_samples import AsyncStorage

from kvcore.api import MISSING, STORED, Context, Entry, Failed, Item, Loaded, ObjectKey, PluginError, StorageError
from kvcore.api.storage import StorageTraits
from kvcore.builtin.memory import MemoryStorage
from kvcore.builtin.memory_config import MemoryConfig
from kvcore.config import load_config
from kvcore.engine import CacheEngine, GroupSpec, ModelSpec, Space, attach_arena
from kvcore.plugins import PluginSpec, Registry
from kvcore.testing import Faults, StorageConformance, dist, faulty
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, make_key, source

BLOCK = 64 << 10
CHUNKS = 8
ASYNC = """
from kvcore.api import ApiVersion, Component, Storage, hookimpl
from kvcore.builtin.memory import MemoryStorage
from kvcore.builtin.memory_config import MemoryConfig

class AsyncMemory(Storage):
    def __init__(self, config, context):
        self.inner = MemoryStorage(config, context)
    async def exists(self, keys):
        return self.inner.exists(keys)
    async def load(self, items):
        return self.inner.load(items)
    async def store(self, items):
        return self.inner.store(items)
    async def delete(self, keys):
        self.inner.delete(keys)
    async def usage(self):
        return self.inner.usage()

@hookimpl
def kvcore_storage():
    return Component(api=ApiVersion(1, 0), config=MemoryConfig, factory=AsyncMemory)
"""


def memory() -> MemoryStorage:
    return MemoryStorage(MemoryConfig(), Context())


# --- without a fault it is the storage


class TestBlocking(StorageConformance):
    def make_storage(self, tmp_path: Path) -> Any:
        return faulty(memory(), Faults())


class Listing(AsyncStorage):
    async def list(self) -> list[Entry]:
        return [Entry(key, len(data)) for key, data in self.objects.items()]


class TestAsync(StorageConformance):
    def make_storage(self, tmp_path: Path) -> Any:
        return faulty(Listing(str(tmp_path)), Faults())


@pytest.mark.parametrize("inner", [memory, lambda: AsyncStorage("traits")])
def test_traits_are_those_of_the_storage(inner: Callable[[], Any]) -> None:
    storage = inner()
    storage.persistent, storage.max_object_bytes, storage.preferred_concurrency = True, 12345, 7
    wrapped = faulty(storage, Faults())
    for trait in StorageTraits.__annotations__:
        assert getattr(wrapped, trait) == getattr(storage, trait)
    registered: list[Any] = []
    storage.register_memory = registered.append
    wrapped.register_memory(memoryview(b"arena"))
    assert registered == [b"arena"]


# --- by the seed


def failing(faults: Faults, batch: int, threads: int = 1) -> set[int]:
    """Which of 400 objects a store refuses, in batches of this size from this many threads."""
    storage, refused = faulty(memory(), faults), set()

    def work(own: range) -> None:
        for at in range(0, len(own), batch):
            numbers = own[at : at + batch]
            outcomes = storage.store([source(make_key(i), b"x") for i in numbers])  # type: ignore[misc]
            refused.update(i for i, outcome in zip(numbers, outcomes, strict=True) if outcome != STORED)

    workers = [threading.Thread(target=work, args=(range(i, 400, threads),)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return refused


def test_an_objects_fate_depends_on_the_seed_and_not_on_batches_or_threads() -> None:
    faults = Faults(fail_rate=0.25, seed=3)
    first = failing(faults, 1)
    assert failing(faults, 64) == failing(faults, 7, threads=4) == first
    assert failing(Faults(fail_rate=0.25, seed=4), 1) != first
    assert 60 < len(first) < 140
    assert failing(Faults(fail_rate=0.5, seed=3), 1) > first


def test_the_next_try_has_a_fate_of_its_own() -> None:
    storage = faulty(memory(), Faults(fail_rate=0.5, seed=1))
    outcomes = [storage.store([source(make_key(0), b"x")])[0] for _ in range(40)]  # type: ignore[index]
    assert 5 < outcomes.count(STORED) < 35


def test_a_calls_fate_depends_on_its_number() -> None:
    def fates(seed: int) -> list[int]:
        storage, found = faulty(memory(), Faults(error_rate=0.5, seed=seed)), []
        for i in range(40):
            with suppress(StorageError):
                storage.exists([make_key(i)])
                found.append(i)
        return found

    assert fates(1) == fates(1)
    assert fates(1) != fates(2)
    assert 8 < len(fates(1)) < 32


# --- each fault, as the storage shows it


@pytest.fixture(params=["blocking", "asyncio"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    """A faulty storage of either kind, healthy at first, with objects 0 to 19 in it."""
    inner = memory() if request.param == "blocking" else AsyncStorage(str(tmp_path))
    with Driver(faulty(inner, Faults())) as driver:
        assert driver.store([source(make_key(i), content(i, 5000), (4096,)) for i in range(20)]) == [STORED] * 20
        yield driver


def load(driver: Driver, *numbers: int) -> list[Any]:
    """Per object: its bytes, or the outcome."""
    rooms = [Room(6000, (4096,)) for _ in numbers]
    outcomes = driver.load([room.item(make_key(i)) for room, i in zip(rooms, numbers, strict=True)])
    return [
        bytes(room.view[: o.nbytes]) if isinstance(o, Loaded) else o for room, o in zip(rooms, outcomes, strict=True)
    ]


def test_errors(driver: Driver) -> None:
    driver.storage.faults = Faults(error_rate=1)
    for call in ("exists", "delete"):
        with pytest.raises(StorageError, match=f"injected: {call} number 1 failed"):
            driver.call(call, [make_key(1)])
    with pytest.raises(StorageError, match="injected: load"):
        load(driver, 1)
    driver.call("ping")
    driver.storage.faults = Faults(error_rate=1, operations=("store",))
    assert load(driver, 1) == [content(1, 5000)]
    with pytest.raises(StorageError, match="injected: store"):
        driver.store([source(make_key(1), b"new")])
    driver.storage.faults = Faults()
    assert load(driver, 1) == [content(1, 5000)]


def test_single_failures(driver: Driver) -> None:
    driver.storage.faults = Faults(fail_rate=0.5, seed=1)
    got = load(driver, *range(20))
    failed = [i for i in range(20) if got[i] == Failed("injected: the object cannot be read")]
    assert 3 < len(failed) < 17
    assert all(got[i] == content(i, 5000) for i in range(20) if i not in failed)
    outcomes = driver.store([source(make_key(i), b"new") for i in range(100, 120)])
    kept = [o == STORED for o in outcomes]
    assert set(kept) == {True, False}
    assert all(o.reason == "injected: the object cannot be written" for o in outcomes if isinstance(o, Failed))
    assert driver.exists([make_key(i) for i in range(100, 120)]) == kept


def test_lost(driver: Driver) -> None:
    driver.storage.faults = Faults(lost_rate=0.5, seed=1)
    keys = [make_key(i) for i in range(20)]
    assert driver.exists(keys) == [True] * 20
    got = load(driver, *range(20))
    assert 3 < got.count(MISSING) < 17
    assert driver.exists(keys) == [g is not MISSING and g != MISSING for g in got]


def test_torn(driver: Driver) -> None:
    driver.storage.faults = Faults(torn_rate=1)
    assert driver.store([source(make_key(i), content(i, 5000), (4096,)) for i in range(20, 40)]) == [STORED] * 20
    got = load(driver, *range(20, 40))
    assert all(0 < len(g) < 5000 and content(i, 5000).startswith(g) for i, g in zip(range(20, 40), got, strict=True))
    assert len({len(g) for g in got}) > 10


def test_flipped(driver: Driver) -> None:
    driver.storage.faults = Faults(flip_rate=1)
    places = set()
    for i, got in enumerate(load(driver, *range(20))):
        difference = int.from_bytes(got) ^ int.from_bytes(content(i, 5000))
        assert difference.bit_count() == 1
        places.add(difference)
    assert len(places) == 20
    driver.storage.faults = Faults()
    assert load(driver, *range(20)) == [content(i, 5000) for i in range(20)]  # what is stored is whole


def test_latency(driver: Driver) -> None:
    driver.storage.faults = Faults(latency="200ms")
    begun = time.monotonic()
    assert load(driver, 1) == [content(1, 5000)]
    assert time.monotonic() - begun >= 0.2


def test_hanging_calls_end_with_the_storage(driver: Driver) -> None:
    driver.storage.faults = Faults(hang_rate=1, operations=("load",))
    call = driver.submit("load", [Room(6000).item(make_key(1))])
    time.sleep(0.2)
    assert not call.done()
    assert driver.exists([make_key(1)]) == [True]
    driver.close()
    assert isinstance(call.exception(10), StorageError) if not driver.cancellable else call.cancelled()


def test_blocking_calls_stop_hanging_when_the_fault_is_over() -> None:
    with Driver(faulty(memory(), Faults(hang_rate=1))) as driver:
        call = driver.submit("exists", [make_key(1)])
        time.sleep(0.1)
        assert not call.done()
        driver.storage.faults = Faults()
        assert str(call.exception(10)) == "injected: exists number 1 hung"
        assert driver.exists([make_key(1)]) == [False]


def test_a_fault_that_is_over_just_when_a_call_meets_it_does_not_hang_it(monkeypatch: pytest.MonkeyPatch) -> None:
    storage: Any = faulty(memory(), Faults(hang_rate=1))
    real = storage._faulty._next

    def meets(operation: str) -> Any:
        call = real(operation)
        storage.faults = Faults()
        return call

    monkeypatch.setattr(storage._faulty, "_next", meets)
    with Driver(storage, timeout_s=5) as driver, pytest.raises(StorageError, match="exists number 1 hung"):
        driver.call("exists", [make_key(1)])


def test_a_crash_leaves_half_a_batch_and_a_torn_object(driver: Driver) -> None:
    driver.storage.faults = Faults(crash_after=3)  # the fixture's store was the first call
    assert driver.exists([make_key(30)]) == [False]
    assert load(driver, 1) == [content(1, 5000)]
    with pytest.raises(StorageError, match="injected: the store has crashed"):
        driver.store([source(make_key(i), content(i, 5000)) for i in range(30, 34)])
    for call in (lambda: driver.call("ping"), lambda: load(driver, 1), lambda: driver.exists([make_key(1)])):
        with pytest.raises(StorageError, match="has crashed"):
            call()
    driver.storage.faults = Faults()
    whole = [content(i, 5000) for i in range(30, 34)]
    assert load(driver, *range(30, 34)) == [*whole[:2], whole[2][:2500], MISSING]


# --- what the core makes of it


def spec() -> ModelSpec:
    return ModelSpec("test", "m", "w", "bfloat16", 2, "L", "CPU", "v", 32, 1, (GroupSpec(("a", "b"), (BLOCK, BLOCK)),))


KEYS = [hashlib.sha256(f"chunk {i}".encode()).digest() for i in range(CHUNKS)]


class Bench:
    """An engine over `faulty`, over a storage of either kind."""

    def __init__(self, folder: Path, inner: str, faults: str, timeout: str = "5s") -> None:
        config = folder / "kvcore.yaml"
        config.write_text(
            "l1: {size: 8MiB}\nmin_object_size: 128KiB\nlookup_timeout: 20s\n"
            f"l2: [{{name: t, timeout: {timeout}, storage: {{plugin: faulty, storage: {inner}{faults}}}}}]\n"
        )
        self.engine = CacheEngine.open(str(config))
        self.space: Space = self.engine.register(spec())
        self.storage: Any = self.engine.manager.tiers[0].storage

    def put(self) -> None:
        """Store chunks whose every byte is their index + 1, and wait until the tier has been offered them."""
        plan = self.engine.reserve(self.space, KEYS, 0, CHUNKS, [list(range(CHUNKS * self.space.chunk_blocks))])
        view = attach_arena(self.space.descriptor())
        size = self.space.groups[0].nbytes
        for copy in plan.copies:
            number = copy.blocks[0] // self.space.chunk_blocks + 1
            view.buffer[copy.slot : copy.slot + size] = bytes([number]) * size
        view.close()
        self.engine.publish(plan.id)
        assert self.engine.drain(20) == 0

    def found(self) -> int:
        """How many chunks come back from the tier, after L1 has forgotten them; all of them right."""
        self.engine.clear(self.space)
        lookup = self.engine.lookup(self.space, KEYS)
        assert lookup.wait(20)
        copies = self.engine.retrieve(lookup, 0, [list(range(1000))])
        for number, copy in enumerate(copies, start=1):
            data = bytes(self.engine.manager.arena.buffer[copy.slot : copy.slot + self.space.groups[0].nbytes])
            assert data == bytes([number]) * len(data)
        self.engine.release(lookup)
        return len(copies)

    def missed(self, reason: str) -> float:
        return self.engine.stats().get(f'kvcore_miss_chunks_total{{reason="{reason}"}}', 0)

    def until(self, condition: Callable[[], bool]) -> bool:
        give_up = time.monotonic() + 20
        while not condition() and time.monotonic() < give_up:
            time.sleep(0.05)
        return condition()

    def close(self) -> None:
        """Nothing leaks: once L1 is empty, every byte of it is free, and no lease is left."""

        def whole() -> bool:
            self.engine.clear(self.space)
            usage = self.engine.l1.usage()
            return usage["free"] == usage["size"] and not usage["leases"] and not usage["quarantined"]

        assert self.until(whole), self.engine.l1.usage()
        self.engine.close()


@pytest.fixture(params=["memory", "acme"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, site: Path) -> Iterator[Callable[..., Bench]]:
    """Makes engines over a blocking and an asyncio storage."""
    dist(site, "kvcore-acme", {"kvcore.storage": {"acme": "fake_acme"}}, {"fake_acme": ASYNC})
    made: list[Bench] = []

    def make(faults: str = "", **kwargs: Any) -> Bench:
        made.append(Bench(tmp_path, request.param, faults, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_without_faults_everything_comes_back(bench: Callable[..., Bench]) -> None:
    engine = bench()
    engine.put()
    assert engine.found() == CHUNKS


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("fail_rate", "io"),
        ("lost_rate", "evicted_from_tier"),
        ("flip_rate", "corrupt"),
        ("torn_rate", "corrupt"),
    ],
)
def test_objects_that_are_lost_or_damaged_are_misses(bench: Callable[..., Bench], fault: str, reason: str) -> None:
    operation = "store" if fault == "torn_rate" else "load"
    engine = bench(f", {fault}: 0.5, operations: [{operation}], seed: 5")
    engine.put()
    found = engine.found()
    assert found < CHUNKS
    assert engine.missed(reason) >= 1
    engine.storage.faults = Faults()
    engine.put()  # computed again
    assert engine.found() == CHUNKS


def test_a_flipped_bit_of_every_object_is_never_believed(bench: Callable[..., Bench]) -> None:
    engine = bench(", flip_rate: 1, seed: 9")
    for _ in range(5):
        engine.put()
        assert engine.found() < CHUNKS  # a bit of the header's padding may change without harm


def test_a_tier_that_fails_is_left_alone_and_comes_back(bench: Callable[..., Bench]) -> None:
    engine = bench()
    engine.put()
    engine.storage.faults = Faults(error_rate=1)
    for _ in range(4):
        assert engine.found() == 0
    assert engine.engine.stats()['kvcore_tier_open{tier="t"}'] == 0
    engine.storage.faults = Faults()
    assert engine.until(lambda: engine.found() == CHUNKS)
    assert engine.engine.stats()['kvcore_tier_open{tier="t"}'] == 1


def test_a_tier_that_is_slow_is_waited_for_within_its_deadline(bench: Callable[..., Bench]) -> None:
    engine = bench(", latency: 50ms", timeout="1s")
    engine.put()
    assert engine.found() == CHUNKS
    engine.storage.faults = Faults(latency="1m")
    assert engine.found() == 0
    engine.storage.faults = Faults()


def test_a_tier_that_hangs_costs_its_hits_and_no_slot_for_good(bench: Callable[..., Bench]) -> None:
    engine = bench(timeout="300ms")
    engine.put()
    engine.storage.faults = Faults(hang_rate=1, operations=("load",))
    assert engine.found() == 0
    assert engine.missed("timeout") >= 1
    engine.storage.faults = Faults()  # what hung lets go of its slots
    assert engine.until(lambda: engine.found() == CHUNKS)


def test_a_store_that_hangs_keeps_memory_of_l1_until_it_lets_go(bench: Callable[..., Bench]) -> None:
    engine = bench(", hang_rate: 1, operations: [store]", timeout="300ms")
    engine.put()
    leases = engine.engine.l1.usage()["leases"]
    assert engine.found() == 0  # what is cleared is found no more
    usage = engine.engine.l1.usage()
    assert (usage["free"] < usage["size"]) == bool(leases)  # an asyncio call is cancelled, a blocking one keeps it
    engine.storage.faults = Faults()
    assert engine.until(lambda: engine.engine.l1.usage()["free"] == usage["size"])
    assert engine.engine.l1.usage()["leases"] == 0


def test_a_crash_is_the_end_of_the_tier_and_not_of_the_engine(bench: Callable[..., Bench]) -> None:
    engine = bench(", crash_after: 2")
    engine.put()
    assert engine.found() == 0
    engine.put()
    lookup = engine.engine.lookup(engine.space, KEYS)  # L1 serves on
    assert lookup.wait(20)
    assert lookup.poll() == CHUNKS
    engine.engine.release(lookup)
    engine.storage.faults = Faults()  # somebody has started it again, with a torn object in it

    def whole() -> bool:
        engine.put()
        return engine.found() == CHUNKS

    assert engine.until(whole)


@pytest.mark.parametrize("seed", range(4))
def test_all_faults_together_never_give_a_wrong_byte(bench: Callable[..., Bench], seed: int) -> None:
    rates = ", ".join(f"{name}_rate: 0.1" for name in ("error", "fail", "lost", "torn", "flip"))
    engine = bench(f", {rates}, hang_rate: 0.02, latency: 1ms, seed: {seed}", timeout="300ms")
    found = []
    for _ in range(8):
        engine.put()
        found.append(engine.found())
    assert max(found) > 0
    engine.storage.faults = Faults()


# --- in YAML


def faults_of(text: str, tmp_path: Path) -> str:
    path = tmp_path / "kvcore.yaml"
    path.write_text(text)
    with pytest.raises(Exception) as caught:
        load_config(str(path), env={}, registry=Registry())
    return str(caught.value).replace(f"{tmp_path}{os.sep}", "")


def test_the_storage_behind_is_checked_with_its_place(tmp_path: Path) -> None:
    text = faults_of(
        "l2:\n"
        "  - storage: {plugin: faulty, error_rate: 2, storage: {plugin: memory, capasity: 1GiB}}\n"
        "  - storage: {plugin: faulty, storage: memroy, latency: 50}\n"
        "  - storage: {plugin: faulty, operations: [lode]}\n"
        "  - storage: {plugin: faulty, storage: 7}\n"
        "  - storage: {plugin: faulty, storage: {plugin: memory, eviction: lruu}}\n",
        tmp_path,
    )
    lines = text.splitlines()
    for place, what in (
        ("kvcore.yaml:2:43: l2[0].storage.error_rate:", "less than or equal to 1, given 2"),
        ("kvcore.yaml:2:72: l2[0].storage.storage.capasity:", "did you mean 'capacity'?"),
        ("kvcore.yaml:3:40: l2[1].storage.storage:", "Did you mean 'memory'?"),
        ("kvcore.yaml:3:57: l2[1].storage.latency:", "50 is not a duration"),
        ("kvcore.yaml:4:44: l2[2].storage.operations[0]:", "must be 'exists', 'load', 'store' or 'delete'"),
        ("kvcore.yaml:4:14: l2[2].storage.storage:", "is missing: The storage that is made to fail"),
        ("kvcore.yaml:5:40: l2[3].storage.storage:", "7 is not a storage: write a name such as disk"),
        ("kvcore.yaml:6:67: l2[4].storage.storage.eviction:", "Did you mean 'lru'?"),
    ):
        assert any(line.startswith(place) and what in line for line in lines), f"{place} {what}\nin\n{text}"


SECRET = """
from kvcore.api import ApiVersion, Component, PluginConfig, hookimpl
from kvcore.builtin.memory import MemoryStorage
from kvcore.builtin.memory_config import MemoryConfig
from pydantic import SecretStr

class Config(PluginConfig):
    password: SecretStr
    eviction: str = "lru"
    capacity: None = None

contexts = []

def make(config, context):
    contexts.append(context)
    return MemoryStorage(config, context)

@hookimpl
def kvcore_storage():
    return Component(api=ApiVersion(1, 0), config=Config, factory=make)
"""


def test_values_behind_are_shown_with_their_places_and_secrets_are_not(tmp_path: Path, site: Path) -> None:
    dist(site, "kvcore-acme", {"kvcore.storage": {"acme": "fake_acme"}}, {"fake_acme": SECRET})
    path = tmp_path / "kvcore.yaml"
    path.write_text(
        "l2:\n- storage: {plugin: faulty, seed: 3, storage: {plugin: faulty, storage: {plugin: acme, password: pw}}}\n"
    )
    config = load_config(str(path), env={}, registry=Registry())
    rows = {row.path: (row.value, str(row.source)) for row in config.rows()}
    assert rows["l2[0].storage.seed"] == (3, f"{path}:2:35")
    assert rows["l2[0].storage.storage.storage"][0] == "acme"
    assert rows["l2[0].storage.storage.storage.password"][0] == "**********"
    assert "pw" not in repr(config) + str(rows)


def test_the_context_reaches_the_storage_behind(site: Path) -> None:
    dist(site, "kvcore-acme", {"kvcore.storage": {"acme": "fake_acme"}}, {"fake_acme": SECRET})
    registry = Registry()
    options = {"storage": {"plugin": "acme", "password": "x"}}
    context = registry.context("l2[0].storage", passive=True)
    made = registry.create("storage", PluginSpec("faulty", options, "l2[0].storage"), context)
    import fake_acme  # type: ignore[import-not-found]

    assert isinstance(made.inner, MemoryStorage)
    assert [(c.name, c.passive) for c in fake_acme.contexts] == [("l2[0].storage.storage", True)]
    with pytest.raises(PluginError, match="this context cannot make a storage"):
        Context().make_storage("memory")


def test_items_of_a_torn_store_keep_their_order() -> None:
    seen: list[Item] = []
    inner = memory()
    inner.store = lambda items: seen.extend(items) or [STORED] * len(items)  # type: ignore[method-assign,func-returns-value]
    keys: list[ObjectKey] = [make_key(i) for i in range(30)]
    faulty(inner, Faults(torn_rate=0.5, fail_rate=0.2)).store([source(key, b"0123456789") for key in keys])  # type: ignore[unused-coroutine]
    assert [item.key for item in seen] == [key for key in keys if key in {item.key for item in seen}]
    assert {item.nbytes for item in seen} > {10}
