"""A tier opened, probed and timed, for `kvcore doctor`. What the probe stores it deletes again."""

import asyncio
import os
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from kvcore.api import KVCoreError, Loaded, ObjectKey, ObjectLayout, Stored, format_size
from kvcore.api.engine import Finding
from kvcore.config import TierConfig
from kvcore.l2 import HEADER_BYTES, Codec, Threads, Tier, Transfer
from kvcore.observe import Metrics
from kvcore.plugins import Registry

OBJECTS = 16
OBJECT_BYTES = 4 << 20
SLOW_BYTES_S = 0.2e9
"""Below this, loading a prompt's KV is likely slower than computing it on a small model."""
LOW_SPACE_BYTES = 1 << 30


def probe(config: TierConfig, registry: Registry) -> Iterator[Finding]:
    """Open the tier, prove that it answers, and time a round trip of 64 MiB through its serdes."""
    subject = f"tier {config.name}"
    yield from _space(subject, config)
    threads = Threads("doctor-codec", max(1, min(4, os.cpu_count() or 1)))
    try:
        storage = registry.create("storage", config.storage)
        chain = [registry.create("serde", spec) for spec in config.serde]
        tier = Tier(
            config.name,
            storage,
            Codec(chain, lambda tag: None),
            threads=threads,
            timeout_s=max(config.timeout, 30.0),
            metrics=Metrics(),
        )
        yield from asyncio.run(_round_trip(subject, tier))
    except (KVCoreError, OSError) as e:
        yield Finding("error", subject, f"{config.storage.plugin}: {e}", "correct its options, or remove the tier")
    except Exception as e:  # a plugin's own bug must not end the examination
        text = f"{config.storage.plugin}: {type(e).__name__}: {e}"
        yield Finding("error", subject, text, "report it to the plugin's author, or take the tier out of l2")
    finally:
        threads.close()


def _space(subject: str, config: TierConfig) -> Iterator[Finding]:
    path = getattr(config.storage.options, "path", None)
    if path is None:
        return
    here = Path(path).expanduser()
    while not here.exists() and here != here.parent:
        here = here.parent
    try:
        found = os.statvfs(here)
    except OSError as e:
        yield Finding("error", subject, f"{here} cannot be examined: {e.strerror}", "give a path that is mounted")
        return
    free = found.f_bavail * found.f_frsize
    level, remedy = ("ok", "") if free > LOW_SPACE_BYTES else ("warning", "free space, or give another path")
    yield Finding(level, subject, f"{format_size(free)} free below {here}", remedy, {"free_bytes": free})  # type: ignore[arg-type]


async def _round_trip(subject: str, tier: Tier) -> list[Finding]:
    try:
        await tier.open()
        await tier.ping()
        return await _timed(subject, tier)
    finally:
        await tier.close()


async def _timed(subject: str, tier: Tier) -> list[Finding]:
    most = tier.storage.max_object_bytes
    size = OBJECT_BYTES if most is None else max(2, min(OBJECT_BYTES, most - HEADER_BYTES) // 2 * 2)
    layout = ObjectLayout(1, 1, (size,), "bfloat16", 2)
    space = secrets.token_bytes(16)
    keys = [ObjectKey(space, secrets.token_bytes(32)) for _ in range(OBJECTS)]
    # Half noise, half constant: what compresses is then neither nothing nor everything.
    payload = random.Random(0).randbytes(size // 2) + bytes(size - size // 2)  # noqa: S311
    sent = [Transfer(k, memoryview(bytearray(payload)), layout) for k in keys]
    got = [Transfer(k, memoryview(bytearray(size)), layout) for k in keys]
    batch = tier.batch_size(OBJECTS, size)
    batches = [slice(i, i + batch) for i in range(0, OBJECTS, batch)]
    try:
        begun = time.perf_counter()
        stored = [o for r in await asyncio.gather(*(tier.store(sent[b]) for b in batches)) for o in r.outcomes]
        store_s = time.perf_counter() - begun
        if bad := [o for o in stored if not isinstance(o, Stored)]:
            return [
                Finding("error", subject, f"{len(bad)} of {OBJECTS} objects not stored: {bad[0]}", "see its reason")
            ]
        begun = time.perf_counter()
        loaded = [o for r in await asyncio.gather(*(tier.load(got[b]) for b in batches)) for o in r.outcomes]
        load_s = time.perf_counter() - begun
        if bad_loads := [o for o in loaded if not isinstance(o, Loaded)]:
            text = f"{len(bad_loads)} of {OBJECTS} objects just stored cannot be loaded: {bad_loads[0]}"
            return [Finding("error", subject, text, "raise its capacity, or see its reason")]
        if any(t.payload != payload for t in got):
            return [Finding("error", subject, "objects came back changed", "take the tier out of l2 and report this")]
    finally:
        await tier.delete(keys)
    store, load = OBJECTS * size / store_s, OBJECTS * size / load_s
    usage = await tier.usage()
    data = {"store_bytes_s": round(store), "load_bytes_s": round(load)}
    text = f"answers; stores {store / 1e9:.2f} GB/s, loads {load / 1e9:.2f} GB/s"
    text += f" ({OBJECTS} objects of {format_size(size)})"
    if usage is not None:
        text += f"; holds {usage.objects} objects, {format_size(usage.nbytes)}"
        text += f" of {format_size(usage.capacity_bytes)}" if usage.capacity_bytes is not None else ""
    if min(store, load) < SLOW_BYTES_S:
        remedy = "loading may be slower than computing: use a faster device or network, or a stronger serde"
        return [Finding("warning", subject, text, remedy, data)]
    return [Finding("ok", subject, text, data=data)]
