"""`kvcore store verify` and `gc`: read every object, and delete what nobody can use."""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcore.api import Entry, KVCoreError, StorageError
from kvcore.cli.kit.opened import Source
from kvcore.cli.kit.progress import Progress
from kvcore.cli.store.removing import Remover
from kvcore.cli.store.tally import Tally
from kvcore.cli.store.walk import GiveUp, each_batch, entries_of, expected
from kvcore.l2.frames import Frames
from kvcore.plugins import PluginSpec


async def verify(frames: Frames, args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """JSON: {ok, objects, bytes, named}; states: whole, corrupt, version, gone, failed; with `--delete`, deleted and
    kept. Not ok when anything is corrupt, deleted or not, or could not be read."""
    unwanted = {"corrupt"} if args.delete else set()
    tally = await _sweep(frames, args, unwanted, args.namespace, lambda tags: True)
    return _result(args, tally, ok=not (tally["corrupt"] or tally["failed"] or tally["kept"]))


async def gc(frames: Frames, args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """JSON: as `verify`; with `--serdes` there is a state serde. Not ok when something could not be read or deleted."""
    if args.unused_for is not None:
        return await _drop_unused(frames, args)
    unwanted = {"corrupt"} | ({"version"} if args.versions else set()) | ({"serde"} if args.serdes else set())
    tally = await _sweep(frames, args, unwanted, None, _readable(source) if args.serdes else lambda tags: True)
    return _result(args, tally, ok=not (tally["failed"] or tally["kept"]))


async def _sweep(
    frames: Frames,
    args: argparse.Namespace,
    unwanted: set[str],
    namespace: bytes | None,
    readable: Callable[[tuple[str, ...]], bool],
) -> Tally:
    """Read all objects; delete those in an `unwanted` state."""
    give_up = GiveUp()
    with Progress(f"reading {frames.name}", await expected(frames, namespace)) as progress:
        tally = Tally(progress, as_json=args.json)
        remover = Remover(frames, tally, dry_run=args.dry_run)

        async def batch(entries: Sequence[Entry]) -> None:
            doomed: list[Entry] = []
            async with frames.read(entries) as read:
                for found in read.found:
                    state, reason = str(found.state), found.reason
                    if state == "whole" and not readable(found.tags):
                        state, reason = "serde", f"no installed serde reads {' or '.join(found.tags)}"
                    tally.add(state, found.nbytes)
                    if state not in ("whole", "gone"):
                        tally.name(found.key, found.nbytes, state, reason)
                    if state in unwanted:
                        doomed.append(Entry(found.key, found.nbytes))
                failures = [f.reason for f in read.found if f.state == "failed"]
            if doomed:
                await remover.delete(doomed)
            give_up.note(failures[0] if len(failures) == len(entries) else None)

        try:
            for entry in await each_batch(entries_of(frames, namespace), batch, frames.concurrency):
                tally.add("failed", entry.nbytes)
                tally.name(entry.key, entry.nbytes, "failed", "too large for this machine's memory")
        except (asyncio.CancelledError, KVCoreError):
            progress.warn(f"tier {frames.name}: not finished. So far: {tally}")
            raise
    tally.show(frames.name, dry_run=args.dry_run)
    return tally


def _result(args: argparse.Namespace, tally: Tally, *, ok: bool) -> dict[str, Any]:
    return {"ok": ok, "dry_run": args.dry_run, **tally.as_json()}


def _readable(source: Source) -> Callable[[tuple[str, ...]], bool]:
    """Whether all of a frame's serdes are installed, or configured in a tier."""
    known: dict[str, bool] = {}
    for tier in source.config.l2:
        for spec in tier.serde:
            known[source.registry.create("serde", spec).tag] = True

    def one(tag: str) -> bool:
        if tag not in known:
            spec = PluginSpec(tag.partition("/")[0], {}, f"frame of {tag}")
            try:
                known[tag] = source.registry.create("serde", spec).tag == tag
            except KVCoreError:
                known[tag] = False
        return known[tag]

    return lambda tags: all(map(one, tags))


async def _drop_unused(frames: Frames, args: argparse.Namespace) -> dict[str, Any]:
    """Delete the namespaces of which no object was used since. Reads no object, so that it is quick."""
    since_s = time.time() - args.unused_for
    last: dict[bytes, float] = {}
    with Progress(f"cleaning {frames.name}") as progress:
        async for entries in frames.entries():
            for entry in entries:
                if entry.used_s is None:
                    raise StorageError(f"tier {frames.name}: its storage does not know when objects were used")
                last[entry.key.namespace] = max(last.get(entry.key.namespace, 0.0), entry.used_s)
        tally = Tally(progress, as_json=args.json)
        remover = Remover(frames, tally, dry_run=args.dry_run)
        async for entries in entries_of(frames):
            await remover.delete([e for e in entries if last.get(e.key.namespace, since_s) < since_s])
    unused = sorted(name.hex() for name, used_s in last.items() if used_s < since_s)
    if not args.json:
        for name in unused:
            print(f"unused   {name}")
    tally.show(frames.name, dry_run=args.dry_run)
    return _result(args, tally, ok=not tally["kept"]) | {"namespaces": unused}
