"""`kvcore store rm`, and how objects are deleted."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvcore.api import ConfigError, Entry, KVCoreError, format_size
from kvcore.api.keys import NAMESPACE_BYTES
from kvcore.cli.kit.opened import Source, opened
from kvcore.cli.kit.output import error
from kvcore.cli.kit.progress import Progress
from kvcore.cli.store.tally import Tally
from kvcore.cli.store.walk import entries_of, expected
from kvcore.config import TierConfig
from kvcore.l2.frames import Frames

BATCH_OBJECTS = 250


class Remover:
    """Deletes objects, or says that it would."""

    def __init__(self, frames: Frames, tally: Tally, *, dry_run: bool, first: bool = False) -> None:
        """`first`: nothing else counts these objects, so they move the progress."""
        self._frames = frames
        self._tally = tally
        self._dry_run = dry_run
        self._first = first

    async def delete(self, entries: Sequence[Entry]) -> None:
        """Counted as deleted, or as kept: still there although the storage did not object. Raises `StorageError`."""
        for at in range(0, len(entries), BATCH_OBJECTS):
            batch = entries[at : at + BATCH_OBJECTS]
            kept = set() if self._dry_run else set(await self._frames.delete([e.key for e in batch]))
            for entry in batch:
                self._tally.add("kept" if entry.key in kept else "deleted", entry.nbytes, moved=self._first)


async def namespace_of(prefix: str, tiers: Sequence[TierConfig], source: Source) -> bytes:
    """The namespace that begins with `prefix`, the only one in all `tiers`: nobody means to delete two. Raises
    `ConfigError`; a tier that cannot be examined holds none here, and deleting from it fails the same way."""
    if len(prefix) == 2 * NAMESPACE_BYTES:
        return bytes.fromhex(prefix)
    found: dict[str, set[str]] = {}
    for tier in tiers:
        with suppress(KVCoreError):
            async with opened(tier, source.registry) as frames:
                async for entries in frames.entries():
                    for entry in entries:
                        name = entry.key.namespace.hex()
                        if name.startswith(prefix):
                            found.setdefault(name, set()).add(tier.name)
    if len(found) == 1:
        return bytes.fromhex(next(iter(found)))
    if not found:
        raise ConfigError(f"rm: no namespace begins with {prefix}; see them with: kvcore store ls")
    each = ", ".join(f"{name} ({', '.join(sorted(where))})" for name, where in sorted(found.items()))
    raise ConfigError(f"rm: {len(found)} namespaces begin with {prefix}; nothing is deleted. Choose one: {each}")


async def rm(frames: Frames, args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """JSON: {ok, dry_run, objects, bytes}; states: deleted, kept. With `--dry-run`, deleted is what would be."""
    if args.all and not args.yes and not args.dry_run:
        usage = await frames.usage()
        holds = f" ({usage.objects:,} objects, {format_size(usage.nbytes)})" if usage is not None else ""
        if not await _confirmed(f"Delete everything in tier {frames.name}{holds}? Type yes: "):
            error(f"tier {frames.name}: nothing was deleted")
            return {"ok": False, "dry_run": False, "objects": {}, "bytes": {}}
    with Progress(f"deleting from {frames.name}", await expected(frames, args.namespace)) as progress:
        tally = Tally(progress, as_json=args.json)
        remover = Remover(frames, tally, dry_run=args.dry_run, first=True)
        try:
            async for entries in entries_of(frames, args.namespace):
                await remover.delete(entries)
        except (asyncio.CancelledError, KVCoreError):
            progress.warn(f"tier {frames.name}: not finished. So far: {tally}")
            raise
    tally.show(frames.name, dry_run=args.dry_run)
    found = tally.as_json()
    return {"ok": not tally["kept"], "dry_run": args.dry_run, "objects": found["objects"], "bytes": found["bytes"]}


async def _confirmed(question: str) -> bool:
    """Ask on the terminal. Not by `input`, which would not hear Ctrl-C here."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(
            "rm: --all asks before it deletes, and there is no terminal to ask on; to do it all the same, add --yes"
        )
    sys.stderr.write(question)
    sys.stderr.flush()
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def read() -> None:
        loop.remove_reader(sys.stdin)
        answer.set_result(sys.stdin.readline())

    loop.add_reader(sys.stdin, read)
    try:
        return (await answer).strip().lower() == "yes"
    finally:
        loop.remove_reader(sys.stdin)
