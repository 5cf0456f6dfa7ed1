"""A tier opened, probed and timed, for `kvcore doctor`. What the probe stores it deletes again."""

import asyncio
import os
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcore.api import KVCoreError, Loaded, ObjectKey, ObjectLayout, Stored, Usage, format_size
from kvcore.api.engine import Finding
from kvcore.config import TierConfig
from kvcore.l1.arena import available_memory
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
        yield from asyncio.run(_round_trip(subject, config, tier))
    except (KVCoreError, OSError) as e:
        yield Finding("error", subject, f"{config.storage.plugin}: {e}", "correct its options, or remove the tier")
    except Exception as e:  # a plugin's own bug must not end the examination
        text = f"{config.storage.plugin}: {type(e).__name__}: {e}"
        yield Finding("error", subject, text, "report it to the plugin's author, or take the tier out of l2")
    finally:
        threads.close()


def shared_paths(configs: Sequence[TierConfig]) -> Iterator[Finding]:
    """Tiers that keep their objects in one place: each object is then stored twice and evicted twice."""
    first: dict[str, str] = {}
    for config in configs:
        try:
            path = _path(config)
            if path is None:
                continue
            place = os.path.realpath(path)
        except (RuntimeError, ValueError):
            continue  # an unknown user's home, a NUL: the probe says so
        if place in first:
            text = f"keeps its objects in {place}, as tier {first[place]} does"
            yield Finding("warning", f"tier {config.name}", text, "give each tier a path of its own, or remove one")
        first.setdefault(place, config.name)


def _path(config: TierConfig) -> Path | None:
    path = getattr(config.storage.options, "path", None)
    return Path(path).expanduser() if isinstance(path, str | Path) else None


def _free(config: TierConfig) -> tuple[Path, int] | None:
    """The directory of the tier, or what exists of it, and the bytes that are free there. None: it has none."""
    here = _path(config)
    if here is None:
        return None
    while not here.exists() and here != here.parent:
        here = here.parent
    found = os.statvfs(here)
    return here, found.f_bavail * found.f_frsize


def _space(subject: str, config: TierConfig) -> Iterator[Finding]:
    try:
        found = _free(config)
    except (OSError, RuntimeError, ValueError) as e:  # also a home directory that is not known
        text = f"its path cannot be examined: {getattr(e, 'strerror', None) or e}"
        yield Finding("error", subject, text, "give a path that is mounted")
        return
    if found is None:
        return
    here, free = found
    text, data = f"{format_size(free)} free below {here}", {"free_bytes": free}
    if free > LOW_SPACE_BYTES:
        yield Finding("ok", subject, text, data=data)
    else:
        yield Finding("warning", subject, text, "free space, or give another path", data)


async def _round_trip(subject: str, config: TierConfig, tier: Tier) -> list[Finding]:
    try:
        await tier.open()
        await tier.ping()
        findings = await _timed(subject, tier)
        usage = await tier.usage()
        return findings if usage is None else [*findings, *_capacity(subject, config, tier, usage)]
    finally:
        await tier.close()


def _capacity(subject: str, config: TierConfig, tier: Tier, usage: Usage) -> Iterator[Finding]:
    """Whether the storage may grow beyond what there is."""
    in_memory = not tier.storage.persistent and not tier.storage.shared
    if usage.capacity_bytes is None:
        if in_memory:
            remedy = f"give it a capacity, such as {{plugin: {config.storage.plugin}, capacity: 4GiB}}"
            yield Finding("warning", subject, "has no capacity: it grows until memory is full", remedy)
        return
    found = _free(config)
    if found is None and not in_memory:
        return
    free = found[1] if found is not None else available_memory()
    if usage.capacity_bytes > free + usage.nbytes:
        text = (
            f"its capacity is {format_size(usage.capacity_bytes)}, but it holds {format_size(usage.nbytes)} and "
            f"{format_size(free)} {'are free on its file system' if found else 'of memory are available'}"
        )
        remedy = f"lower its capacity to at most {format_size(free + usage.nbytes)}, or make room"
        yield Finding("warning", subject, text, remedy)


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
        remedy = "loading may be slower than computing: use a faster device or network, or a faster serde"
        return [Finding("warning", subject, text, remedy, data)]
    return [Finding("ok", subject, text, data=data)]
