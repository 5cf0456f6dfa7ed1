"""kvcore-disk with objects of 32 MiB, beside fio with the same block size and depth.

`disk.*` is the storage alone, which is what fio and the peer's adapter do. `disk.tier_*` is the whole way between L1
and the file: with the frame's checksum and the tier's scheduling. No row has fsync: with O_DIRECT the bytes have left
the page cache, and what the device still holds is its own affair on both sides.
"""

import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from kvcore.api import Item, Loaded, ObjectKey, ObjectLayout, PluginError, Stored
from kvcore.l1 import Arena
from kvcore.l2 import Codec, Parcel, Threads, Tier
from kvcore.l2.buffers import headers
from kvcore.l2.calls import Calls
from kvcore.observe import Metrics
from kvcore.plugins import PluginSpec, Registry
from kvcore_bench.speed.disk_limit import fio_limit, raw_limit
from kvcore_bench.speed.machine import available_bytes
from kvcore_bench.speed.measure import Case, absent, measure, rate
from kvcore_bench.speed.rows import Row, Unit
from kvcore_bench.speed.setting import Setting

OBJECT_BYTES = 32 << 20
NAMES: tuple[tuple[str, Unit], ...] = (
    ("disk.store", "GB/s"),
    ("disk.load", "GB/s"),
    ("disk.tier_store", "GB/s"),
    ("disk.tier_load", "GB/s"),
)


def run(setting: Setting) -> list[Row]:
    """The rows `disk.*`."""
    try:
        Registry().component("storage", "disk")
    except PluginError as error:
        return absent(NAMES, str(error))
    free = shutil.disk_usage(setting.path).free
    objects = min(8 if setting.quick else 16, available_bytes() // (3 * OBJECT_BYTES), free // (6 * OBJECT_BYTES))
    if objects < 1:
        return absent(NAMES, f"too little memory or room in {setting.path}")
    with _directory(setting.path) as root, closing(_Disk(root / "kvcore", objects)) as disk:
        depth = disk.depth
        limit = (fio_limit if shutil.which("fio") else raw_limit)(root, OBJECT_BYTES, objects, depth)
        with setting.peer("disk", path=str(root), objects=objects, object_bytes=OBJECT_BYTES, depth=depth) as peer:
            nbytes = objects * OBJECT_BYTES
            write, read = _Last(limit.write), _Last(limit.read)
            peer_write, peer_read = _Last(peer.sampler("disk.store")), _Last(peer.sampler("disk.load"))
            cases = []
            for name, way in (("disk.", disk.storage), ("disk.tier_", disk.tier)):
                store = rate(way.store, nbytes, before=disk.renew)
                load = rate(way.load, nbytes, before=_rest)  # reads what the store before it has written
                cases += [
                    Case(f"{name}store", "GB/s", store, write.take, peer_write.take, limit.note),
                    Case(f"{name}load", "GB/s", load, read.take, peer_read.take, limit.note),
                ]
                write, read, peer_write, peer_read = (x.repeated() for x in (write, read, peer_write, peer_read))
            return measure(cases, 4 if setting.quick else 7)


def _rest() -> None:
    """Virtual disks meter what they give over time. Each sample begins rested, as fio does after its own start-up."""
    time.sleep(0.3)


class _Last:
    """A sampler whose sample of a round serves two rows. Samples are None where there is nothing to sample."""

    def __init__(self, sample: Callable[[], float | None] | None) -> None:
        self._sample = sample
        self._value: float | None = None

    def take(self) -> float | None:
        if self._sample:
            _rest()
            self._value = self._sample()
        return self._value

    def repeated(self) -> "_Last":
        """Gives what `take` gave last."""
        again = _Last(None)
        again.take = lambda: self._value  # type: ignore[method-assign]
        return again


@contextmanager
def _directory(path: Path) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="kvcore-bench-", dir=path))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Disk:
    """A storage in an empty directory, by itself (`storage`) and as a tier (`tier`), over objects in an arena."""

    def __init__(self, root: Path, objects: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._layout = ObjectLayout(1, 1, (OBJECT_BYTES,), "bfloat16", 2)
        self._arena = Arena(objects * OBJECT_BYTES)
        self._arena.prefault()  # in huge pages, as an engine's
        pattern = secrets.token_bytes(1 << 20)
        for at in range(0, len(self._arena.buffer), len(pattern)):
            self._arena.buffer[at : at + len(pattern)] = pattern
        self._payloads = [self._arena.buffer[i * OBJECT_BYTES : (i + 1) * OBJECT_BYTES] for i in range(objects)]
        self._pages = headers(objects)
        capacity = f"{(4 * objects * OBJECT_BYTES >> 20) + 256}MiB"
        options = {"path": str(root), "capacity": capacity}
        self._made = Registry().create("storage", PluginSpec("disk", options, "bench"))
        self.depth: int = self._made.preferred_concurrency
        self._threads = Threads("bench-codec", 2)
        self._tier = Tier(
            "bench", self._made, Codec([], lambda tag: None), threads=self._threads, timeout_s=120, metrics=Metrics()
        )
        self._calls = Calls(self._made, "bench-storage", 120)
        self._loop.run_until_complete(self._tier.open())
        self._keys: list[ObjectKey] = []
        self.storage = _Way(self._loop, self._store, self._load)
        self.tier = _Way(self._loop, self._tier_store, self._tier_load)

    def renew(self) -> None:
        """Delete what the last round stored, and take new names."""
        self._loop.run_until_complete(self._calls.delete(self._keys))
        self._keys = [ObjectKey(b"bench".ljust(16), secrets.token_bytes(32)) for _ in self._payloads]
        _rest()

    def close(self) -> None:
        if left := asyncio.all_tasks(self._loop):  # interrupted
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(self._calls.delete(self._keys))
        self._loop.run_until_complete(self._tier.close())
        self._threads.close()
        self._loop.close()
        for view in self._payloads:
            view.release()
        self._arena.close()

    async def _store(self) -> None:
        await self._each(self._items(), self._calls.store, Stored)

    async def _load(self) -> None:
        await self._each(self._items(), self._calls.load, Loaded)

    async def _tier_store(self) -> None:
        async def store(batch: Sequence[Parcel]) -> Sequence[Any]:
            return (await self._tier.store(batch)).outcomes

        await self._each(self._parcels(), store, Stored)

    async def _tier_load(self) -> None:
        async def load(batch: Sequence[Parcel]) -> Sequence[Any]:
            return (await self._tier.load(batch)).outcomes

        await self._each(self._parcels(), load, Loaded)

    def _items(self) -> list[Item]:
        return [Item(k, (h, p)) for k, h, p in zip(self._keys, self._pages, self._payloads, strict=True)]

    def _parcels(self) -> list[Parcel]:
        return [Parcel(k, (p,), self._layout) for k, p in zip(self._keys, self._payloads, strict=True)]

    async def _each(self, things: Sequence[Any], call: Callable[[Any], Awaitable[Any]], wanted: type[Any]) -> None:
        """One call per object, `depth` at once: what the controllers do with objects of this size."""
        slots = asyncio.Semaphore(self.depth)

        async def one(thing: Any) -> None:
            async with slots:
                (outcome,) = await call([thing])
            if not isinstance(outcome, wanted):
                raise AssertionError(f"kvcore-disk answered {outcome}")

        await asyncio.gather(*map(one, things))


class _Way:
    """Storing and loading all objects, as plain calls."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: Callable[[], Any],
        load: Callable[[], Any],
    ) -> None:
        self.store: Callable[[], Any] = lambda: loop.run_until_complete(store())
        self.load: Callable[[], Any] = lambda: loop.run_until_complete(load())
