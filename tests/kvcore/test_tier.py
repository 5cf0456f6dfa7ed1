"""A tier over storages that work, lie, raise and hang: never an exception, never a wrong byte, never a long wait."""

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pickle import PickleBuffer
from typing import Any

import pytest
from toys import LAYOUT, NBYTES, AsyncStorage, DictStorage, Gate, Halve, Mirror, Raising, Toy, Zip, key, payload

from kvcore.api import (
    MISSING,
    STORED,
    BlockingStorage,
    Failed,
    Item,
    Loaded,
    LoadOutcome,
    ObjectLayout,
    Serde,
    SerdeError,
    Storage,
    StorageError,
    Stored,
)
from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.l2 import HEADER_BYTES, Capacity, Codec, Parcel, Threads, Tier
from kvcore.l2.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from kvcore.l2.threads import MAX_STUCK
from kvcore.observe import Metrics

TIMEOUT_S = 0.5
STORAGES = [DictStorage, AsyncStorage]
CHAINS: list[list[Serde]] = [[], [Zip()], [Mirror(), Zip()]]


class Bench:
    """A tier with everything around it."""

    def __init__(
        self,
        storage: Storage | BlockingStorage,
        chain: Sequence[Serde] = (),
        *,
        resolve: Callable[[str], Serde | None] = {}.get,
        timeout_s: float = 5.0,
        useful_s: float = float("inf"),
        capacity: Capacity | None = None,
    ) -> None:
        self.metrics = Metrics()
        self.threads = Threads("codec", 2)
        self.now = 1000.0
        self.storage: Any = storage
        self.tier = Tier(
            "t",
            storage,
            Codec(chain, resolve),
            threads=self.threads,
            timeout_s=timeout_s,
            metrics=self.metrics,
            useful_s=useful_s,
            capacity=capacity,
        )
        self.tier.breaker._clock = lambda: self.now

    async def store(self, *numbers: int, **kwargs: Any) -> list[Any]:
        stores = await self.tier.store([Parcel(key(i), (payload(i),), LAYOUT) for i in numbers], **kwargs)
        assert stores.settled is None
        return stores.outcomes

    async def load(self, *numbers: int) -> list[Any]:
        """Outcomes; what is `Loaded` has been compared with what was stored."""
        into = [memoryview(bytearray(NBYTES)) for _ in numbers]
        loads = await self.tier.load([Parcel(key(i), (b,), LAYOUT) for i, b in zip(numbers, into, strict=True)])
        assert loads.settled is None
        for i, buffer, outcome in zip(numbers, into, loads.outcomes, strict=True):
            if isinstance(outcome, Loaded):
                assert buffer == payload(i)
        return loads.outcomes

    def count(self, op: str, outcome: str) -> float:
        return self.metrics.values().get(f'kvcore_tier_operations_total{{tier="t",op="{op}",outcome="{outcome}"}}', 0)

    def damage(self, i: int, change: Callable[[bytearray], Any]) -> None:
        data = bytearray(self.storage.objects[key(i)])
        replaced = change(data)
        self.storage.objects[key(i)] = bytes(data if replaced is None else replaced)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def kinds(outcomes: Sequence[Any]) -> list[str]:
    return [o.kind if isinstance(o, Failed) else type(o).__name__ for o in outcomes]


# -- what works --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("chain", CHAINS, ids=len)
def test_round_trip(storage: Any, chain: list[Serde]) -> None:
    async def main() -> None:
        bench = Bench(storage(), chain)
        await bench.tier.open()
        assert await bench.load(1, 2) == [MISSING, MISSING]
        assert await bench.store(1, 2, 3) == [STORED] * 3
        assert await bench.tier.exists([key(1), key(9), key(3)]) == [True, False, True]
        outcomes = await bench.load(3, 9, 1)
        assert kinds(outcomes) == ["Loaded", "Missing", "Loaded"]
        assert outcomes[0].nbytes == len(bench.storage.objects[key(3)])
        await bench.tier.delete([key(3), key(9)])
        assert await bench.load(3) == [MISSING]
        assert (bench.count("load", "ok"), bench.count("load", "missing"), bench.count("store", "ok")) == (2, 4, 3)
        values = bench.metrics.values()
        sizes = [len(data) for data in (*bench.storage.objects.values(),)]
        assert values['kvcore_tier_bytes_total{tier="t",op="store"}'] >= sum(sizes)
        if chain:
            assert values['kvcore_serde_bytes_total{tier="t",side="in"}'] == 3 * NBYTES
            assert 0 < values['kvcore_serde_bytes_total{tier="t",side="out"}'] < NBYTES
        await bench.tier.close()

    run(main())


def test_one_batch_is_decoded_while_the_next_is_read() -> None:
    """Each waits for the other: that ends only when they run beside each other, also where a storage takes one call."""
    reading, decoding = threading.Event(), threading.Event()

    class Slow(DictStorage):
        preferred_concurrency = 1

        def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
            if items[0].key == key(2):
                reading.set()
                assert decoding.wait(60)
            return super().load(items)

    class Waits(Zip):
        def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
            decoding.set()
            assert reading.wait(60)
            super().decode(source, into, layout)

    async def main() -> None:
        bench = Bench(Slow(), [Waits()], timeout_s=120)
        await bench.store(1, 2)
        outcomes = await asyncio.gather(bench.load(1), bench.load(2))
        assert [kinds(some) for some in outcomes] == [["Loaded"], ["Loaded"]]

    asyncio.run(asyncio.wait_for(main(), 120))


def test_lossy() -> None:
    async def main() -> None:
        bench = Bench(DictStorage(), [Halve(), Zip()])
        await bench.store(1)
        into = memoryview(bytearray(NBYTES))
        loads = await bench.tier.load([Parcel(key(1), (into,), LAYOUT)])
        assert kinds(loads.outcomes) == ["Loaded"]
        assert into == bytes(b & 0xF0 for b in payload(1))

    run(main())


@pytest.mark.parametrize("chain", CHAINS, ids=len)
@pytest.mark.parametrize("reader", CHAINS, ids=len)
def test_a_changed_chain_reads_what_is_stored(chain: list[Serde], reader: list[Serde]) -> None:
    async def main() -> None:
        storage = DictStorage()
        await Bench(storage, chain).store(1, 2)
        known = {"zip/1": Zip(), "mirror/1": Mirror()}
        assert kinds(await Bench(storage, reader, resolve=known.get).load(1, 2)) == ["Loaded", "Loaded"]

    run(main())


def test_nothing_asked_says_nothing_about_the_storage() -> None:
    async def main() -> None:
        bench = Bench(DictStorage())
        for _ in range(FAILURES + 1):
            assert (await bench.store(), await bench.load(), await bench.tier.exists([])) == ([], [], [])
        assert bench.tier.breaker.closed
        assert bench.storage.calls == []

    run(main())


# -- what is stored is not what it should be ---------------------------------------------------------------------------


def flip(at: int) -> Callable[[bytearray], Any]:
    def change(data: bytearray) -> None:
        data[at] ^= 4

    return change


DAMAGES: dict[str, Callable[[bytearray], Any]] = {
    "magic": flip(0),
    "header": flip(20),
    "stages": flip(66),
    "checksum": flip(50),
    "first byte": flip(HEADER_BYTES),
    "last byte": flip(-1),
    "empty": lambda data: b"",
    "half a header": lambda data: data[:2000],
    "header only": lambda data: data[:HEADER_BYTES],
    "truncated": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "much more": lambda data: data * 9,
    "noise": lambda data: bytes(range(256)) * 32,
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("chain", CHAINS[:2], ids=len)
@pytest.mark.parametrize("damage", DAMAGES)
def test_corrupt_is_a_miss_deleted_and_counted(storage: Any, chain: list[Serde], damage: str) -> None:
    async def main() -> None:
        bench = Bench(storage(), chain)
        await bench.store(1, 2, 3)
        bench.damage(2, DAMAGES[damage])
        assert kinds(await bench.load(1, 2, 3)) == ["Loaded", "corrupt", "Loaded"]
        assert set(bench.storage.objects) == {key(1), key(3)}
        assert bench.count("load", "corrupt") == 1
        assert bench.tier.breaker.closed
        assert await bench.store(2) == [STORED]
        assert kinds(await bench.load(2)) == ["Loaded"]

    run(main())


@pytest.mark.parametrize("chain", CHAINS[:2], ids=len)
def test_the_frame_of_another_object_is_corrupt(chain: list[Serde]) -> None:
    async def main() -> None:
        bench = Bench(DictStorage(), chain)
        await bench.store(1, 2)
        bench.storage.objects[key(2)] = bench.storage.objects[key(1)]
        assert kinds(await bench.load(2)) == ["corrupt"]
        assert set(bench.storage.objects) == {key(1)}

    run(main())


def set_version(data: bytearray) -> None:
    data[8] = 2


@pytest.mark.parametrize(("kind", "chain"), [("version", []), ("unknown_serde", [Zip()])])
def test_what_another_release_may_read_stays_until_it_is_stored_anew(kind: str, chain: list[Serde]) -> None:
    class Keeps(DictStorage):
        """Does not overwrite, as a storage may."""

        def store(self, items: Sequence[Item]) -> Any:
            return super().store([i for i in items if i.key not in self.objects])[:0] + [STORED] * len(items)

    async def main() -> None:
        storage = Keeps()
        await Bench(storage, chain).store(1, 2)
        bench = Bench(storage)
        if kind == "version":
            bench.damage(1, set_version)
        old = storage.objects[key(1)]
        assert await bench.tier.exists([key(1)]) == [True]
        assert kinds(await bench.load(1)) == [kind]
        assert bench.count("load", kind) == 1
        assert storage.objects[key(1)] == old
        # From now on it counts as absent: no lookup fetches it again, and a store replaces it.
        assert await bench.tier.exists([key(1), key(2)]) == [False, True]
        assert await bench.store(1) == [STORED]
        assert storage.objects[key(1)] != old
        assert await bench.tier.exists([key(1)]) == [True]
        assert kinds(await bench.load(1)) == ["Loaded"]

    run(main())


# -- serdes ------------------------------------------------------------------------------------------------------------


def test_a_serde_that_cannot_encode() -> None:
    async def main() -> None:
        bench = Bench(DictStorage(), [Raising("encode", ZeroDivisionError("bug"))])
        for _ in range(FAILURES + 1):
            assert kinds(await bench.store(1, 2)) == ["serde", "serde"]
        assert bench.storage.calls == []
        assert bench.tier.breaker.closed
        assert bench.count("store", "serde") == 2 * (FAILURES + 1)

    run(main())


@pytest.mark.parametrize("what", [None, "text", 5, [b"x"]])
def test_a_serde_that_encodes_to_something_else(what: Any) -> None:
    class Odd(Toy):
        def encode(self, source: memoryview, layout: Any) -> Any:
            return what

    async def main() -> None:
        assert kinds(await Bench(DictStorage(), [Odd()]).store(1)) == ["serde"]

    run(main())


@pytest.mark.parametrize(("error", "kind"), [(SerdeError("bad"), "corrupt"), (ZeroDivisionError("bug"), "serde")])
def test_a_serde_that_cannot_decode(error: Exception, kind: str) -> None:
    async def main() -> None:
        bench = Bench(DictStorage(), [Raising("decode", error)])
        assert await bench.store(1) == [STORED]
        assert kinds(await bench.load(1)) == [kind]
        assert (key(1) in bench.storage.objects) == (kind == "serde")  # a bug may be mended
        assert bench.tier.breaker.closed

    run(main())


# -- storages that raise or lie ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "error", [StorageError("down"), ValueError("bug"), OSError(5, "io"), TimeoutError(), RuntimeError("x")], ids=repr
)
def test_a_storage_that_raises(storage: Any, error: Exception) -> None:
    def fail(method: str) -> None:
        raise error

    async def main() -> None:
        bench = Bench(storage(fail))
        assert await bench.tier.exists([key(1)]) == [False]
        assert kinds(await bench.store(1, 2)) == ["io", "io"]
        assert bench.tier.breaker.closed
        assert kinds(await bench.load(1)) == ["io"]
        assert not bench.tier.breaker.closed
        await bench.tier.delete([key(1)])
        assert kinds(await bench.load(1)) == ["tier_down"]
        assert (bench.count("load", "error"), bench.count("store", "error")) == (1, 2)

    run(main())


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(2), KeyboardInterrupt()], ids=repr)
def test_a_blocking_storage_that_raises_what_a_loop_cannot_bear(error: BaseException) -> None:
    def fail(method: str) -> None:
        raise error

    async def main() -> None:
        bench = Bench(DictStorage(fail))
        assert kinds(await bench.load(1)) == ["io"]
        assert kinds(await bench.store(1)) == ["io"]

    run(main())


def test_an_async_storage_that_cancels_itself() -> None:
    async def fail() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        bench = Bench(AsyncStorage(lambda method: fail()))
        assert kinds(await bench.load(1)) == ["io"]
        assert kinds(await bench.store(1)) == ["io"]

    run(main())


GARBAGE: list[Any] = [
    [STORED] * 3,
    [STORED],
    (Loaded(5000), Loaded(5000)),
    "no",
    7,
    [None, None],
    [True, True],
    [Stored, Loaded],
    {1: 2},
]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("answer", GARBAGE, ids=repr)
def test_a_storage_that_answers_nonsense(storage: Any, answer: Any) -> None:
    async def main() -> None:
        bench = Bench(storage(lambda method: answer))
        assert kinds(await bench.load(1, 2)) == ["io", "io"]
        assert kinds(await bench.store(1, 2)) == ["io", "io"]
        assert bench.count("load", "ok") == bench.count("store", "ok") == 0
        await bench.tier.delete([key(1)])

    run(main())


@pytest.mark.parametrize("nbytes", [0, -1, 17, HEADER_BYTES, HEADER_BYTES + NBYTES + 1, 1 << 70, None, "many"])
def test_a_storage_that_claims_to_have_loaded(nbytes: Any) -> None:
    async def main() -> None:
        bench = Bench(DictStorage())
        await bench.store(1)
        bench.storage.on_call = lambda method: [Loaded(nbytes)] if method == "load" else None
        assert not isinstance((await bench.load(1))[0], Loaded)

    run(main())


def test_a_storage_that_leaves_the_old_bytes_of_a_reused_buffer() -> None:
    """Buffers are used again: `Loaded` without a write must not pass off the object that was there before."""

    async def main() -> None:
        bench = Bench(DictStorage(), [Zip()])
        await bench.store(1, 2)
        assert kinds(await bench.load(1)) == ["Loaded"]
        size = len(bench.storage.objects[key(1)])
        bench.storage.on_call = lambda method: [Loaded(size)] if method == "load" else None
        assert kinds(await bench.load(1)) == ["corrupt"]

    run(main())


def test_a_storage_that_keeps_its_hands_on_a_buffer() -> None:
    """It may not, but when it does, that buffer is not used again."""
    held: list[PickleBuffer] = []

    class Clings(DictStorage):
        def load(self, items: Sequence[Item]) -> Any:
            held.append(PickleBuffer(items[0].buffers[1]))
            return super().load(items)

    async def main() -> None:
        bench = Bench(Clings(), [Zip()])
        await bench.store(1, 2, 3)
        for i in (1, 2, 3):
            assert kinds(await bench.load(i)) == ["Loaded"]
        for i, kept in zip((1, 2, 3), held, strict=True):
            body = bench.storage.objects[key(i)][HEADER_BYTES:]
            assert kept.raw()[: len(body)] == body

    run(main())


def test_too_large_for_the_storage() -> None:
    async def main() -> None:
        bench = Bench(DictStorage(), [Zip()])
        bench.storage.max_object_bytes = HEADER_BYTES + 100
        noise = memoryview(bytearray(b"".join(i.to_bytes(2, "little") for i in range(NBYTES // 2))))
        given = [Parcel(key(i), (p,), LAYOUT) for i, p in ((1, payload(1)), (2, noise), (3, payload(3)))]
        assert kinds((await bench.tier.store(given)).outcomes) == ["Stored", "too_large", "Stored"]
        assert set(bench.storage.objects) == {key(1), key(3)}

    run(main())


# -- the breaker -------------------------------------------------------------------------------------------------------


def test_the_breaker_opens_probes_and_closes() -> None:
    now, changes = [0.0], list[tuple[bool, str]]()
    breaker = Breaker(lambda closed, cause: changes.append((closed, cause)), clock=lambda: now[0])
    for _ in range(FAILURES - 1):
        breaker.failure("load", "a")
    breaker.success("load")
    for _ in range(FAILURES - 1):
        breaker.failure("load", "b")
    assert breaker.closed  # only failures in a row count
    assert not breaker.allow_probe()
    breaker.failure("load", "c")
    assert not breaker.closed
    assert changes == [(False, "c")]
    assert not breaker.allow_probe()
    breaker.failure("load", "under way when it opened")
    breaker.success("load")
    assert not breaker.closed
    now[0] += FIRST_PAUSE_S
    assert breaker.allow_probe()
    assert not breaker.allow_probe()  # one probe
    breaker.probed(False)
    now[0] += FIRST_PAUSE_S
    assert not breaker.allow_probe()  # the pause has doubled
    now[0] += FIRST_PAUSE_S
    for _ in range(20):
        assert breaker.allow_probe()
        breaker.probed(False)
        assert breaker.pause_s <= LONGEST_PAUSE_S
        now[0] += LONGEST_PAUSE_S
    assert breaker.allow_probe()
    breaker.probed(True)
    assert breaker.closed
    assert breaker.pause_s == 0
    assert changes == [(False, "c"), (True, "")]


def test_a_breaker_that_opens_again_soon_waits_longer() -> None:
    now = [0.0]
    breaker = Breaker(lambda closed, cause: None, clock=lambda: now[0])
    pauses = []
    for _ in range(4):  # its probes work, its work does not
        for _ in range(FAILURES):
            breaker.failure("load", "no")
        pauses.append(breaker.pause_s)
        now[0] += breaker.pause_s
        assert breaker.allow_probe()
        breaker.probed(True)
    assert pauses == [FIRST_PAUSE_S * 2**i for i in range(4)]
    now[0] += LONGEST_PAUSE_S
    for _ in range(FAILURES):
        breaker.failure("load", "no")
    assert breaker.pause_s == FIRST_PAUSE_S


def test_a_lost_probe_is_followed_by_another() -> None:
    now = [0.0]
    breaker = Breaker(lambda closed, cause: None, clock=lambda: now[0])
    for _ in range(FAILURES):
        breaker.failure("load", "no")
    for _ in range(3):
        now[0] += FIRST_PAUSE_S
        assert breaker.allow_probe()


def test_a_tier_that_is_too_slow_to_be_of_use_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bench = Bench(DictStorage(), useful_s=0.05)
        await bench.store(1)
        bench.storage.on_call = lambda method: time.sleep(0.1) if method == "load" else None
        for _ in range(FAILURES):
            assert kinds(await bench.load(1)) == ["Loaded"]
        assert not bench.tier.breaker.closed
        assert "a lookup waits 0.05 s" in caplog.text
        assert kinds(await bench.load(1)) == ["tier_down"]

    run(main())


def test_an_answer_that_comes_too_late_for_a_lookup_is_not_waited_for() -> None:
    async def main() -> None:
        bench = Bench(DictStorage(), useful_s=0.05)
        await bench.store(1)
        bench.storage.on_call = lambda method: time.sleep(0.3) if method == "exists" else None
        begun = time.monotonic()
        assert await bench.tier.exists([key(1)]) == [False]
        assert time.monotonic() - begun < 0.25
        assert bench.count("exists", "timeout") == 1

    run(main())


def test_a_tier_heals_by_itself() -> None:
    async def main() -> None:
        bench = Bench(DictStorage(lambda method: [Failed("down")] if method == "load" else None))
        bench.tier.breaker._clock = time.monotonic
        for _ in range(FAILURES):
            await bench.load(1)
        assert not bench.tier.breaker.closed
        deadline = time.monotonic() + 10 * FIRST_PAUSE_S
        while not bench.tier.breaker.closed and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert bench.tier.breaker.closed  # nobody asked it for anything
        assert "exists" in bench.storage.calls

    run(main())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["io", "timeout", "made_up"])
def test_batches_of_failures_open_it(storage: Any, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bench = Bench(storage())
        await bench.store(1)
        bench.storage.on_call = lambda method: [Failed("no", kind)] * 2
        for _ in range(FAILURES):
            assert kinds(await bench.load(1, 2)) == [kind, kind]
        assert kinds(await bench.load(1, 2)) == ["tier_down", "tier_down"]
        assert kinds(await bench.store(1, 2)) == ["tier_down", "tier_down"]
        calls = len(bench.storage.calls)
        assert await bench.tier.exists([key(1)]) == [False]
        assert len(bench.storage.calls) == calls  # left alone
        assert bench.metrics.values()['kvcore_tier_open{tier="t"}'] == 0
        assert [r.message for r in caplog.records if "left alone" in r.message] == [
            "tier t does not serve and is left alone for a while; requests go on without it (no)"
        ]
        assert bench.metrics.values()['kvcore_tier_opened_total{tier="t"}'] == 1
        bench.storage.on_call = None
        bench.now += FIRST_PAUSE_S
        assert await bench.tier.exists([key(1)]) == [False]  # no request is a probe
        await bench.tier.probe()
        assert await bench.tier.exists([key(1)]) == [True]
        assert bench.tier.breaker.closed
        assert bench.metrics.values()['kvcore_tier_open{tier="t"}'] == 1
        assert kinds(await bench.load(1)) == ["Loaded"]
        assert len([r for r in caplog.records if "is used again" in r.message]) == 1

    run(main())


@pytest.mark.parametrize("kind", ["full", "read_only", "too_large"])
def test_a_storage_that_says_no_is_not_down(kind: str) -> None:
    async def main() -> None:
        bench = Bench(DictStorage(lambda method: [Failed("no", kind)] if method == "store" else None))
        for _ in range(FAILURES + 1):
            assert kinds(await bench.store(1)) == [kind]
        assert bench.tier.breaker.closed

    run(main())


def test_one_success_in_a_batch_is_an_answer() -> None:
    async def main() -> None:
        bench = Bench(DictStorage(lambda method: [Failed("no"), MISSING] if method == "load" else None))
        for _ in range(FAILURES + 1):
            assert kinds(await bench.load(1, 2)) == ["io", "Missing"]
        assert bench.tier.breaker.closed

    run(main())


def test_a_probe_that_fails_keeps_it_open() -> None:
    async def main() -> None:
        bench = Bench(DictStorage(lambda method: [Failed("down")] if method == "load" else None))
        for _ in range(FAILURES):
            await bench.load(1)
        bench.storage.ping = lambda: 1 / 0
        bench.now += FIRST_PAUSE_S
        await bench.tier.probe()
        assert not bench.tier.breaker.closed
        del bench.storage.ping
        bench.now += 2 * FIRST_PAUSE_S
        await bench.tier.probe()
        assert bench.tier.breaker.closed

    run(main())


@pytest.mark.parametrize("side", ["encode", "decode"])
def test_a_serde_that_hangs_is_left_behind_at_the_deadline(side: str) -> None:
    async def main() -> None:
        let_go = threading.Event()
        serde = Zip()
        bench = Bench(DictStorage(), [serde], timeout_s=TIMEOUT_S)
        await bench.store(1)
        real = getattr(serde, side)
        setattr(serde, side, lambda *args: (let_go.wait(20), real(*args))[1])
        moved = [Parcel(key(2 if side == "encode" else 1), (memoryview(bytearray(payload(1))),), LAYOUT)]
        begun = time.monotonic()
        done: Any = await (bench.tier.store(moved) if side == "encode" else bench.tier.load(moved))
        assert time.monotonic() - begun < 20 * TIMEOUT_S
        assert kinds(done.outcomes) == ["timeout"]
        assert done.settled is not None
        assert not done.settled.done()  # the memory is not free yet
        let_go.set()
        await asyncio.wait([done.settled], timeout=5)
        assert done.settled.done()

    run(main())


def test_those_who_wait_for_a_slow_storage_are_let_go_when_it_is_found_down() -> None:
    async def main() -> None:
        gate = Gate("load")
        bench = Bench(DictStorage(gate), timeout_s=TIMEOUT_S)  # two calls at once
        begun = time.monotonic()
        wanted = [Parcel(key(i), (payload(i),), LAYOUT) for i in range(40)]
        outcomes = await asyncio.gather(*(bench.tier.load([one]) for one in wanted))
        took = time.monotonic() - begun
        assert took < 10 * TIMEOUT_S, "they queued for one deadline each"
        told = [kinds(o.outcomes)[0] for o in outcomes]
        assert told.count("timeout") <= FAILURES + 1
        assert told.count("tier_down") >= 40 - FAILURES - 1
        gate.open.set()
        await asyncio.wait([o.settled for o in outcomes if o.settled])

    run(main())


# -- storages that hang ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAINS[:2], ids=len)
def test_a_blocking_load_that_hangs(chain: list[Serde]) -> None:
    async def main() -> None:
        bench = Bench(DictStorage(), chain, timeout_s=TIMEOUT_S)
        await bench.store(*range(8))
        gate = bench.storage.on_call = Gate("load")
        into = memoryview(bytearray(NBYTES))
        begun = time.monotonic()
        loads = await bench.tier.load([Parcel(key(1), (into,), LAYOUT)])
        assert TIMEOUT_S * 0.9 < time.monotonic() - begun < 20 * TIMEOUT_S
        assert kinds(loads.outcomes) == ["timeout"]
        assert bench.count("load", "timeout") == 1
        if chain:
            assert loads.settled is None  # what comes late lands in a staging buffer
        else:
            assert loads.settled is not None
            assert not loads.settled.done()
        # Others go on meanwhile, on other threads and in other buffers.
        bench.storage.on_call = None
        for i in range(2, 8):
            assert kinds(await bench.load(i)) == ["Loaded"]
        assert bench.tier.stuck_s is not None
        gate.open.set()
        await asyncio.wait_for(until(lambda: bench.tier.stuck_s is None), 5)
        for i in range(2, 8):
            assert kinds(await bench.load(i)) == ["Loaded"]
        if loads.settled is None:
            assert into == bytes(NBYTES)
        else:  # the late write went into its own payload, before `settled` ended
            await asyncio.wait_for(asyncio.wait((loads.settled,)), 5)
            assert into == payload(1)

    run(main())


def test_while_a_load_hangs_the_next_are_not_lent_their_memory() -> None:
    """Who has to wait until a storage lets go waits for the first call that hangs, and for none that begins later."""

    async def main() -> None:
        gate = Gate("load")
        bench = Bench(DictStorage(), timeout_s=TIMEOUT_S)
        await bench.store(1, 2)
        bench.storage.on_call = gate
        into = [memoryview(bytearray(NBYTES)) for _ in range(2)]
        first = await bench.tier.load([Parcel(key(1), (into[0],), LAYOUT)])
        second = await bench.tier.load([Parcel(key(2), (into[1],), LAYOUT)])
        assert first.settled is not None
        assert second.settled is None
        gate.open.set()
        await asyncio.wait((first.settled,))
        await asyncio.wait_for(until(lambda: bench.tier.stuck_s is None), 5)
        assert into == [payload(1), bytes(NBYTES)]
        third = await bench.tier.load([Parcel(key(2), (into[1],), LAYOUT)])
        assert kinds(third.outcomes) == ["Loaded"]

    run(main())


@pytest.mark.parametrize("chain", CHAINS[:2], ids=len)
def test_a_blocking_store_that_hangs(chain: list[Serde]) -> None:
    """Its buffers stay what they were until it returns, whatever is stored meanwhile."""

    async def main() -> None:
        gate = Gate("store")
        bench = Bench(DictStorage(gate), chain, timeout_s=TIMEOUT_S)
        given = payload(1)
        stores = await bench.tier.store([Parcel(key(1), (given,), LAYOUT)])
        assert kinds(stores.outcomes) == ["timeout"]
        assert stores.settled is not None
        bench.storage.on_call = None
        for i in range(2, 8):
            assert await bench.store(i) == [STORED]
        assert not stores.settled.done()
        assert key(1) not in bench.storage.objects
        gate.open.set()
        await asyncio.wait((stores.settled,))
        assert kinds(await bench.load(*range(1, 8))) == ["Loaded"] * 7

    run(main())


def test_a_call_that_never_got_a_thread_lets_go_at_once() -> None:
    async def main() -> None:
        gate = Gate("exists")
        bench = Bench(DictStorage(gate), timeout_s=TIMEOUT_S)
        bench.tier.breaker.failure = lambda op, cause: None  # not what this is about
        hung = [asyncio.ensure_future(bench.tier.exists([key(i)])) for i in range(2)]
        await until(lambda: gate.inside == 2)
        waiting = asyncio.ensure_future(bench.tier._calls._call(bench.storage.load, []))
        bench.tier._calls._timeout_s = TIMEOUT_S / 3
        late = await bench.tier.load([Parcel(key(1), (payload(1),), LAYOUT)])
        assert kinds(late.outcomes) == ["timeout"]
        assert late.settled is None
        waiting.cancel()
        gate.open.set()
        await asyncio.gather(*hung, waiting, return_exceptions=True)
        assert "load" not in bench.storage.calls or bench.storage.calls.count("load") <= 1

    run(main())


def test_an_async_load_that_hangs_is_cancelled() -> None:
    async def main() -> None:
        ended = []

        async def hang() -> None:
            try:
                await asyncio.sleep(30)
            finally:
                ended.append(True)

        bench = Bench(AsyncStorage(lambda method: hang()), timeout_s=TIMEOUT_S)
        assert kinds(await bench.load(1)) == ["timeout"]  # settled is None: it no longer touches the buffers
        assert ended == [True]
        assert kinds(await bench.store(1)) == ["timeout"]
        assert await bench.tier.exists([key(1)]) == [False]

    run(main())


def test_an_async_load_that_will_not_be_cancelled() -> None:
    async def main() -> None:
        let_go = asyncio.Event()

        async def stubborn() -> None:
            while not let_go.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait_for(let_go.wait(), 5)

        bench = Bench(AsyncStorage(), timeout_s=TIMEOUT_S)
        await bench.store(1, 2)
        bench.storage.on_call = lambda method: stubborn()
        into = memoryview(bytearray(NBYTES))
        begun = time.monotonic()
        loads = await bench.tier.load([Parcel(key(1), (into,), LAYOUT)])
        assert time.monotonic() - begun < TIMEOUT_S + 2
        assert kinds(loads.outcomes) == ["timeout"]
        assert loads.settled is None
        assert bench.tier.stuck_s is not None
        bench.storage.on_call = None
        assert kinds(await bench.load(2)) == ["Loaded"]
        let_go.set()
        await asyncio.wait_for(until(lambda: bench.tier.stuck_s is None), 10)
        assert into == bytes(NBYTES)  # what comes late lands in a staging buffer, never in the slot

    run(main())


def test_an_async_load_on_a_thread_never_writes_into_the_slot_after_the_deadline() -> None:
    async def main() -> None:
        let_go = threading.Event()

        class OnThreads(AsyncStorage):
            async def load(self, items: Any) -> Any:
                def late() -> None:
                    let_go.wait(10)
                    for item in items:
                        for buffer in item.buffers:
                            buffer[:] = b"\xff" * len(buffer)

                await asyncio.to_thread(late)
                return []

        bench = Bench(OnThreads(), timeout_s=TIMEOUT_S)
        into = memoryview(bytearray(NBYTES))
        assert kinds((await bench.tier.load([Parcel(key(1), (into,), LAYOUT)])).outcomes) == ["timeout"]
        let_go.set()
        await asyncio.sleep(0.3)
        assert into == bytes(NBYTES)

    run(main())


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_an_async_storage_that_ends_the_process_is_a_failed_call(end: type[BaseException]) -> None:
    async def main() -> None:
        async def leave() -> None:
            raise end

        bench = Bench(AsyncStorage(lambda method: leave()), timeout_s=TIMEOUT_S)
        assert kinds(await bench.load(1)) == ["io"]

    with contextlib.suppress(end):  # asyncio also hands it to whoever runs the loop; kvcore's own goes on
        run(main())


def test_exhaustion_and_recovery() -> None:
    async def main() -> None:
        gate = Gate("load", "exists")
        bench = Bench(DictStorage(gate), timeout_s=TIMEOUT_S)
        bench.tier.breaker.failure = lambda op, cause: None  # or it would spare the storage
        loads = [await bench.tier.load([Parcel(key(i), (payload(i),), LAYOUT)]) for i in range(MAX_STUCK)]
        assert [each.settled is not None for each in loads] == [True] + [False] * (MAX_STUCK - 1)
        begun = time.monotonic()
        refused = await bench.tier.load([Parcel(key(1), (payload(1),), LAYOUT)])
        assert time.monotonic() - begun < TIMEOUT_S  # at once
        assert kinds(refused.outcomes) == ["timeout"]
        assert f"{MAX_STUCK} calls hang" in refused.outcomes[0].reason
        assert refused.settled is None
        assert await bench.tier.exists([key(1)]) == [False]
        gate.open.set()
        await asyncio.wait_for(until(lambda: bench.tier.stuck_s is None), 10)
        assert await bench.store(1) == [STORED]
        assert kinds(await bench.load(1)) == ["Loaded"]

    run(main())


# -- the caller's memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAINS[:2], ids=len)
def test_a_lease_that_ended_before_the_checksum_stores_nothing(chain: list[Serde]) -> None:
    async def main() -> None:
        bench = Bench(DictStorage(), chain)
        assert kinds(await bench.store(1, 2, held=lambda: False)) == ["lease_expired"] * 2
        assert bench.storage.calls == []
        assert await bench.store(1, held=lambda: True) == [STORED]

    run(main())


def test_a_payload_that_changes_while_it_is_written_is_found_out() -> None:
    """What happens when a lease ends in the middle of a slow write: the frame is a miss, never another's bytes."""

    async def main() -> None:
        given = payload(1)

        def overwrite(method: str) -> None:
            if method == "store":
                given[:] = payload(2)

        bench = Bench(DictStorage(overwrite))
        await bench.tier.store([Parcel(key(1), (given,), LAYOUT)])
        assert kinds(await bench.load(1)) == ["corrupt"]

    run(main())


# -- opening and closing -----------------------------------------------------------------------------------------------


def test_open_raises_and_close_does_not(caplog: pytest.LogCaptureFixture) -> None:
    class Shut(DictStorage):
        def open(self) -> None:
            raise StorageError("the door is locked")

        def close(self) -> None:
            raise OSError("and jammed")

        def ping(self) -> None:
            raise StorageError("nobody answers")

        def usage(self) -> Any:
            raise StorageError("nobody counts")

    async def main() -> None:
        bench = Bench(Shut())
        with pytest.raises(StorageError, match="the door is locked"):
            await bench.tier.open()
        with pytest.raises(StorageError, match="nobody answers"):
            await bench.tier.ping()
        assert await bench.tier.usage() is None
        await bench.tier.close()
        assert "tier t: close failed: and jammed" in [r.message for r in caplog.records if r.levelno == logging.WARNING]

    run(main())


def test_a_storage_whose_open_was_never_called_is_not_closed(caplog: pytest.LogCaptureFixture) -> None:
    class Blind(DictStorage):
        list = BlockingStorage.list

        def close(self) -> None:
            raise AttributeError("_db")

    async def main() -> None:
        bench = Bench(Blind(), capacity=Capacity(1 << 20, LruPolicy(None, None)))
        with pytest.raises(StorageError, match="cannot list what it holds"):
            await bench.tier.open()
        await bench.tier.close()
        assert not caplog.records

    run(main())


@pytest.mark.parametrize("storage", STORAGES)
def test_close_during_traffic(storage: Any) -> None:
    async def main() -> None:
        bench = Bench(storage(), [Zip()], timeout_s=1)
        await bench.store(*range(10))
        loads = [asyncio.ensure_future(bench.load(i % 10)) for i in range(60)]
        stores = [asyncio.ensure_future(bench.store(i)) for i in range(20, 50)]
        await asyncio.sleep(0.002)
        await bench.tier.close()
        bench.threads.close()
        for outcome in await asyncio.gather(*loads, *stores):
            assert isinstance(outcome[0], Loaded | Stored | Failed)

    run(main())


def test_close_while_a_call_hangs() -> None:
    async def main() -> None:
        gate = Gate("load")
        bench = Bench(DictStorage(gate), timeout_s=TIMEOUT_S)
        loads = await bench.tier.load([Parcel(key(1), (payload(1),), LAYOUT)])
        begun = time.monotonic()
        await bench.tier.close()
        assert time.monotonic() - begun < 20 * TIMEOUT_S
        assert bench.storage.closed
        gate.open.set()
        await asyncio.wait((loads.settled,))

    run(main())


def test_close_comes_to_a_storage_whose_threads_all_hang() -> None:
    """Before their deadline, which may be far: `close` may be what ends them."""

    class Waiting(DictStorage):
        def __init__(self) -> None:
            super().__init__()
            self.over, self.saw = threading.Event(), list[bool]()

        def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
            self.saw.append(self.over.wait(5))
            return super().load(items)

        def close(self) -> None:
            self.over.set()
            super().close()

    async def main() -> None:
        bench = Bench(Waiting(), timeout_s=30)
        await bench.store(*range(8))
        loads = [asyncio.ensure_future(bench.load(i)) for i in range(2 * bench.tier.concurrency)]
        await until(lambda: bench.tier._calls._threads._idle == 0)
        await bench.tier.close()
        await asyncio.gather(*loads)
        assert all(bench.storage.saw)

    run(main())


def test_an_open_that_is_cancelled_late_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.l2.calls.OPEN_S", 0.05)
    monkeypatch.setattr("kvcore.l2.calls.CANCEL_S", 0.01)
    monkeypatch.setattr("kvcore.l2.tier.START_S", 0.1)

    class Stubborn(AsyncStorage):
        def __init__(self) -> None:
            super().__init__()
            self.opens, self.let_go = 0, asyncio.Event()

        async def open(self) -> None:
            self.opens += 1
            if self.opens == 1:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    await self.let_go.wait()
                    raise

    async def main() -> None:
        bench = Bench(Stubborn(), timeout_s=0.01)
        await bench.tier.open()
        assert not bench.tier.usable
        bench.tier._timeout_s = 30.0  # the probe waits for the open that is under way
        bench.now += 1000
        probe = asyncio.ensure_future(bench.tier.probe())
        await asyncio.sleep(0)
        bench.storage.let_go.set()
        await probe
        assert "still being opened" in bench.tier.breaker.cause
        bench.now += 1000
        await bench.tier.probe()
        assert bench.tier.usable
        assert bench.storage.opens == 2
        await bench.tier.close()

    run(main())


SCRIPT = """
import asyncio, threading
from toys import DictStorage, LAYOUT, key, payload
from kvcore.l2 import Codec, Threads, Tier, Parcel
from kvcore.observe import Metrics

async def main():
    storage = DictStorage(lambda method: threading.Event().wait())
    tier = Tier("t", storage, Codec([], {}.get), threads=Threads("c", 1), timeout_s=0.1, metrics=Metrics())
    for i in range(5):
        loads = await tier.load([Parcel(key(i), (payload(i),), LAYOUT)])
    await tier.close()

asyncio.run(main())
print("end of main", flush=True)
"""


def test_a_hung_storage_does_not_keep_the_process_from_exiting(request: pytest.FixtureRequest) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, cwd=request.path.parent, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "end of main\n"), ended.stderr
