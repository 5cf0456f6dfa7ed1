"""A round trip of throw-away objects through a tier, timed, for `kvcore doctor`. Nothing is left of them."""

import asyncio
import random
import secrets
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from kvcore.api import Loaded, ObjectKey, ObjectLayout, StorageError, Stored, Usage, format_size
from kvcore.api.engine import Finding
from kvcore.api.keys import NAMESPACE_BYTES
from kvcore.l2 import HEADER_BYTES, Parcel, Tier
from kvcore.l2.frames import Frames

NAMESPACE = b"kvcore.doctor"
"""How every namespace of throw-away objects begins: `kvcore store ls` shows what a killed run has left."""
OBJECTS = 16
OBJECT_BYTES = 4 << 20
SLOW_BYTES_S = 0.2e9
"""Below this, loading a prompt's KV is likely slower than computing it on a small model."""
DELETE_S = 30.0
"""How long deleting is tried again when it fails."""
DELETES = 20
T = TypeVar("T")


async def timed(subject: str, tier: Tier, frames: Frames, capacity: int | None = None) -> list[Finding]:
    """What a round trip finds; one that fails, too, and what is left of it where deleting by `frames` fails.

    Args:
        capacity: what the tier keeps to, in bytes, where its storage has none.
    """
    space = NAMESPACE + secrets.token_bytes(NAMESPACE_BYTES - len(NAMESPACE))
    keys = [ObjectKey(space, secrets.token_bytes(32)) for _ in range(OBJECTS)]
    calls = _Calls()
    try:
        result = await _round_trip(subject, tier, keys, calls, capacity)
    finally:
        await calls.landed()
        left = await _delete(frames, keys)
    findings = [result] if isinstance(result, Finding) else await _speeds(subject, frames, result, capacity)
    if left:
        remedy = f"kvcore store rm --tier {tier.name} --namespace {space.hex()}"
        findings.append(Finding("error", subject, f"{len(left)} objects of this test cannot be deleted", remedy))
    return findings


class _Rates(NamedTuple):
    """Of objects of `size` bytes, in bytes a second."""

    size: int
    store: float
    load: float
    slowest_s: float
    """The longest that one batch took."""


class _Calls:
    """Calls that go on when their caller is cancelled: what they store must be there to be deleted."""

    def __init__(self) -> None:
        self._flying: list[asyncio.Future[Any]] = []

    async def all(self, coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        tasks = [asyncio.ensure_future(c) for c in coroutines]
        self._flying += tasks
        return await asyncio.shield(asyncio.gather(*tasks))

    async def landed(self) -> None:
        """Wait for them, and for those that have overrun their deadline, which go on in the storage, for a while."""
        if self._flying:
            await asyncio.wait(self._flying)
        late = [c.result().settled for c in self._flying if not c.cancelled() and c.exception() is None]
        if late := [settled for settled in late if settled is not None]:
            await asyncio.wait(late, timeout=DELETE_S)


async def _delete(frames: Frames, keys: list[ObjectKey]) -> list[ObjectKey]:
    """Delete what was stored, trying again while that fails; what is still there."""
    until = time.monotonic() + DELETE_S
    for _ in range(DELETES):
        try:
            keys = await frames.delete(keys)
        except StorageError:
            with suppress(StorageError):
                keys = [k for k, there in zip(keys, await frames.exists(keys), strict=True) if there]
        if not keys or time.monotonic() > until:
            break
    return keys


async def _round_trip(
    subject: str, tier: Tier, keys: Sequence[ObjectKey], calls: _Calls, capacity: int | None
) -> Finding | _Rates:
    size = await _size(tier, capacity)
    layout = ObjectLayout(1, 1, (size,), "bfloat16", 2)
    # Half noise, half constant: what compresses is then neither nothing nor everything.
    payload = random.Random(0).randbytes(size // 2) + bytes(size - size // 2)  # noqa: S311
    sent = [Parcel(k, (memoryview(bytearray(payload)),), layout) for k in keys]
    got = [Parcel(k, (memoryview(bytearray(size)),), layout) for k in keys]
    batch = tier.batch_size(OBJECTS, size)
    batches = [slice(i, i + batch) for i in range(0, OBJECTS, batch)]
    begun = time.perf_counter()
    took: list[float] = []
    stored = [o for r in await calls.all([_clocked(tier.store(sent[b]), took) for b in batches]) for o in r.outcomes]
    store_s = time.perf_counter() - begun
    if bad := [o for o in stored if not isinstance(o, Stored)]:
        return Finding("error", subject, f"{len(bad)} of {OBJECTS} objects not stored: {bad[0]}", "see its reason")
    begun = time.perf_counter()
    loaded = [o for r in await calls.all([_clocked(tier.load(got[b]), took) for b in batches]) for o in r.outcomes]
    load_s = time.perf_counter() - begun
    if bad_loads := [o for o in loaded if not isinstance(o, Loaded)]:
        text = f"{len(bad_loads)} of {OBJECTS} objects just stored cannot be loaded: {bad_loads[0]}"
        return Finding("error", subject, text, "raise its capacity, or see its reason")
    if any(t.payload[0] != payload for t in got):
        return Finding("error", subject, "objects came back changed", "take the tier out of l2 and report this")
    # Two batches for each that the storage takes at once: one has waited for another.
    return _Rates(size, OBJECTS * size / store_s, OBJECTS * size / load_s, max(took) / min(2, len(batches)))


async def _size(tier: Tier, capacity: int | None) -> int:
    """Of an object, so that the storage takes it, and all of them fill half of it at most."""
    most, usage = tier.storage.max_object_bytes, await tier.usage()
    bounds = [] if most is None else [most]
    if usage is not None and usage.capacity_bytes is not None:
        capacity = usage.capacity_bytes
    if capacity is not None:
        bounds.append(capacity // (2 * OBJECTS))
    return max(2, min([OBJECT_BYTES, *(bound - HEADER_BYTES for bound in bounds)]) // 2 * 2)


async def _clocked(call: Coroutine[Any, Any, T], took: list[float]) -> T:
    begun = time.perf_counter()
    result = await call
    took.append(time.perf_counter() - begun)
    return result


async def _held(frames: Frames, capacity: int | None) -> Usage | None:
    """What the storage holds; what it does not say itself is counted, where the tier has to. Raises `StorageError`."""
    usage = await frames.usage()
    if capacity is not None:
        sizes = [entry.nbytes async for entries in frames.entries() for entry in entries]
        usage = Usage(sum(sizes), len(sizes), capacity)
    return usage


async def _speeds(subject: str, frames: Frames, rates: _Rates, capacity: int | None) -> list[Finding]:
    """A round trip that went well, and what the tier holds after it."""
    size, store, load, slowest_s = rates
    findings, usage = [], None
    try:
        usage = await _held(frames, capacity)
    except StorageError as error:
        remedy = "mend its storage, or remove what it cannot read: `kvcore store` needs this, and so does a `capacity`"
        findings.append(Finding("warning", subject, f"what it holds cannot be told: {error}", remedy))
    data = {"store_bytes_s": round(store), "load_bytes_s": round(load), "slowest_s": slowest_s}
    text = f"answers; stores {store / 1e9:.2f} GB/s, loads {load / 1e9:.2f} GB/s"
    text += f" ({OBJECTS} objects of {format_size(size)})"
    if usage is not None:
        text += f"; holds {usage.objects} objects, {format_size(usage.nbytes)}"
        text += f" of {format_size(usage.capacity_bytes)}" if usage.capacity_bytes is not None else ""
    if min(store, load) < SLOW_BYTES_S:
        remedy = "loading may be slower than computing: use a faster device or network, or a faster serde"
        return [Finding("warning", subject, text, remedy, data), *findings]
    return [Finding("ok", subject, text, data=data), *findings]
