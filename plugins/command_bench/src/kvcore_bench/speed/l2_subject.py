"""One tier under measurement: throw-away objects of a namespace of their own, stored, asked for and loaded."""

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from kvcore.api import KVCoreError, Loaded, ObjectKey, ObjectLayout, StorageError, Stored
from kvcore.api.keys import NAMESPACE_BYTES
from kvcore.cli.kit.opened import PATIENCE_S, opened
from kvcore.cli.kit.running import Runs
from kvcore.config import TierConfig
from kvcore.l1 import Arena
from kvcore.l2 import HEADER_BYTES, Codec, Parcel, Threads, Tier
from kvcore.l2.frames import Frames
from kvcore.observe import Metrics
from kvcore.plugins import Registry
from kvcore_bench.speed.machine import available_bytes

NAMESPACE = b"kvcore.bench"
"""How every namespace of throw-away objects begins: `kvcore store ls` shows what a killed run has left."""
OPERATIONS = ("store", "exists", "load")
DELETE_S = 10.0
"""How long deleting is tried again in the end, when it fails."""
EXISTS = 3
"""So often `exists` is asked before it is believed that nothing is there."""
Place = tuple[int, ObjectKey]
"""Which of the payloads an object has, and its key."""
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

    def __init__(self, runner: Runs, config: TierConfig, registry: Registry, load: Load) -> None:
        self.name = config.name
        self.namespace = NAMESPACE + secrets.token_bytes(NAMESPACE_BYTES - len(NAMESPACE))
        self._runner = runner
        self._load = load
        self._stack = AsyncExitStack()
        self._flying: set[asyncio.Task[Any]] = set()
        self._stored: set[ObjectKey] = set()
        self._deletes_left = 20
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
        until = time.monotonic() + DELETE_S
        try:
            while True:
                try:
                    self._runner.run(self.forget())
                    return None
                except StorageError:
                    if self._deletes_left == 0 or time.monotonic() > until:
                        raise
                    self._deletes_left -= 1
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
        self._stored: list[Place] = []
        self._alone: list[Place] = []
        self.seconds: dict[str, list[float]] = {op: [] for op in OPERATIONS}
        """How long each single call took that went well."""
        self.failures: Counter[str] = Counter()
        """Objects that are in no number, by the reason."""

    def store(self) -> float:
        """GB/s of new objects."""
        return self._subject.run(self._store())

    def exists(self) -> float:
        """Microseconds per object, all asked for in one call."""
        return self._subject.run(self._exists())

    def load(self) -> float:
        """GB/s."""
        return self._subject.run(self._load())

    def percentile(self, op: str, percent: int) -> float | None:
        """In microseconds, of the single calls so far; None when none went well."""
        taken = sorted(self.seconds[op])
        if not taken:
            return None
        return taken[max(0, math.ceil(len(taken) * percent / 100) - 1)] * 1e6

    def failed(self) -> str:
        """How many objects failed, and why; empty when none did."""
        if not self.failures:
            return ""
        (reason, _), *others = self.failures.most_common()
        more = f", and {len(others)} other reasons" if others else ""
        return f"{self.failures.total()} objects failed and are in no number: {reason}{more}"

    def ratio(self) -> float:
        """Bytes into the serdes divided by bytes out of them."""
        now, before = self._serde_bytes(), self._encoded
        return (now["in"] - before["in"]) / (now["out"] - before["out"])

    def _serde_bytes(self) -> dict[str, float]:
        counted, name = self._subject.metrics.values(), self._tier.name
        return {s: counted.get(f'kvcore_serde_bytes_total{{tier="{name}",side="{s}"}}', 0.0) for s in ("in", "out")}

    async def _store(self) -> float:
        with suppress(StorageError):  # what is not deleted now is in the end
            await self._subject.forget()
        if self._warm_ups == 0:
            self.seconds = {op: [] for op in OPERATIONS}
        self._warm_ups -= 1
        keys, alone = self._subject.keys(len(self._source)), self._subject.keys(self._singles)
        whole, seconds = await self._batches(enumerate(keys), self._source, self._tier.store, Stored)
        self._stored = whole
        self._alone = [
            (i, key) for i, key in enumerate(alone) if await self._one("store", i, key, self._source, self._tier.store)
        ]
        return self._rate(seconds)

    async def _exists(self) -> float:
        keys = [key for _, key in self._stored]
        for _ in range(EXISTS):
            begun = time.perf_counter()
            there = await self._subject.call(self._tier.exists(keys))
            seconds = time.perf_counter() - begun
            if absent := there.count(False):
                self.failures["an object just stored is not there"] += absent
            if absent < len(there):
                break
        else:
            raise StorageError(f"{absent} of {absent} objects just stored are not there")
        for _, key in self._alone:
            single = time.perf_counter()
            (found,) = await self._subject.call(self._tier.exists([key]))
            if found:
                self.seconds["exists"].append(time.perf_counter() - single)
            else:
                self.failures["an object just stored is not there"] += 1
        return seconds / len(keys) * 1e6

    async def _load(self) -> float:
        self._stored, seconds = await self._batches(self._stored, self._target, self._tier.load, Loaded)
        if self._tier.codec.plain and any(self._source[i] != self._target[i] for i, _ in self._stored):
            raise StorageError("objects came back changed")
        for i, key in self._alone:
            await self._one("load", i, key, self._target, self._tier.load)
        return self._rate(seconds)

    def _rate(self, seconds: float) -> float:
        return len(self._stored) * len(self._source[0]) / seconds / 1e9

    async def _batches(
        self, objects: Iterable[Place], views: Sequence[memoryview], call: Callable[..., Any], wanted: type[Any]
    ) -> tuple[list[Place], float]:
        """The objects that went well, and the seconds of all, in batches as the controllers cut them and as many at
        once as the storage likes. Raises `StorageError` when none went well."""
        objects = list(objects)
        parcels = [Parcel(key, (views[i],), self._layout) for i, key in objects]
        batches = self._tier.pieces(parcels, parcels[0].nbytes)
        begun = time.perf_counter()
        answers = await asyncio.gather(*(self._subject.call(call(batch)) for batch in batches))
        seconds = time.perf_counter() - begun
        outcomes = [outcome for answer in answers for outcome in answer.outcomes]
        whole = [o for o, outcome in zip(objects, outcomes, strict=True) if self._went_well(outcome, wanted)]
        if not whole:
            raise StorageError(self.failures.most_common(1)[0][0])
        return whole, seconds

    async def _one(
        self, op: str, i: int, key: ObjectKey, views: Sequence[memoryview], call: Callable[..., Any]
    ) -> bool:
        begun = time.perf_counter()
        answer = await self._subject.call(call([Parcel(key, (views[i],), self._layout)]))
        seconds = time.perf_counter() - begun
        went_well = self._went_well(answer.outcomes[0], Stored if op == "store" else Loaded)
        if went_well:
            self.seconds[op].append(seconds)
        return went_well

    def _went_well(self, outcome: Any, wanted: type[Any]) -> bool:
        """Counts one that did not; of an open breaker, only when nothing else is known."""
        if isinstance(outcome, wanted):
            return True
        reason = getattr(outcome, "reason", "an object just stored is missing")
        if getattr(outcome, "kind", "") == "tier_down" and self.failures:
            reason = self.failures.most_common(1)[0][0]
        self.failures[reason] += 1
        return False


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
