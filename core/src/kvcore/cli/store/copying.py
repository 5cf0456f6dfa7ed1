"""`kvcore store cp`: frames from one tier into another, as they are."""

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from kvcore.api import ConfigError, Entry, Failed, KVCoreError, ObjectKey, format_size
from kvcore.cli.kit.opened import Source, chosen, opened
from kvcore.cli.kit.progress import Progress
from kvcore.cli.store.seals import Seals
from kvcore.cli.store.tally import Tally
from kvcore.cli.store.walk import GiveUp, each_batch, entries_of
from kvcore.l2.frames import Frames


async def copy(args: argparse.Namespace, source: Source, target: Source) -> dict[str, Any]:
    """Copy what the target does not have. JSON: {ok, from, to, dry_run, objects, bytes, named}; states: copied, there,
    corrupt, version, gone, failed."""
    (from_tier,), (to_tier,) = chosen(source.config, [args.source]), chosen(target.config, [args.target])
    if from_tier is to_tier:
        raise ConfigError(f"cp: {args.source} is both FROM and TO; name two tiers, or give --to-config")
    result: dict[str, Any] = {"ok": False, "from": args.source, "to": args.target, "dry_run": args.dry_run}
    with Progress(f"copying {args.source} to {args.target}") as progress:
        tally = Tally(progress, as_json=args.json)
        try:
            async with (
                opened(from_tier, source.registry) as here,
                # As an engine opens it, unless nothing is written.
                opened(to_tier, target.registry, passive=args.dry_run) as there,
            ):
                if text := await _eviction(here, there):
                    progress.warn(text)
                seals = Seals(
                    *(
                        [at.registry.create("serde", spec) for spec in tier.serde]
                        for at, tier in ((source, from_tier), (target, to_tier))
                    )
                )
                await _Copy(here, there, tally, seals, dry_run=args.dry_run).run(args.namespace)
            result["ok"] = not (tally["corrupt"] or tally["failed"])
            tally.show(f"{args.source} to {args.target}", dry_run=args.dry_run)
        except KVCoreError as e:
            result["error"] = text = source.told(e)
            progress.warn(f"{text}; copied so far: {tally}" if tally["copied"] else text)
        except asyncio.CancelledError:
            progress.warn(f"interrupted; run it again to go on. So far: {tally}")
            raise
    return result | tally.as_json()


async def _eviction(here: Frames, there: Frames) -> str | None:
    """What to say of a target that is too small."""
    held, room = await here.usage(), await there.usage()
    if held is None or room is None or room.capacity_bytes is None:
        return None
    free = max(0, room.capacity_bytes - room.nbytes)
    if held.nbytes <= free:
        return None
    return (
        f"tier {here.name} holds {format_size(held.nbytes)}, tier {there.name} has {format_size(free)} free of "
        f"{format_size(room.capacity_bytes)}: what does not fit pushes out what was used least"
    )


class _Copy:
    """One run."""

    def __init__(self, here: Frames, there: Frames, tally: Tally, seals: Seals, *, dry_run: bool) -> None:
        self._here, self._there = here, there
        self._seals = seals
        self._tally = tally
        self._dry_run = dry_run
        self._reads, self._writes = GiveUp(), GiveUp()

    async def run(self, namespace: bytes | None) -> None:
        at_once = max(self._here.concurrency, self._there.concurrency)
        for entry in await each_batch(entries_of(self._here, namespace), self._batch, at_once):
            self._failed(entry.key, entry.nbytes, "too large for this machine's memory")

    async def _batch(self, entries: Sequence[Entry]) -> None:
        known = await self._there.exists([e.key for e in entries])
        absent = [e for e, there in zip(entries, known, strict=True) if not there]
        for entry, there in zip(entries, known, strict=True):
            if there:
                self._tally.add("there", entry.nbytes)
            elif self._dry_run:
                self._tally.add("copied", entry.nbytes)
        if not absent or self._dry_run:
            return
        async with self._here.read(absent) as batch:
            for found in batch.found:
                if found.state == "failed":
                    self._failed(found.key, found.nbytes, found.reason)
                elif found.state != "whole":
                    self._tally.add(found.state, found.nbytes)
                    if found.state != "gone":
                        self._tally.name(found.key, found.nbytes, found.state, found.reason)
            failures = [f.reason for f in batch.found if f.state == "failed"]
            self._reads.note(failures[0] if len(failures) == len(absent) else None)
            whole = []
            for found in batch.found:
                if found.state != "whole":
                    continue
                if fault := self._seals.fault(found):
                    self._failed(found.key, found.nbytes, fault)
                else:
                    whole.append(found)
            if not whole:
                return
            outcomes = await self._there.write(batch, whole)
            refused = []
            for found, outcome in zip(whole, outcomes, strict=True):
                if isinstance(outcome, Failed):
                    self._failed(found.key, found.nbytes, outcome.reason)
                    if outcome.kind != "too_large":
                        refused.append(outcome.reason)
                else:
                    self._tally.add("copied", found.nbytes)
            self._writes.note(refused[0] if len(refused) == len(whole) else None)

    def _failed(self, key: ObjectKey, nbytes: int, reason: str) -> None:
        self._tally.add("failed", nbytes)
        self._tally.name(key, nbytes, "failed", reason)
