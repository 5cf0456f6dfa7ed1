"""The tiers of one cache: made and opened from their configuration, added and removed while it serves."""

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvcore.api import ConfigError, Entry, KVCoreError, ObjectEvent, PluginError, Serde, StorageError
from kvcore.config import TierConfig
from kvcore.control.loop import LoopThread
from kvcore.control.store import StoreController, WritePolicy
from kvcore.control.tenancy import division
from kvcore.l2 import Capacity, Codec, Threads, Tier, Told, TracedTier
from kvcore.observe import Journal, Metrics, logger
from kvcore.observe.savings import Evictions
from kvcore.plugins import PluginSpec, Registry

DRAIN_S = 10.0
"""How long a tier that is removed is waited for, until it has written what waits."""
END_S = 30.0
MAX_TIERS = 32
"""Every lookup asks all of them."""


class TierConflict(KVCoreError):
    """A tier cannot be added or removed as things are now: its name is taken, or another change is under way."""


class NoSuchTier(TierConflict):
    """No tier in use has that name."""


class Tiers:
    """Owns the tiers. `in_use` holds them in order of preference; it changes on the tiers' loop only.

    Args:
        useful_s: what takes longer is of no use to a lookup.
        evictions: counts what is deleted to make room.
        tenants: their quotas.
        journal: told of the same, and of what has grown too old.
    """

    def __init__(
        self,
        loop: LoopThread,
        registry: Registry,
        metrics: Metrics,
        useful_s: float,
        evictions: Evictions,
        tenants: Mapping[str, Mapping[str, int]],
        journal: Journal,
    ) -> None:
        self.in_use: list[Tier] = []
        self.configs: dict[str, TierConfig] = {}
        """By name, those that are being opened and closed included."""
        self.lossy: tuple[str, ...] = ()
        """Tags of lossy serdes in any tier at the start. They are part of every namespace, so they stay as they are."""
        self.changing = threading.Lock()
        """Held while a tier is added or removed."""
        self._loop = loop
        self._registry = registry
        self._metrics = metrics
        self._useful_s = useful_s
        self._evictions = evictions
        self._journal = journal
        self._tenants = tenants
        self.joined: Callable[[Tier], None] = lambda tier: None
        """Told of a tier that was added, on the loop."""
        self._threads: dict[str, Threads] = {}
        self._decoders: dict[str, Serde | None] = {}
        self._closed = False

    async def start(self, configs: Sequence[TierConfig]) -> None:
        """Open the tiers of the configuration, side by side. Raises `PluginError` for the first that cannot be used."""
        for config in configs:
            self.in_use.append(self._make(config))  # before it opens: a failed start closes it, too
        opening = [_open(tier, config) for tier, config in zip(self.in_use, configs, strict=True)]
        for failure in await asyncio.gather(*opening, return_exceptions=True):
            if failure is not None:
                raise failure
        self.lossy = tuple(lossy_tags(self.in_use))

    async def close(self) -> None:
        """Close all tiers."""
        self._closed = True
        await asyncio.gather(*(tier.close() for tier in self.in_use))  # one that hangs costs the others nothing

    def stop_threads(self) -> None:
        """Let the threads of the serdes end."""
        for threads in self._threads.values():
            threads.close()

    # -- while it serves ---------------------------------------------------------------------------------------------

    def add(
        self,
        given: Mapping[str, Any],
        stores: StoreController,
        policy: Callable[[TierConfig], WritePolicy],
        memory: memoryview,
        before: str | None = None,
    ) -> Tier:
        """Open one more tier and use it. Blocks while its storage opens, at most `START_S`; nothing else does.

        Args:
            given: as it would stand in `l2`.
            before: the name of the tier that it shall stand before. Default: the last.

        One that is unavailable, or takes longer to open, is used once it is open. Raises `TierConflict`, or
        `ConfigError` and `PluginError` as a start would.
        """
        from kvcore.config.load import load_tier

        self._begin()
        try:
            name = given.get("name")
            if isinstance(name, str) and name in self.configs:
                raise TierConflict(f"the name {name!r} is taken: choose another, or remove that tier first")
            if len(self.configs) >= MAX_TIERS:
                raise TierConflict(f"there are {MAX_TIERS} tiers, and more are not possible: remove one first")
            if before is not None and before not in self.configs:
                raise NoSuchTier(f"no tier is named {before!r}: the tiers are {', '.join(self.configs) or 'none'}")
            config = load_tier(given, registry=self._registry, taken=self.configs)
            return self._add(config, stores, policy(config), memory, before)
        finally:
            self.changing.release()

    def _add(
        self, config: TierConfig, stores: StoreController, policy: WritePolicy, memory: memoryview, before: str | None
    ) -> Tier:
        tier = self._make(config)
        joined = False
        try:
            other = sorted(set(lossy_tags([tier])) - set(self.lossy))
            if other:
                raise ConfigError(
                    f"tier {config.name!r} has the lossy serde {', '.join(other)}, and no tier had it at the start: "
                    "every namespace covers the lossy serdes, so what is cached would not be found any more. "
                    "Write it into the configuration and start again, or leave it out"
                )

            async def join() -> None:
                await _open(tier, config)
                tier.register_memory(memory)
                if self._closed:
                    raise StorageError("the cache has been closed")
                names = [t.name for t in self.in_use]
                at = names.index(before) if before in names else len(names)
                stores.add(tier, policy, at)
                self.in_use.insert(at, tier)
                self.joined(tier)

            self._loop.submit(join()).result()
            joined = True
        finally:
            if not joined:
                self._loop.submit(self._end(tier)).result(END_S)
        logger.info("tier %s has been added", tier.name)
        return tier

    def remove(self, name: str, stores: StoreController, drain_s: float = DRAIN_S) -> int:
        """Use a tier no more, and close it; how many objects it has not been written, which are counted.

        No request is sent to it from now on; those that are with it end first, and what waits to be written is, for
        at most `drain_s`. Its name is free afterwards. Raises `TierConflict`, also for a name that is not there.
        """
        self._begin()
        try:
            tier = next((t for t in list(self.in_use) if t.name == name), None)
            if tier is None:
                there = ", ".join(t.name for t in list(self.in_use))
                raise NoSuchTier(f"no tier is named {name!r}: the tiers are {there or 'none'}")
            return self._loop.submit(self._leave(tier, stores, drain_s)).result()
        finally:
            self.changing.release()

    def _begin(self) -> None:
        if not self.changing.acquire(timeout=0):
            raise TierConflict("another tier is being added or removed: try again when that is done")
        if self._closed:
            self.changing.release()
            raise TierConflict("the cache has been closed")

    async def _leave(self, tier: Tier, stores: StoreController, drain_s: float) -> int:
        self.in_use.remove(tier)
        dropped = await stores.remove(tier, drain_s if tier.breaker.closed else 0.0)
        await tier.finish()
        await self._end(tier)
        logger.info("tier %s has been removed, %d objects were not written to it", tier.name, dropped)
        return dropped

    async def _end(self, tier: Tier) -> None:
        await tier.close()
        self._threads.pop(tier.name).close()
        self.configs.pop(tier.name)
        self._metrics.forget(tier.name, "tier", "place")

    # -- making ------------------------------------------------------------------------------------------------------

    def _make(self, config: TierConfig) -> Tier:
        create = self._registry.create
        hooks = self._registry.hooks

        def tell(reason: str, gone: Sequence[Entry]) -> None:
            hooks.evicted([ObjectEvent(e.key, config.name, e.nbytes, reason) for e in gone])

        told = Told(tell, lambda: hooks.listens("evicted"))

        def evicted(policy: str, reason: str, gone: Sequence[Entry]) -> None:
            if reason == "room":
                self._evictions.count(config.name, policy, (e.key.namespace for e in gone), len(gone))
            else:
                policy = ""
            self._journal.note(config.name, "evicted", reason, [e.key for e in gone], policy)
            told.evicted(reason, gone)

        own = partial(evicted, own_policy(config), "room")  # what the storage deletes by itself
        context = replace(self._registry.context(config.storage.where), on_evict=own)
        storage = create("storage", config.storage, context)
        chain = [create("serde", s) for s in config.serde]
        plain = [s for s in chain if s.tag != "raw/1"]  # identity: not worth a copy
        threads = Threads("kvcore-codec", max(1, min(4, os.cpu_count() or 1)))  # its own: a serde may hang
        tier = (TracedTier if hooks.listens("spans") else Tier)(
            config.name,
            storage,
            Codec(plain, self._decoder),
            threads=threads,
            timeout_s=config.timeout,
            metrics=self._metrics,
            useful_s=self._useful_s,
            capacity=self._capacity(config),
            always=config.read == "always",
            told=told,
            on_evict=partial(evicted, config.eviction.plugin),
        )
        self._threads[config.name] = threads
        self.configs[config.name] = config
        return tier

    def _capacity(self, config: TierConfig) -> Capacity | None:
        make_policy = partial(self._registry.create, "eviction", config.eviction)
        divided = division(self._tenants, config.name, make_policy)
        if config.capacity is None and config.ttl is None and divided is None:
            return None
        limit = None if config.capacity is None else int(config.capacity)
        return Capacity(limit, make_policy(), division=divided, ttl_s=config.ttl)

    def _decoder(self, tag: str) -> Serde | None:
        if tag not in self._decoders:
            plugin = tag.split("/", maxsplit=1)[0]
            try:
                serde = self._registry.create("serde", PluginSpec(plugin, {}, f"frame of {tag}"))
                self._decoders[tag] = serde if serde.tag == tag else None
            except KVCoreError:
                self._decoders[tag] = None
        return self._decoders[tag]


def own_policy(config: TierConfig) -> str:
    """The name of the eviction policy that a storage has of its own; the storage's where none is chosen."""
    chosen = getattr(config.storage.options, "eviction", None)
    return chosen.plugin if isinstance(chosen, PluginSpec) else config.storage.plugin


def lossy_tags(tiers: Sequence[Tier]) -> list[str]:
    """Tags of lossy serdes in any of the tiers, sorted."""
    return sorted({s.tag for tier in tiers for s in tier.codec.chain if s.lossy})


async def _open(tier: Tier, config: TierConfig) -> None:
    try:
        await tier.open()
    except asyncio.CancelledError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, KVCoreError) else f"{type(error).__name__}: {error}"
        spec = config.storage
        raise PluginError(f"{spec.where}: storage {spec.plugin!r} did not open: {text}") from error
