"""A storage that fails on purpose, around any other one: `plugin: faulty` in YAML, `faulty(storage, ...)` in tests.

storage = faulty(MemoryStorage(MemoryConfig(), context()), Faults(error_rate=0.1, seed=7))
storage.faults = Faults()  # it has recovered
"""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from hashlib import blake2b
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvcore.api import (
    MISSING,
    ApiVersion,
    BlockingStorage,
    Component,
    Failed,
    Item,
    Loaded,
    LoadOutcome,
    ObjectKey,
    Storage,
    StorageError,
    StoreOutcome,
    hookimpl,
)
from kvcore.api.storage import StorageTraits

if TYPE_CHECKING:
    from kvcore.testing.fault_config import Faults

T = TypeVar("T")
_TRAITS = tuple(StorageTraits.__annotations__)
_FATES = {"load": ("fail", "lost", "flip"), "store": ("fail", "torn")}


@hookimpl
def kvcore_storage() -> Component:
    """The `faulty` storage."""
    from kvcore.testing.fault_config import FaultyConfig

    return Component(api=ApiVersion(1, 0), config=FaultyConfig, factory=_from_config)


def _from_config(config: Any, context: Any) -> Any:
    return faulty(context.make_storage(config.storage), config)


def faulty(storage: Storage | BlockingStorage, faults: "Faults") -> "FaultyStorage | FaultyBlockingStorage":
    """`storage` with faults: of the same kind, with the same traits. Its `faults` may be replaced at any time."""
    return FaultyStorage(storage, faults) if isinstance(storage, Storage) else FaultyBlockingStorage(storage, faults)


class _Call(NamedTuple):
    """What happens to one call: how many seconds it waits, how it fails, whether the store crashes in its midst."""

    delay_s: float = 0.0
    error: StorageError | None = None
    crashes: bool = False


class _Fate(NamedTuple):
    """What happens to one object: a word of `_FATES` or nothing, and how far into it (0 to below 1)."""

    what: str
    where: float


class FaultyStorage(Storage):
    """Made by `faulty`. `inner` may be of either kind; a coroutine here waits for nothing but `inner` and `pause`."""

    def __init__(self, inner: Any, faults: "Faults", pause: "Callable[[float], Any] | None" = None) -> None:
        self.inner = inner
        self.faults = faults
        self._pause = pause or _sleep
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._objects: Counter[tuple[str, ObjectKey]] = Counter()
        for trait in _TRAITS:
            setattr(self, trait, getattr(inner, trait))

    async def open(self) -> None:
        """See `Storage.open`."""
        await _done(self.inner.open())

    async def close(self) -> None:
        """See `Storage.close`."""
        await _done(self.inner.close())

    async def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `Storage.exists`."""
        await self._undergo(self._next("exists"))
        found: list[bool] = await _done(self.inner.exists(keys))
        return found

    async def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        """See `Storage.load`."""
        await self._undergo(self._next("load"))
        fates = self._fates("load", items)
        if lost := [item.key for item, fate in zip(items, fates, strict=True) if fate.what == "lost"]:
            await _done(self.inner.delete(lost))
        asked = [item for item, fate in zip(items, fates, strict=True) if fate.what in ("", "flip")]
        answers = iter(await _done(self.inner.load(asked)) if asked else ())
        outcomes: list[LoadOutcome] = []
        for item, fate in zip(items, fates, strict=True):
            if fate.what == "fail":
                outcomes.append(Failed("injected: the object cannot be read"))
            elif fate.what == "lost":
                outcomes.append(MISSING)
            else:
                outcomes.append(next(answers))
                if fate.what == "flip" and isinstance(outcomes[-1], Loaded) and outcomes[-1].nbytes:
                    _flip(item.buffers, int(fate.where * outcomes[-1].nbytes * 8))
        return outcomes

    async def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        """See `Storage.store`."""
        call = self._next("store")
        if call.crashes:
            *whole, last = items[: len(items) // 2 + 1]
            await _done(self.inner.store([*whole, _front(last, 0.5)]))
        await self._undergo(call)
        fates = self._fates("store", items)
        offered = [
            _front(item, fate.where) if fate.what == "torn" else item
            for item, fate in zip(items, fates, strict=True)
            if fate.what != "fail"
        ]
        answers = iter(await _done(self.inner.store(offered)) if offered else ())
        return [Failed("injected: the object cannot be written") if f.what == "fail" else next(answers) for f in fates]

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See `Storage.delete`."""
        await self._undergo(self._next("delete"))
        await _done(self.inner.delete(keys))

    async def list(self) -> Any:
        """See `Storage.list`."""
        return await _done(self.inner.list())

    async def usage(self) -> Any:
        """See `Storage.usage`."""
        return await _done(self.inner.usage())

    async def ping(self) -> None:
        """See `Storage.ping`. Fails once the store has crashed."""
        await self._undergo(self._next("ping"))
        await _done(self.inner.ping())

    def register_memory(self, memory: memoryview) -> None:
        """See `Storage.register_memory`."""
        self.inner.register_memory(memory)

    def _next(self, operation: str) -> _Call:
        """What happens to the next call of `operation`."""
        faults = self.faults
        touched = operation in faults.operations
        with self._lock:
            before = self._calls.total()
            self._calls[operation] += touched
            count = self._calls[operation]
        if faults.crash_after is not None and before >= faults.crash_after:
            crashes = touched and before == faults.crash_after
            return _Call(error=StorageError("injected: the store has crashed"), crashes=crashes)
        if not touched:
            return _Call()
        if self._roll("hang", operation, count) < faults.hang_rate:
            return _Call(math.inf, StorageError(f"injected: {operation} number {count} hung"))
        fails = self._roll("error", operation, count) < faults.error_rate
        return _Call(faults.latency, StorageError(f"injected: {operation} number {count} failed") if fails else None)

    async def _undergo(self, call: _Call) -> None:
        if call.delay_s:
            await self._pause(call.delay_s)
        if call.error is not None:
            raise call.error

    def _fates(self, operation: str, items: Sequence[Item]) -> Sequence[_Fate]:
        faults, fates = self.faults, []
        possible = _FATES[operation] if operation in faults.operations else ()
        for key, _ in items:
            with self._lock:
                self._objects[operation, key] += 1
                count = self._objects[operation, key]
            which = (operation, key.name, count)
            what = next((f for f in possible if self._roll(f, *which) < getattr(faults, f"{f}_rate")), "")
            fates.append(_Fate(what, self._roll("where", *which)))
        return fates

    def _roll(self, *what: object) -> float:
        """A number from 0 to below 1 that depends on the seed and `what` alone, whichever thread asks first."""
        digest = blake2b(repr((self.faults.seed, *what)).encode(), digest_size=6).digest()
        return int.from_bytes(digest) / (1 << 48)


class FaultyBlockingStorage(BlockingStorage):
    """Made by `faulty`: a `FaultyStorage` around a blocking one, whose coroutines never suspend."""

    def __init__(self, inner: BlockingStorage, faults: "Faults") -> None:
        self._over = threading.Event()
        self._begun = threading.local()
        self._faulty = FaultyStorage(inner, faults, self._wait)
        self.inner = inner
        for trait in _TRAITS:
            setattr(self, trait, getattr(inner, trait))

    @property
    def faults(self) -> "Faults":
        """What goes wrong from now on. When it is replaced, calls that wait or hang end."""
        return self._faulty.faults

    @faults.setter
    def faults(self, faults: "Faults") -> None:
        self._faulty.faults = faults
        self._over.set()
        self._over = threading.Event()

    def open(self) -> None:
        """See `Storage.open`."""
        self.inner.open()

    def close(self) -> None:
        """See `Storage.close`. Calls that wait or hang end."""
        self._over.set()
        self.inner.close()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `Storage.exists`."""
        return self._run(self._faulty.exists(keys))

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        """See `Storage.load`."""
        return self._run(self._faulty.load(items))

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        """See `Storage.store`."""
        return self._run(self._faulty.store(items))

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See `Storage.delete`."""
        self._run(self._faulty.delete(keys))

    def list(self) -> Any:
        """See `Storage.list`."""
        return self.inner.list()

    def usage(self) -> Any:
        """See `Storage.usage`."""
        return self.inner.usage()

    def ping(self) -> None:
        """See `Storage.ping`. Fails once the store has crashed."""
        self._run(self._faulty.ping())

    def register_memory(self, memory: memoryview) -> None:
        """See `Storage.register_memory`."""
        self.inner.register_memory(memory)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        self._begun.over = self._over  # as it is before the call looks at the faults, which may be replaced then
        return _result(call)

    async def _wait(self, seconds: float) -> None:
        self._begun.over.wait(None if seconds == math.inf else seconds)


async def _sleep(seconds: float) -> None:
    if seconds == math.inf:
        await asyncio.get_running_loop().create_future()  # until it is cancelled
    await asyncio.sleep(seconds)


async def _done(answer: Any) -> Any:
    """What a method returned, of either kind of storage."""
    return await answer if isawaitable(answer) else answer


def _result(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a blocking storage was awaited")


def _front(item: Item, share: float) -> Item:
    """The first `share` of an object, at least a byte of it."""
    room, buffers = max(1, int(share * item.nbytes)), []
    for buffer in item.buffers:
        buffers.append(buffer[:room])
        room -= len(buffers[-1])
    return Item(item.key, buffers)


def _flip(buffers: Sequence[memoryview], bit: int) -> None:
    byte = bit // 8
    for buffer in buffers:
        if byte < len(buffer):
            buffer[byte] ^= 1 << bit % 8
            return
        byte -= len(buffer)
