"""A tier opened, probed and timed, for `kvcore doctor`. What the probe stores it deletes again."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcore.api import KVCoreError, StorageError, StorageUnavailable, Usage, format_size
from kvcore.api.engine import Finding
from kvcore.cli.doctor import mounts
from kvcore.cli.doctor.speed import DELETE_S, timed
from kvcore.cli.kit import running
from kvcore.cli.kit.heard import heard
from kvcore.config import TierConfig
from kvcore.l1.arena import available_memory
from kvcore.l2 import Codec, Threads, Tier
from kvcore.l2.frames import Frames
from kvcore.l2.threads import DeadlineExceeded
from kvcore.observe import Metrics
from kvcore.plugins import Registry

LOW_SPACE_BYTES = 1 << 30
LOW_LOOKUP_BYTES = 64 << 20
"""A tier that delivers less than this while a lookup waits has little of a prompt to give."""


def probe(config: TierConfig, registry: Registry, lookup_timeout_s: float) -> Iterator[Finding]:
    """Open the tier, prove that it answers, and time a round trip of 64 MiB, or of half its capacity,
    through its serdes. Does it keep to its deadlines?"""
    subject = f"tier {config.name}"
    yield from _space(subject, config)
    with heard() as warnings:
        findings = _examined(subject, config, registry)
    yield from findings
    yield from _late(subject, config, findings, lookup_timeout_s)
    if all(f.level != "error" for f in findings):  # which else says the same
        for text in dict.fromkeys(warnings):
            yield Finding("note", subject, f"warns: {text}")


def _examined(subject: str, config: TierConfig, registry: Registry) -> list[Finding]:
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
        frames = Frames(config.name, storage, threads=threads, timeout_s=DELETE_S)
        return running.run(_round_trip(subject, config, tier, frames))
    except (KVCoreError, OSError) as e:
        silent = _path(config) is None and _unanswered(e)
        remedy = "start it, or check host, port and firewall; then" if silent else ""
        remedy = f"{remedy} correct its options, or remove the tier".strip()
        return [Finding("error", subject, f"{config.storage.plugin}: {e}", remedy)]
    except Exception as e:  # a plugin's own bug must not end the examination
        text = f"{config.storage.plugin}: {type(e).__name__}: {e}"
        return [Finding("error", subject, text, "report it to the plugin's author, or take the tier out of l2")]
    finally:
        threads.close()


def _late(subject: str, config: TierConfig, findings: Sequence[Finding], lookup_timeout_s: float) -> Iterator[Finding]:
    """Whether what was measured fits the tier's deadline, and that of a lookup."""
    for data in (f.data for f in findings if f.data is not None and "load_bytes_s" in f.data):
        if data["slowest_s"] > config.timeout:
            text = (
                f"a batch took {data['slowest_s']:.3g} s, and its timeout is {config.timeout:g} s: it counts as failed"
            )
            remedy = "raise its timeout, or take a faster storage or serde"
            yield Finding("error", subject, text, remedy)
        delivered = int(data["load_bytes_s"] * lookup_timeout_s)
        if delivered < LOW_LOOKUP_BYTES:
            text = (
                f"delivers {format_size(delivered)} within lookup_timeout ({lookup_timeout_s:g} s), which is the KV of "
                f"some {max(1, delivered >> 17)} tokens of an 8B model: the rest of a prompt is a miss"
            )
            yield Finding("warning", subject, text, "raise lookup_timeout, or take a faster storage or serde")


def _unanswered(error: BaseException | None) -> bool:
    """Whether nobody answered, as far as the errors' types tell."""
    kinds = (StorageUnavailable, DeadlineExceeded, ConnectionError, TimeoutError)
    return error is not None and (isinstance(error, kinds) or _unanswered(error.__cause__))


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
    yield from mounts.place(subject, here)


async def _round_trip(subject: str, config: TierConfig, tier: Tier, frames: Frames) -> list[Finding]:
    """`frames` is of the tier's storage, and opens it: a tier would wait for one that is unavailable."""
    try:
        await frames.open()
    except StorageError as e:
        cause = e.__cause__ or e  # as the storage has raised it
        raise cause from cause.__cause__
    try:
        try:
            await tier.ping()
        except (KVCoreError, OSError) as e:  # it has opened: what is wrong is not its options, as a rule
            raise StorageUnavailable(str(e)) from e
        findings = await timed(subject, tier, frames, config.capacity)
        usage = await tier.usage()
        return findings if usage is None else [*findings, *_capacity(subject, config, tier, usage)]
    finally:
        await tier.close()


def _capacity(subject: str, config: TierConfig, tier: Tier, usage: Usage) -> Iterator[Finding]:
    """Whether the storage may grow beyond what there is."""
    in_memory = not tier.storage.persistent and not tier.storage.shared
    if usage.capacity_bytes is None:
        if in_memory and config.capacity is None:
            remedy = f"give it a capacity, such as {{plugin: {config.storage.plugin}, capacity: 4GiB}}"
            yield Finding("warning", subject, "has no capacity: it grows until memory is full", remedy)
        return
    found = _free(config)
    if found is None and not in_memory:
        return
    free = found[1] if found is not None else available_memory()
    given = getattr(config.storage.options, "capacity", None)  # a storage may say less, where there is less room
    capacity = max(usage.capacity_bytes, given if isinstance(given, int) else 0)
    if capacity > free + usage.nbytes:
        text = (
            f"its capacity is {format_size(capacity)}, but it holds {format_size(usage.nbytes)} and "
            f"{format_size(free)} {'are free on its file system' if found else 'of memory are available'}"
        )
        remedy = f"lower its capacity to at most {format_size(free + usage.nbytes)}, or make room"
        yield Finding("warning", subject, text, remedy)
