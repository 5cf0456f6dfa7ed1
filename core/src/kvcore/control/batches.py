"""Batches of objects between memory of the caller and the tiers, without L1: what an object store does."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvcore.api import Failed, Loaded, LoadOutcome, ObjectKey, Stored, StoreOutcome
from kvcore.config import TierConfig
from kvcore.control.events import sort_events
from kvcore.control.locate import locate, unheard
from kvcore.control.manager import StorageManager
from kvcore.control.promotion import Promotion
from kvcore.control.reuse import Reuse
from kvcore.l2 import Moved, Parcel, Tier
from kvcore.observe import logger
from kvcore.observe.savings import count_saved

T = TypeVar("T")
_ASK_S = 60.0
"""How often a tier is asked for its capacity."""
_BLOCK = 4096
"""Beside its payload an object takes so many bytes for its header, and what a file is rounded up to."""


class Lent:
    """Whether memory is still lent by the caller of a load or a store. Thread-safe.

    Args:
        writable: it is written into. What is only read can be taken back at any time: its checksum tells.
    """

    def __init__(self, writable: bool) -> None:
        self._writable = writable
        self._lock = threading.Lock()
        self._used = self._over = False

    def use(self) -> bool:
        """Begin to use it. False when it has been taken back."""
        with self._lock:
            self._used = self._writable and not self._over
            return not self._over

    def take_back(self) -> bool:
        """Nobody uses it from now on. False when somebody writes into it: then there is an end to wait for."""
        with self._lock:
            self._over = not self._used
            return self._over


class _Writes:
    """What one tier is written."""

    def __init__(self, config: TierConfig) -> None:
        self.all = config.write == "all"
        self.promote = config.promote
        self.reuse = Reuse() if config.write == "reused" else None
        self.capacity = float("inf")
        """Bytes, as the storage last said; infinite where it says nothing."""
        self.ask_at = 0.0


class Batches:
    """Runs batches on the tiers' loop; its methods are coroutines of that loop. No tier makes them raise.

    A batch has no key twice, and all its keys have one namespace and group. Tiers are written what their `write:` says:
    `evicted` nothing, for nothing is evicted here; `reused` what is stored for the second time, or found in another
    tier. Those that `promote` are written what a later one had.
    """

    def __init__(self, manager: StorageManager) -> None:
        self._manager = manager
        self._loop = manager.loop
        self._hooks = manager.hooks
        self._metrics = manager.metrics
        self._writes = {name: _Writes(config) for name, config in manager.tier_configs.items()}
        self._journal = manager.journal
        self._promotion = Promotion(self._loop, self._metrics, self._keep, self._journal)
        deadlines = sum(config.timeout for config in manager.tier_configs.values())
        self.limit_s = manager.config.lookup_timeout + 2 * deadlines
        """How long a batch may take in its tiers, which hold themselves to their deadlines."""
        idle = [name for name, config in manager.tier_configs.items() if config.write == "evicted"]
        if idle:
            logger.warning("nothing is written to %s: `write: evicted` is what L1 gives up", ", ".join(idle))

    async def load(self, wanted: Sequence[Parcel], lent: Lent, tokens: int = 0) -> list[bool]:
        """Bring objects of so many tokens into their payloads, each from the first tier that has it, or one after it;
        which arrived.

        When it ends, nobody writes into the payloads any more.
        """
        tiers = list(self._manager.tiers)
        silent: list[Tier] = []
        sources = await self._sources(tiers, wanted, silent)
        arrived = [False] * len(wanted)
        reasons = [unheard(silent)[0]] * len(wanted)
        while True:
            groups: dict[int, list[int]] = {}
            for i, source in enumerate(sources):
                if not arrived[i] and source < len(tiers):
                    groups.setdefault(source, []).append(i)
            if not groups:
                break
            loads = (self._load_from(tiers[s], [wanted[i] for i in members], lent.use) for s, members in groups.items())
            for (source, members), outcomes in zip(groups.items(), await asyncio.gather(*loads), strict=True):
                for i, outcome in zip(members, outcomes, strict=True):
                    arrived[i] = isinstance(outcome, Loaded)
                    sources[i] = source + 1
                    if isinstance(outcome, Failed):
                        reasons[i] = outcome.kind
                found = [wanted[i] for i in members if arrived[i]]
                count_saved(self._metrics, tokens * len(found), {tiers[source].name: len(found)} if found else {})
                await self._pass_on(tiers, source, found)
        self._metrics.add("lookup_chunks", len(wanted))
        for there, reason in zip(arrived, reasons, strict=True):
            if not there:
                self._metrics.add("miss_chunks", 1, reason)
        return arrived

    async def _sources(self, tiers: Sequence[Tier], wanted: Sequence[Parcel], silent: list[Tier]) -> list[int]:
        """The place of the tier to load each object from; behind the last one for what no tier says it has. `silent`:
        see `locate`."""
        if len(tiers) < 2:
            return [0] * len(wanted)
        patience_s = self._manager.config.lookup_timeout / 2
        found = await locate(self._loop, tiers, [t.key for t in wanted], patience_s=patience_s, silent=silent)
        places = {tier: at for at, tier in enumerate(tiers)}
        return [len(tiers) if tier is None else places[tier] for tier in found]

    async def _load_from(self, tier: Tier, batch: Sequence[Parcel], held: Callable[[], bool]) -> list[LoadOutcome]:
        pieces = tier.pieces(batch, batch[0].nbytes)
        calls = [self._loop.spawn(tier.load(piece, held)) for piece in pieces]
        outcomes: list[LoadOutcome] = []
        hanging = []
        for piece, call in zip(pieces, await _ended(calls), strict=True):
            loads = call if isinstance(call, Moved) else Moved([Failed(repr(call), "internal")] * len(piece))
            outcomes += loads.outcomes
            if loads.settled is not None:
                hanging.append(loads.settled)
        if hanging:  # the storage may still write into the caller's memory
            await asyncio.wait(hanging)
        self._tell("load", tier, batch, outcomes)
        return outcomes

    async def _pass_on(self, tiers: Sequence[Tier], source: int, found: Sequence[Parcel]) -> None:
        """One of the tiers had these: others may want them."""
        self._metrics.add("hit_chunks", len(found), tiers[source].name)
        wanting = self._wanting(tiers, source, found) if found else []
        if wanting:
            await self._promotion.offer(found, wanting)

    def _wanting(
        self, tiers: Sequence[Tier], source: int, found: Sequence[Parcel]
    ) -> list[tuple[Tier, Sequence[Parcel]]]:
        """The tiers that want what one of them had, each with what it wants."""
        wanting: list[tuple[Tier, Sequence[Parcel]]] = []
        for i, tier in enumerate(tiers):
            writes = self._writes[tier.name]
            if i == source or not tier.breaker.closed or (i < source and not writes.promote):
                continue
            if writes.reuse is not None:
                new = set(writes.reuse.asked(found[0].key, [t.key.chunk_hash for t in found]))
                if new:
                    wanting.append((tier, [t for t in found if t.key.chunk_hash in new]))
            elif i < source and writes.all:
                wanting.append((tier, found))
        return wanting

    async def store(self, given: Sequence[Parcel], lent: Lent) -> list[bool]:
        """Write objects to the tiers that want them; which are in at least one."""
        tiers = list(self._manager.tiers)
        stored = [False] * len(given)
        for kept in await _ended([self._loop.spawn(self._store_to(tier, given, lent.use)) for tier in tiers]):
            if isinstance(kept, list):
                stored = [a or b for a, b in zip(stored, kept, strict=True)]
        return stored

    async def _store_to(self, tier: Tier, given: Sequence[Parcel], held: Callable[[], bool]) -> list[bool]:
        writes = self._writes[tier.name]
        batch = given if writes.all else []
        if writes.reuse is not None:
            again = set(writes.reuse.published(given[0].key, [t.key.chunk_hash for t in given]))
            batch = [t for t in given if t.key.chunk_hash in again]
            self._metrics.add("tier_held_back", len(given) - len(batch), tier.name)
            self._journal.note(tier.name, "held_back", "", [t.key for t in given if t.key.chunk_hash not in again])
        kept = await self._keep(tier, batch, held) if batch else set()
        return [t.key in kept for t in given]

    async def _keep(
        self, tier: Tier, batch: Sequence[Parcel], held: Callable[[], bool] = lambda: True
    ) -> set[ObjectKey]:
        """Have a tier keep objects; those that it has afterwards."""
        known = await tier.exists([t.key for t in batch])
        kept = {t.key for t, there in zip(batch, known, strict=True) if there}
        absent = [t for t in batch if t.key not in kept]
        # A batch that may push itself out goes in one call: then the storage can keep its front, whole.
        one = not absent or await self._crowds(tier, batch)
        pieces = [absent] if one else tier.pieces(absent, absent[0].nbytes)
        calls = [self._loop.spawn(self._write(tier, piece, held)) for piece in pieces if piece]
        for keys in await _ended(calls):
            if isinstance(keys, set):
                kept |= keys
        reuse = self._writes[tier.name].reuse
        if reuse is not None:
            reuse.refused(t.key for t in batch if t.key not in kept)
        return kept

    async def _crowds(self, tier: Tier, batch: Sequence[Parcel]) -> bool:
        """Does the batch take more than half of what the tier can hold?"""
        if len(batch) == 1 or not tier.usable:
            return False
        writes, now = self._writes[tier.name], time.monotonic()
        nbytes = sum(-(-t.nbytes // _BLOCK) * _BLOCK + _BLOCK for t in batch)
        if now >= writes.ask_at or 2 * nbytes > writes.capacity:
            usage = await tier.usage()
            writes.ask_at = now + _ASK_S
            writes.capacity = float("inf") if usage is None or usage.capacity_bytes is None else usage.capacity_bytes
        return 2 * nbytes > writes.capacity

    async def _write(self, tier: Tier, batch: Sequence[Parcel], held: Callable[[], bool]) -> set[ObjectKey]:
        """Have a tier write objects that it does not have; those that it has afterwards."""
        with tier.told.storing([t.key for t in batch]):
            stores = await tier.store(batch, held)
            self._tell("store", tier, batch, stores.outcomes)
        return {t.key for t, o in zip(batch, stores.outcomes, strict=True) if isinstance(o, Stored)}

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Forget objects in every tier."""
        await _ended([self._loop.spawn(tier.delete(keys)) for tier in list(self._manager.tiers)])

    async def drain(self, timeout_s: float) -> None:
        """Wait until what is written in the background is, so long at most. Before the end."""
        await self._promotion.drain(timeout_s)

    def _tell(
        self, op: str, tier: Tier, batch: Sequence[Parcel], outcomes: Sequence[LoadOutcome | StoreOutcome]
    ) -> None:
        """What came of a `load` from a tier, or of a `store` to it."""
        asked = op == "store" or len(self._manager.tiers) > 1  # see `_sources`
        if self._journal.most:
            self._journal.outcomes(tier.name, op, [t.key for t in batch], outcomes, known=asked)
        done = "loaded" if op == "load" else "stored"
        if self._hooks.listens(done) or self._hooks.listens("failed"):
            good, bad = sort_events(tier.name, [(t.key, t.nbytes) for t in batch], outcomes)
            (self._hooks.loaded if op == "load" else self._hooks.stored)(good)
            self._hooks.failed(bad)


async def _ended(calls: "Sequence[asyncio.Task[T]]") -> "list[T | BaseException]":
    """What each call has given or raised, once all are over; a fault, which is a bug, is logged."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            logger.error("a call to a tier failed: %r", result)
    return results
