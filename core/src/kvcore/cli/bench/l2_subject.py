"""One tier under measurement: throw-away objects of a namespace of their own, stored, asked for and loaded."""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from kvcore.api import KVCoreError, Loaded, ObjectKey, ObjectLayout, StorageError, Stored
from kvcore.api.keys import NAMESPACE_BYTES
from kvcore.cli.bench.machine import available_bytes
from kvcore.cli.store.opened import PATIENCE_S, opened
from kvcore.config import TierConfig
from kvcore.l1 import Arena
from kvcore.l2 import HEADER_BYTES, Codec, Threads, Tier, Transfer
from kvcore.l2.frames import Frames
from kvcore.observe import Metrics
from kvcore.plugins import Registry

NAMESPACE = b"kvcore.bench"
"""How every namespace of throw-away objects begins: `kvcore store ls` shows what a killed run has left."""
OPERATIONS = ("store", "exists", "load")
T = TypeVar("T")


class Load(NamedTuple):
    """How much to move: bytes of a round, objects of a round at most, objects one at a time at most."""

    nbytes: int
    objects: int
    singles: int


class Subject:
    """An opened tier. `measured` gives samplers for objects of one size; `close` deletes everything that they stored.

    Args:
        runner: its loop runs the tier; Ctrl-C in it leaves calls under way, which `close` waits for.
    """

    def __init__(self, runner: asyncio.Runner, config: TierConfig, registry: Registry, load: Load) -> None:
        self.name = config.name
        self.namespace = NAMESPACE + secrets.token_bytes(NAMESPACE_BYTES - len(NAMESPACE))
        self._runner = runner
        self._load = load
        self._stack = AsyncExitStack()
        self._flying: set[asyncio.Task[Any]] = set()
        self._stored: set[ObjectKey] = set()
        self._arena: Arena | None = None
        self._threads = Threads("bench-codec", 2)
        made = opened(config, registry, passive=False, for_own_use=True)
        self.frames: Frames = runner.run(self._stack.enter_async_context(made))
        self.storage = self.frames.storage
        chain = [serde for serde in (registry.create("serde", s) for s in config.serde) if serde.tag != "raw/1"]
        self.metrics = Metrics()
        self._tiers = [
            Tier(
                config.name,
                self.storage,
                Codec(serdes, lambda tag: None),
                threads=self._threads,
                timeout_s=max(PATIENCE_S, config.timeout),
                metrics=self.metrics,
            )
            for serdes in ([[], chain] if chain else [[]])
        ]

    @property
    def chains(self) -> Sequence[Tier]:
        """The tier without its serdes, and with them where it has any."""
        return self._tiers

    def objects_of(self, sizes: Sequence[int]) -> dict[int, int]:
        """How many objects of each size fit; makes room in memory for them. 0: not one. Raises `StorageError` when the
        tier does not answer: some open without their server."""
        self._runner.run(self.frames.ping())
        usage = self._runner.run(self.frames.usage())
        room = available_bytes() // 8
        if usage is not None and usage.capacity_bytes is not None:
            room = min(room, usage.capacity_bytes // 4)  # the rest may be somebody's cache
        limit = self.storage.max_object_bytes
        found = {}
        for size in sizes:
            fits = limit is None or size + HEADER_BYTES <= limit
            wanted = max(4, min(self._load.objects, self._load.nbytes // size))
            found[size] = min(wanted, room // _stride(size)) if fits else 0
        most = max(_stride(size) * count for size, count in found.items())
        if most:
            self._arena = Arena(2 * most)
            self._arena.prefault()
            self._tiers[0].register_memory(self._arena.buffer)
        return found

    @contextmanager
    def measured(self, tier: Tier, size: int, count: int, *, warm_up: bool) -> Iterator["Rounds"]:
        """Samplers for `count` objects of `size` bytes. `warm_up`: the first round does not count."""
        assert self._arena is not None
        stride = _stride(size)
        views = [self._arena.buffer[at : at + size] for at in range(0, 2 * count * stride, stride)]
        _fill(views[:count])
        singles = max(1, min(count, self._load.singles, self._load.nbytes // 4 // size))
        rounds = Rounds(self, tier, views[:count], views[count:], singles, int(warm_up))
        try:
            yield rounds
        finally:
            self._runner.run(self._landed())
            for view in views:
                with suppress(BufferError):  # a storage that hung may still hold it
                    view.release()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the tier's loop. Raises `KeyboardInterrupt` after Ctrl-C."""
        return self._runner.run(coroutine)

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """A call that goes on when its caller is cancelled: what it stores must be known when it is deleted."""
        task = asyncio.ensure_future(coroutine)
        self._flying.add(task)
        task.add_done_callback(self._flying.discard)
        return await asyncio.shield(task)

    def keys(self, count: int) -> list[ObjectKey]:
        """New keys; what is stored under them is deleted in the end."""
        keys = [ObjectKey(self.namespace, secrets.token_bytes(32)) for _ in range(count)]
        self._stored.update(keys)
        return keys

    async def _landed(self) -> None:
        """Wait for the calls that an interruption or a failure has left under way: each has its deadline."""
        if self._flying:
            await asyncio.wait(self._flying)

    async def forget(self) -> None:
        """Delete what was stored so far. Raises `StorageError` when it cannot be."""
        await self._landed()
        keys = list(self._stored)
        for at in range(0, len(keys), 250):
            kept = await self.frames.delete(keys[at : at + 250])
            self._stored.difference_update(keys[at : at + 250])
            self._stored.update(kept)
        if self._stored:
            raise StorageError(f"tier {self.name}: {len(self._stored)} objects are still there")

    def close(self) -> str | None:
        """Delete everything and close; what went wrong, with the next step."""
        try:
            self._runner.run(self.forget())
            return None
        except KVCoreError as error:
            remedy = f"kvcore store rm --tier {self.name} --namespace {self.namespace.hex()}"
            return f"{error}: throw-away objects are left; delete them with: {remedy}"
        finally:
            self._runner.run(self._stack.aclose())
            self._threads.close()
            if self._arena is not None:
                self._arena.close()


class Rounds:
    """Samplers for objects of one size. A sample of `store` begins a round; the others use what it has stored."""

    def __init__(
        self,
        subject: Subject,
        tier: Tier,
        source: Sequence[memoryview],
        target: Sequence[memoryview],
        singles: int,
        warm_ups: int,
    ) -> None:
        self._subject = subject
        self._tier = tier
        self._layout = ObjectLayout(1, 1, (len(source[0]),), "bfloat16", 2)
        self._source, self._target = source, target
        self._singles = singles
        self._warm_ups = warm_ups
        self._encoded = self._serde_bytes()
        self._nbytes = sum(map(len, source))
        self._keys: list[ObjectKey] = []
        self._single_keys: list[ObjectKey] = []
        self.seconds: dict[str, list[float]] = {op: [] for op in OPERATIONS}
        """How long each single call took."""

    def store(self) -> float:
        """GB/s of new objects."""
        return self._subject.run(self._store())

    def exists(self) -> float:
        """Microseconds per object, all asked for in one call."""
        return self._subject.run(self._exists())

    def load(self) -> float:
        """GB/s."""
        return self._subject.run(self._load())

    def percentile(self, op: str, percent: int) -> float:
        """In microseconds, of the single calls so far."""
        taken = sorted(self.seconds[op])
        return taken[max(0, math.ceil(len(taken) * percent / 100) - 1)] * 1e6

    def ratio(self) -> float:
        """Bytes into the serdes divided by bytes out of them."""
        now, before = self._serde_bytes(), self._encoded
        return (now["in"] - before["in"]) / (now["out"] - before["out"])

    def _serde_bytes(self) -> dict[str, float]:
        counted, name = self._subject.metrics.values(), self._tier.name
        return {s: counted.get(f'kvcore_serde_bytes_total{{tier="{name}",side="{s}"}}', 0.0) for s in ("in", "out")}

    async def _store(self) -> float:
        await self._subject.forget()
        if self._warm_ups == 0:
            self.seconds = {op: [] for op in OPERATIONS}
        self._warm_ups -= 1
        self._keys = self._subject.keys(len(self._source))
        self._single_keys = self._subject.keys(self._singles)
        seconds = await self._batches(self._transfers(self._keys, self._source), self._tier.store, Stored)
        for transfer in self._transfers(self._single_keys, self._source):
            await self._one("store", self._tier.store, [transfer], Stored)
        return self._nbytes / seconds / 1e9

    async def _exists(self) -> float:
        begun = time.perf_counter()
        there = await self._subject.call(self._tier.exists(self._keys))
        seconds = time.perf_counter() - begun
        for key in self._single_keys:
            single = time.perf_counter()
            there += await self._subject.call(self._tier.exists([key]))
            self.seconds["exists"].append(time.perf_counter() - single)
        if not all(there):
            raise StorageError(f"{there.count(False)} of {len(there)} objects just stored are not there")
        return seconds / len(self._keys) * 1e6

    async def _load(self) -> float:
        seconds = await self._batches(self._transfers(self._keys, self._target), self._tier.load, Loaded)
        for transfer in self._transfers(self._single_keys, self._target):
            await self._one("load", self._tier.load, [transfer], Loaded)
        if self._tier.codec.plain and any(s != t for s, t in zip(self._source, self._target, strict=True)):
            raise StorageError("objects came back changed")
        return self._nbytes / seconds / 1e9

    def _transfers(self, keys: Sequence[ObjectKey], views: Sequence[memoryview]) -> list[Transfer]:
        return [Transfer(key, view, self._layout) for key, view in zip(keys, views, strict=False)]

    async def _batches(self, transfers: Sequence[Transfer], call: Callable[..., Any], wanted: type[Any]) -> float:
        """Seconds of all, in batches as the controllers cut them and as many at once as the storage likes."""
        size = self._tier.batch_size(len(transfers), len(transfers[0].payload))
        batches = [transfers[at : at + size] for at in range(0, len(transfers), size)]
        begun = time.perf_counter()
        answers = await asyncio.gather(*(self._subject.call(call(batch)) for batch in batches))
        seconds = time.perf_counter() - begun
        for answer in answers:
            _check(answer.outcomes, wanted)
        return seconds

    async def _one(self, op: str, call: Callable[..., Any], transfers: list[Transfer], wanted: type[Any]) -> None:
        begun = time.perf_counter()
        answer = await self._subject.call(call(transfers))
        self.seconds[op].append(time.perf_counter() - begun)
        _check(answer.outcomes, wanted)


def _check(outcomes: Sequence[Any], wanted: type[Any]) -> None:
    for outcome in outcomes:
        if not isinstance(outcome, wanted):
            raise StorageError(getattr(outcome, "reason", "an object just stored is missing"))


def _stride(size: int) -> int:
    return -(-size // 4096) * 4096


def _fill(views: Sequence[memoryview]) -> None:
    """Real KV, over and over: what serdes make of it is what they make of a model's. No two objects begin alike."""
    from kvcore.testing.sample import LAYOUT, kv_sample

    sample = memoryview(kv_sample()[0])
    step = LAYOUT.layer_block_bytes[0]
    for i, view in enumerate(views):
        begin = i * step % len(sample)
        at = 0
        while at < len(view):
            piece = sample[begin : begin + len(view) - at]
            view[at : at + len(piece)] = piece
            at, begin = at + len(piece), 0
