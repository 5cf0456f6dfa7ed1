"""The storage manager: L1, the tiers and their controllers, opened from a configuration and closed in order."""

import asyncio
import os
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

from kvcore.api import ObjectLayout, format_size
from kvcore.config import Config, L1Config, TierConfig
from kvcore.control.admission import LoadAdmission
from kvcore.control.fetch import Fetcher
from kvcore.control.loop import LoopThread
from kvcore.control.occupancy import Occupancy
from kvcore.control.residents import Residents
from kvcore.control.spill import FREE_SHARE, SpillController
from kvcore.control.store import StoreController, WritePolicy
from kvcore.control.tenancy import Tenancy, division
from kvcore.control.tiers import DRAIN_S as TIER_DRAIN_S
from kvcore.control.tiers import Tiers
from kvcore.l1 import L1, Arena, L1Object, ObjectSpace
from kvcore.l1.arena import available_memory
from kvcore.l2 import Tier
from kvcore.observe import Journal, Metrics, Throttle, logger
from kvcore.observe.history import History
from kvcore.observe.journal import MAX_OBJECTS
from kvcore.observe.savings import Evictions
from kvcore.observe.spans import Spans
from kvcore.plugins import PluginSpec, Registry

_NAMESPACE = attrgetter("space.namespace")
DRAIN_S = 10.0
"""How long `close` waits for the tiers to take what L1 still owes them."""
REAP_S = 1.0
REST_S = 10.0  # of a cache without L1; one with L1 rests for a lease: whoever asks it something ends that
"""How often a cache in which nothing can end looks around all the same."""
CLOSE_TIERS_S = 20.0
MIN_AUTO_BYTES = 64 << 20


def l1_bytes(config: L1Config) -> int:
    """What `l1.size` comes to on this machine, now."""
    return max(MIN_AUTO_BYTES, available_memory() // 4) if config.size == "auto" else int(config.size)


class StorageManager:
    """Owns everything that keeps objects. Made by `open`, ended by `close`.

    Args:
        config: the validated configuration.
        registry: where components come from.
        metrics: where counts go.
        with_l1: False for the L2 stack alone (`LocalStore`).
    """

    def __init__(self, config: Config, registry: Registry, metrics: Metrics, *, with_l1: bool = True) -> None:
        if config.log_level is not None:
            logger.setLevel(config.log_level.upper())
        self.config = config
        self.metrics = metrics
        registry.metrics = metrics.registry
        self.hooks = registry.use_hooks(config.hooks)
        self.registry = registry
        self.journal = Journal(MAX_OBJECTS if config.inspect.requests else 0)
        """What became of objects."""
        self.history = History(metrics, self._refresh_l1)
        """The metrics since it was opened."""
        self.spans: Spans | None = None
        """Only where somebody listens to them."""
        self.closed = False
        self.reaped_at = self.reap_by = time.monotonic()
        """When the reaper last ran, and when it is to run again."""
        self._stirred = asyncio.Event()
        self._log = Throttle()
        self.resting = False
        """Nothing is looked after until a lease's time is over, or somebody calls `stir`."""
        self.loop = LoopThread("kvcore-io")
        if self.hooks.listens("spans"):
            self.spans = Spans(self.hooks.spans, self.loop.post)
        tenants = config.tenants if with_l1 else {}
        self._evictions = Evictions(metrics, tenants, self._tenant)
        self._tiers = Tiers(self.loop, registry, metrics, config.lookup_timeout, self._evictions, tenants, self.journal)
        self.tiers: list[Tier] = self._tiers.in_use
        self.arena: Arena | None = None
        self.layouts: dict[ObjectSpace, ObjectLayout] = {}
        self.admission = LoadAdmission(metrics)
        self.occupancy = Occupancy(self.loop, self.tiers, metrics)
        _managers.add(self)
        try:
            self.loop.submit(self._tiers.start(config.l2)).result()
            if with_l1:
                self._open_l1()
            self.loop.begin(self._keep_time)
            metrics.registry.refresh = self.refresh_gauges
        except BaseException:
            self.close()
            raise

    @property
    def lossy_tags(self) -> list[str]:
        """Tags of lossy serdes in any tier: part of the namespace."""
        return list(self._tiers.lossy)

    @property
    def named_tenants(self) -> set[str]:
        """Tenants that are shown by their names: those of the configuration, and those that were given a quota since.
        The log, traces and metrics, which others read, have the former only."""
        return {*self.config.tenants, *(() if self.arena is None else self.tenancy.given)}

    @property
    def tier_configs(self) -> dict[str, TierConfig]:
        """The configuration of each tier, by name."""
        return dict(self._tiers.configs)

    @property
    def tier_plugins(self) -> dict[str, str]:
        """The tiers' names in order, each with the name of its storage plugin."""
        configs = self.tier_configs
        return {t.name: configs[t.name].storage.plugin for t in list(self.tiers) if t.name in configs}

    def create(self, kind: Any, spec: PluginSpec) -> Any:
        """An instance of a configured component."""
        return self.registry.create(kind, spec)

    def close(self) -> None:
        """Write out what waits (for a bounded time), then close tiers, threads and the arena. Idempotent."""
        if self.closed:
            return
        self.closed = True
        changing = self._tiers.changing.acquire(timeout=DRAIN_S)  # a tier that is being opened or closed
        try:
            self.loop.submit(self._close_tiers()).result(DRAIN_S + CLOSE_TIERS_S)
        except TimeoutError:
            logger.warning("a tier did not close in time: it is left behind")
        finally:
            if changing:
                self._tiers.changing.release()
            self._tiers.stop_threads()
            self.loop.close()
            if hasattr(self, "l1"):  # neither the L2 stack alone has one, nor a start that failed before it
                self.l1.close()
            self.journal.clear()  # its objects lead to L1
            if self.arena is not None:
                self.arena.close()

    def refresh_gauges(self) -> None:
        """Bring the occupancy metrics up to date."""
        if self.closed:
            return
        self.occupancy.refresh()
        self._refresh_l1()

    def _refresh_l1(self) -> None:
        if self.closed or self.arena is None:
            return
        usage = self.l1.usage()
        self.metrics.set("l1_bytes", usage["size"], "size")
        self.metrics.set("l1_bytes", usage["free"], "free")
        self.metrics.set("l1_bytes", usage["quarantined"], "quarantined")
        self.metrics.set("l1_objects", usage["objects"])
        self.metrics.set("leases", usage["leases"])

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open_l1(self) -> None:
        config = self.config.l1
        size = l1_bytes(config)
        self.arena = Arena(size)
        make_policy = partial(self.create, "eviction", config.eviction)
        spills = any(t.write == "evicted" for t in self.config.l2)
        divided = division(self.config.tenants, "l1", make_policy, int(self.arena.size * FREE_SHARE) if spills else 0)
        self.l1 = L1(
            self.arena,
            make_policy(),
            lease_s=config.lease,
            on_evict=self._evicted,
            on_left=self._left,
            division=divided,
            ttl_s=config.ttl,
        )
        self.tenancy = Tenancy(tuple(self.config.tenants), self.l1, self.tiers, self.loop, self.layouts)
        self._tiers.joined = self.tenancy.joined
        self.residents = Residents(self.l1, self.hooks)
        policies = [self._write_policy(t) for t in self.config.l2]
        self.stores = StoreController(self.loop, self.l1, self.tiers, policies, self.metrics, self.hooks, self.journal)
        self.spill = SpillController(self.loop, self.l1, self.stores, self.layouts)
        self.fetcher = Fetcher(
            self.loop,
            self.l1,
            self.tiers,
            patience_s=self.config.lookup_timeout / 2,
            residents=self.residents,
            stores=self.stores,
            journal=self.journal,
        )
        for tier in self.tiers:
            tier.register_memory(self.arena.buffer)
        self.arena.prefault()
        logger.info("L1 of %s, tiers: %s", format_size(size), ", ".join(t.name for t in self.tiers) or "none")
        if not self.tiers and "l2" not in self.config.sources:
            logger.warning("no l2 tier is configured: what leaves L1 is lost (`l2: []` says that this is meant)")

    # -- while it serves ---------------------------------------------------------------------------------------------

    def add_tier(self, given: Mapping[str, Any], before: str | None = None) -> Tier:
        """Open one more tier: see `Tiers.add`. From any thread."""
        assert self.arena is not None
        return self._tiers.add(given, self.stores, self._write_policy, self.arena.buffer, before)

    def remove_tier(self, name: str, drain_s: float = TIER_DRAIN_S) -> int:
        """Use a tier no more: see `Tiers.remove`. From any thread."""
        return self._tiers.remove(name, self.stores, drain_s)

    def _write_policy(self, config: TierConfig) -> WritePolicy:
        assert self.arena is not None
        queue = min(int(config.queue_size), self.arena.size // 2)
        divided = bool(self.config.tenants) and config.write != "evicted"  # what L1 gives up comes as there is room
        return WritePolicy(queue, config.write, config.promote, divided)

    # -- running and closing -----------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        """End what is over: leases, pins, objects with a time to live. Who rests is not woken for it."""
        expiring: asyncio.Task[None] | None = None
        while True:
            rest_s = REAP_S if self._stirred.is_set() else self._rest_s()  # whoever stirs once, may do so again
            self._stirred.clear()
            self.reap_by = time.monotonic() + rest_s
            self.resting = rest_s > REAP_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), rest_s)
            self.resting = False
            self.history.tick()
            if self.arena is not None:
                self._reap()
            self.reaped_at = time.monotonic()
            if expiring is None or expiring.done():  # a storage may take its time
                expiring = self.loop.spawn(self._expire()) if any(t.expires for t in self.tiers) else None

    def _rest_s(self) -> float:
        """What begins meanwhile lasts for a lease at least; and of what does not, `stir` tells."""
        busy = any(t.expires for t in self.tiers) or self.config.tenants
        if busy or (self.arena is not None and (self.l1.watched or not self.l1.at_rest)):
            return REAP_S
        return REST_S if self.arena is None else max(REAP_S, self.config.l1.lease)

    def stir(self) -> None:
        """Something was begun that may be over soon. From any thread."""
        self.loop.post(self._stirred.set)

    async def _expire(self) -> None:
        for tier in list(self.tiers):
            await tier.expire()

    def _reap(self) -> None:
        reads, writes = self.l1.reap()
        self.metrics.add("expired_leases", reads, "read")
        self.metrics.add("expired_leases", writes, "write")
        self.metrics.add("expired_objects", self.l1.take_expired(), "l1")
        self.residents.tell()
        self.tenancy.forget()
        self.tenancy.refresh(self.metrics)
        if writes:
            self._log.warning("write", f"{writes} write leases ran out: their slots wait for the holder's answer")

    def _tenant(self, namespace: bytes) -> str:
        return self.tenancy.tenant(namespace)

    def _evicted(self, objects: Sequence[L1Object]) -> None:
        self.metrics.add("evicted_objects", len(objects))
        self._evictions.count("l1", self.config.l1.eviction.plugin, map(_NAMESPACE, objects), len(objects))
        for tier in self.stores.spill_tiers:
            self.metrics.add("tier_dropped", len(objects), tier.name, "evicted_first")
            self.journal.note(tier.name, "dropped", "evicted_first", objects)
        self.residents.tell()

    def _left(self, what: str, reason: str, objects: Collection[L1Object]) -> None:
        """Under L1's lock."""
        self.journal.note("l1", what, reason, objects, self.config.l1.eviction.plugin if reason == "room" else "")

    async def _close_tiers(self) -> None:
        if self.arena is not None and hasattr(self, "stores"):
            give_up = time.monotonic() + DRAIN_S
            await self.spill.flush(DRAIN_S)
            left = await self.stores.drain(max(0.0, give_up - time.monotonic()))
            if left:
                logger.warning("closed with %d objects not yet written to a tier", left)
        await self._tiers.close()


_managers: "weakref.WeakSet[StorageManager]" = weakref.WeakSet()


def _forked() -> None:
    """In the child of a fork none of the threads is: whatever is asked is a miss, and closing is over at once."""
    for manager in list(_managers):
        manager.closed = True
        if hasattr(manager, "l1"):
            manager.l1.forked()
        manager.journal.forked()
        if manager.spans is not None:
            manager.spans.forked()


os.register_at_fork(after_in_child=_forked)
