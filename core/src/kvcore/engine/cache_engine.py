"""The local cache engine: lookup, retrieve, reserve, publish, in the process of the engine's scheduler.

Every method returns at once; none raises for a fault of the cache. Bytes are moved by the worker, by the plans that
`retrieve` and `reserve` return.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

from kvcore.api import LeaseError, ObjectEvent, ObjectKey
from kvcore.config import Config, load_config
from kvcore.control import StorageManager
from kvcore.engine import space as spaces
from kvcore.engine.answers import check_blocks, count_answer, promised
from kvcore.engine.face import Coming, StorePlan
from kvcore.engine.identity import Identities, Identity
from kvcore.engine.lookup import SLACK_S, Lookup
from kvcore.engine.plans import load_plan, storable, store_plan
from kvcore.engine.prefetch import Prefetcher
from kvcore.engine.presence import Presence
from kvcore.engine.space import ModelSpec, Space
from kvcore.l1 import L1Object, ObjectSpace, WriteLease
from kvcore.observe import Asked, Decision, Decisions, Metrics, Throttle, logger
from kvcore.observe.decisions import salt_word, tenant_shown
from kvcore.observe.savings import count_saved
from kvcore.plugins import Registry, registry_from_env
from kvcore.tenants import Usage
from kvcore.transfer.plan import Copy


class Claim(NamedTuple):
    """A plan without its copies: the objects to fill, per group. `id` is 0 when there are none."""

    id: int
    objects: list[list[L1Object]]
    skipped: dict[str, int]


class _Plan(NamedTuple):
    """What `publish` publishes: a lease for each group, and each hash's parent where an observer wants it."""

    space: Space
    leases: list[tuple[int, WriteLease]]
    parents: dict[bytes, bytes]
    decision: Decision | None


class CacheEngine:
    """One cache, owned by this process: an `Engine`. Thread-safe. Make it with `open`."""

    def __init__(self, manager: StorageManager, name: str = "kvcore") -> None:
        self.manager = manager
        self.l1 = manager.l1
        self.metrics = manager.metrics
        self.journal = manager.journal
        self.decisions = Decisions(manager.config.inspect.requests, manager.config.inspect.tokens)
        self.name = name
        assert manager.arena is not None
        self.arena: str = manager.arena.descriptor["token"]
        """The arena's token."""
        self._keys = manager.create("keys", manager.config.keys)
        self._object_spaces: dict[tuple[bytes, int], ObjectSpace] = {}
        self._plans: dict[int, _Plan] = {}
        self._plan_ids = itertools.count(1)
        self.registered: weakref.WeakValueDictionary[bytes, Space] = weakref.WeakValueDictionary()
        """Namespace -> the space registered under it, while anybody holds it."""
        self.identities = Identities()
        manager.tenancy.held = self.registered.__contains__
        manager.tenancy.forgotten = self._forget
        self._lock = threading.Lock()
        self._log = Throttle()
        self.prefetcher = Prefetcher(manager, self.registered.get, self.object_space)
        self._presence = Presence(manager, name)
        manager.hooks.prefetch(self.prefetcher)

    @classmethod
    def open(
        cls, path: str | None = None, *, flags: Mapping[str, Any] | None = None, name: str = "kvcore"
    ) -> "CacheEngine":
        """Read the configuration, load the plugins it names, open L1 and the tiers.

        Raises `ConfigError`, `PluginError` or `ArenaError`: what is wrong at start is the user's to see.
        """
        registry = registry_from_env()
        return cls.of(load_config(path, flags=dict(flags or {}), registry=registry), registry, name)

    @classmethod
    def of(cls, config: Config, registry: Registry, name: str = "kvcore") -> "CacheEngine":
        """The same, for a configuration that is loaded."""
        manager = StorageManager(config, registry, Metrics())
        try:
            if manager.spans is not None:
                from kvcore.engine.traced import TracedEngine

                return TracedEngine(manager, name, manager.spans)
            return cls(manager, name)
        except BaseException:
            manager.close()
            raise

    def register(self, spec: ModelSpec, tenant: str = "") -> Space:
        """See `Engine.register`."""
        spaces.check(spec)
        config = self.manager.config
        chunk_tokens = spaces.resolve_chunk_tokens(spec, config.chunk_tokens, int(config.min_object_size))
        return self.admit(spec, tenant, chunk_tokens, self._keys.scheme, config.salt)

    def admit(self, spec: ModelSpec, tenant: str, chunk_tokens: int, key_scheme: str, salt: str) -> Space:
        """Register a model whose keys another process makes, with the `key_scheme` and `salt` of that one."""
        name = spaces.namespace(spec, chunk_tokens, key_scheme, self.manager.lossy_tags, salt, tenant)
        assert self.manager.arena is not None
        with self._lock:
            known = self.registered.get(name)
            if known is not None:
                return known
            space = Space(spec, self._keys, name, chunk_tokens, self.descriptor, tenant)
            identity = Identity(spec, chunk_tokens, key_scheme, tenant, salt_word(salt), self.manager.lossy_tags)
            self.identities.note(name, identity)
            self.registered[name] = space  # first: from now on L1 may not forget it
            for g, layout in enumerate(space.groups):
                self._object_spaces[name, g] = self.l1.space(name, g, layout.nbytes, tenant)
                self.manager.layouts[self._object_spaces[name, g]] = layout
        self.manager.tenancy.bind(name, tenant)
        self.manager.tenancy.forget()  # of many that come in a second, those that are gone again
        largest = max(layout.nbytes for layout in space.groups)
        if largest > self.manager.arena.size:
            logger.warning("an object has %d bytes, more than L1: nothing of this model can be cached", largest)
        logger.info(
            "model %s%s: namespace %s, chunks of %d tokens, objects of %s bytes",
            spec.model, f", tenant {tenant_shown(tenant, self.manager.config.tenants)}" if tenant else "",
            name.hex(), chunk_tokens, "/".join(str(x.nbytes) for x in space.groups),
        )  # fmt: skip
        return space

    # -- loading -----------------------------------------------------------------------------------------------------

    def lookup(
        self,
        space: Space,
        hashes: Sequence[bytes],
        first: int = 0,
        asked: Asked | None = None,
        on_answer: Callable[[], None] | None = None,
        each: bool = False,
        begin: int = 0,
        on_coming: Callable[[], None] | None = None,
    ) -> Lookup:
        """See `Engine.lookup`. `on_answer` is called once it is answered; before that `on_coming`, if `coming` says
        something by then: both from any thread, also from within. `each`: see `Lookup`. `begin`: the number of the
        first of the chunks in their request, for the record."""

        def answered(lookup: Lookup, seconds: float) -> None:
            count_answer(self.metrics, lookup, seconds)
            if lookup.decision is not None:
                lookup.decision.answered(lookup, seconds)
            if on_answer is not None:
                on_answer()

        tables = [self.object_space(space, g) for g in range(len(space.groups))]
        first = min(first, len(hashes))
        lookup = Lookup(self.manager, space, tables, hashes, first, answered, each, on_coming)
        if (asked is not None or not each) and not self.manager.closed:
            lookup.decision = self.decisions.begin(asked, space.namespace, hashes, first, space.chunk_tokens, begin)
        if self.manager.resting:
            self.manager.stir()
        if not spaces.can_name_chunks(hashes[first:] if first else hashes):
            lookup.refuse()
            return lookup
        lookup.start()
        if self.manager.stores.selective:  # also what the engine holds itself: it is in use
            for table, layout in zip(tables, space.groups, strict=True):
                self.manager.stores.asked(table, hashes, layout)
        if self.prefetcher.listening and not each:
            self.prefetcher.asked(space, tables, hashes)
        return lookup

    def queued(self, space: Space, hashes: Sequence[bytes], asked: Asked | None = None) -> None:
        """See `Engine.queued`."""
        if hashes and self.manager.hooks.listens("queued"):
            self.manager.hooks.queued(space.namespace, hashes)

    def coming(self, lookup: Lookup) -> Coming | None:
        """See `Engine.coming`."""
        return lookup.coming()

    def retrieve(self, lookup: Lookup, first_block: int, block_ids: Sequence[Sequence[int]]) -> list[Copy]:
        """See `Engine.retrieve`."""
        if self.manager.closed:
            raise LeaseError("the cache is closed")
        end = promised(lookup)
        if end <= lookup.first:
            return []
        return self._plan_loads(lookup, lookup.objects, end, first_block, block_ids)

    def arrived(self, lookup: Lookup, first_block: int, block_ids: Sequence[Sequence[int]]) -> list[Copy]:
        """See `Engine.arrived`."""
        if self.manager.closed:
            raise LeaseError("the cache is closed")
        fresh = lookup.take(lambda found: check_blocks(lookup.space, block_ids, max(found, default=-1) + 1))
        if not fresh and lookup.renew():
            return []
        end = max(fresh, default=-1) + 1
        return self._plan_loads(lookup, [fresh], end, first_block, block_ids)

    def _plan_loads(
        self,
        lookup: Lookup,
        groups: Sequence[Mapping[int, L1Object]],
        end: int,
        first_block: int,
        block_ids: Sequence[Sequence[int]],
    ) -> list[Copy]:
        chunks, blocks = range(lookup.first, end), lookup.space.chunk_blocks
        copies, loaded = load_plan(groups, chunks, blocks, first_block, block_ids, self.l1.arena.generations)
        if not lookup.renew():  # a pause longer than the lease, in the midst of this
            raise LeaseError("the lookup's leases have ended")
        self.used(lookup, loaded * lookup.space.spec.block_tokens)
        return copies

    def used(self, lookup: Lookup, tokens: int) -> None:
        """What a lookup has found is being read: it stays, and so many tokens need not be computed."""
        lookup.keep()
        speed = self.manager.admission.speed(lookup.space.spec.computed_as)
        count_saved(self.metrics, tokens, lookup.sources, speed)
        if lookup.decision is not None:
            lookup.decision.retrieved += tokens

    def renew(self, lookup: Lookup) -> bool:
        """See `Engine.renew`."""
        return lookup.renew()

    def release(self, lookup: Lookup) -> None:
        """See `Engine.release`."""
        lookup.release()

    # -- storing -----------------------------------------------------------------------------------------------------

    def reserve(
        self,
        space: Space,
        hashes: Sequence[bytes],
        first: int,
        last: int,
        block_ids: Sequence[Sequence[int]],
        request: str = "",
    ) -> StorePlan:
        """See `Engine.reserve`."""
        last = min(last, len(hashes))
        if self.manager.closed or first >= last:
            return StorePlan(0, [], {}, self.arena)
        if len(block_ids) != len(space.groups) or not spaces.can_name_chunks(hashes[max(0, first - 1) : last]):
            refused = (last - first) * len(space.groups)
            self.metrics.add("store_skipped_chunks", refused, "refused")
            return StorePlan(0, [], {"refused": refused}, self.arena)
        wanted = [storable(hashes, first, last, ids, space.chunk_blocks) for ids in block_ids]
        for g, chosen in enumerate(wanted):
            if len(chosen) < last - first and space.windows[g] is None:  # what a window has left behind is not wanted
                left = [ObjectKey(space.namespace, h, g) for h in hashes[first:last] if h not in chosen]
                self.journal.note("l1", "skipped", "no_block", left)
        chain = [hashes[first - 1] if first else b"", *hashes[first:last]]
        claim = self.claim(space, [list(w) for w in wanted], chain, request)
        no_block = sum(last - first - len(w) for w in wanted)
        if no_block:
            claim.skipped["no_block"] = no_block
            self.metrics.add("store_skipped_chunks", no_block, "no_block")
        copies = store_plan(claim.objects, wanted, self.l1.arena.generations)
        return StorePlan(claim.id, copies, claim.skipped, self.arena)

    def claim(
        self, space: Space, wanted: Sequence[Sequence[bytes]], chain: Sequence[bytes], request: str = ""
    ) -> Claim:
        """Slots for the `wanted` hashes of each group. `chain`: the hash before the first of them, and they all."""
        leases: list[tuple[int, WriteLease]] = []
        claimed: list[list[L1Object]] = []
        skipped: dict[str, int] = {}
        for g, hashes in enumerate(wanted):
            table = self.object_space(space, g)
            lease, known, no_room = self.l1.reserve_write(table, hashes)
            if no_room:
                left = [h for h in hashes if h not in table.objects and h not in table.staging]
                self.journal.note("l1", "skipped", "l1_full", [ObjectKey(space.namespace, h, g) for h in left])
            for reason, count in (("known", known), ("l1_full", no_room)):
                if count:
                    skipped[reason] = skipped.get(reason, 0) + count
            claimed.append(lease.objects)
            if lease.objects:
                leases.append((g, lease))
        for reason, count in skipped.items():
            self.metrics.add("store_skipped_chunks", count, reason)
        if not leases:
            return Claim(0, claimed, skipped)
        parents: dict[bytes, bytes] = {}
        if self.manager.hooks.listens("stored"):
            parents = dict(zip(chain[1:], chain, strict=False))
        plan_id = next(self._plan_ids)
        with self._lock:
            self._plans[plan_id] = _Plan(space, leases, parents, self.decisions.latest(request))
        return Claim(plan_id, claimed, skipped)

    def publish(self, plan_id: int, ok: bool = True) -> None:
        """See `Engine.publish`."""
        if self.manager.closed:
            return
        with self._lock:
            plan = self._plans.pop(plan_id, None)
        if plan is None:
            return
        space, leases, parents, decision = plan
        stores, hooks = self.manager.stores, self.manager.hooks
        for group, lease in leases:
            if not ok:
                self.journal.note("l1", "failed", "copy", list(lease.objects), "store")
            with self.manager.residents.in_order():
                published, read = self.l1.finish_write(lease, ok, read=stores.active)
                if published and hooks.listens("stored"):
                    hooks.stored([self._event(o, space, parents) for o in published])
            if not published:
                continue
            self.metrics.add("stored_chunks", len(published))
            self.journal.note("l1", "stored", "", published)
            if decision is not None:
                decision.stored += len(published)
            if stores.active:
                stores.offer(published, read, space.groups[group])
            if stores.selective:
                stores.published(published, space.groups[group])
        self.manager.spill.wake()

    def disown(self, plan_id: int) -> None:
        """The engine that has the plan is gone, but a copy may still be under way: the plan's keys are free again, its
        slots only with `publish`, which then publishes nothing."""
        with self._lock:
            plan = self._plans.get(plan_id)
        for _, lease in plan.leases if plan is not None else ():
            self.l1.disown(lease)

    def prefilled(self, space: Space, tokens: int, seconds: float) -> None:
        """See `Engine.prefilled`."""
        self.manager.admission.prefilled(space.spec.computed_as, tokens, seconds)

    # -- the rest ----------------------------------------------------------------------------------------------------

    def descriptor(self) -> dict[str, Any] | None:
        """See `Engine.descriptor`."""
        assert self.manager.arena is not None
        return dict(self.manager.arena.descriptor)

    def clear(self, space: Space, most: int | None = None) -> int:
        """See `Engine.clear`. At most so many."""
        return 0 if self.manager.closed else self.l1.clear(space.namespace, most)

    def drain(self, timeout_s: float = 10.0) -> int:
        """See `Engine.drain`."""
        if self.manager.closed:
            return 0
        future = self.draining(timeout_s)
        try:
            return future.result(timeout_s + SLACK_S)
        except TimeoutError:  # a plugin blocks the tiers' loop
            future.cancel()
            return sum(objects for objects, _ in self.manager.stores.waiting().values())
        except CancelledError:  # it was closed meanwhile
            return 0

    def draining(self, timeout_s: float) -> "Future[int]":
        """The same, without waiting."""
        return self.manager.loop.submit(self.manager.stores.drain(timeout_s))

    @property
    def tiers(self) -> dict[str, str]:
        """See `Engine.tiers`."""
        return self.manager.tier_plugins

    def object_space(self, space: Space, group: int) -> ObjectSpace:
        """L1's table for one group of a registered model."""
        return self._object_spaces[space.namespace, group]

    def pin(self, space: Space, hashes: Sequence[bytes], seconds: float) -> int:
        """Keep the chunks at the front of `hashes` in L1 for `seconds` from now, whatever else comes; how many are.

        Those that are resident: look them up and `retrieve` them first. Pins hold at most half of what the tenant can
        rely on (of L1, where it is not divided), and count as leased. A pin that is there ends at the new time.
        """
        if self.manager.closed:
            return 0
        pinned = [self.l1.pin(self.object_space(space, g), hashes, seconds) for g in range(len(space.groups))]
        self.manager.stir()
        return min(pinned)

    def unpin(self, space: Space, hashes: Sequence[bytes]) -> int:
        """End the pins of these chunks; how many had one."""
        if self.manager.closed:
            return 0
        return max(self.l1.unpin(self.object_space(space, g), hashes) for g in range(len(space.groups)))

    def tenants(self) -> dict[str, dict[str, Usage]]:
        """Tenant -> place (`l1` or a tier's name) -> bytes it holds and has leased, its quota and its share. Only
        places in which anybody has a quota. Raises `TimeoutError` when a plugin blocks the tiers."""
        return {} if self.manager.closed else self.manager.tenancy.usage()

    def tenant_defaults(self) -> dict[str, Usage]:
        """Place -> the quota and share of each tenant without a quota of its own, and what all of those hold together.
        Otherwise as `tenants`."""
        return {} if self.manager.closed else self.manager.tenancy.defaults()

    def set_quota(self, tenant: str, place: str, nbytes: int | None) -> None:
        """Change a tenant's quota while the cache serves; None takes it away. Tenant `default`: that of all others.

        Who is over it gives up objects when room is needed. Raises `ConfigError` for a place that is not there, is not
        divided, or is smaller.
        """
        self.set_quotas(tenant, {place: nbytes})

    def set_quotas(self, tenant: str, quotas: Mapping[str, int | None]) -> None:
        """The same for several places: all of them change, or, with the error, none."""
        if not self.manager.closed:
            self.manager.tenancy.set_quotas(tenant, quotas)

    def metrics_text(self) -> str:
        """All metrics in the Prometheus text format."""
        return self.metrics.text()

    def stats(self) -> dict[str, float]:
        """All metrics as a flat dict, histogram buckets aside."""
        return self.metrics.values()

    def close(self) -> None:
        """Write out what waits (for a bounded time) and release everything. Idempotent."""
        self._presence.close()

    def observe(self, name: str, observer: Any) -> None:
        """Have `observer`'s methods `stored(events)`, `evicted(events)` and so on called, as those of `hooks:` are."""
        self.manager.hooks.add(name, observer)
        self.manager.residents.watch()
        self.prefetcher.watch()

    def _forget(self, gone: Sequence[ObjectSpace]) -> None:
        with self._lock:
            for space in gone:
                if self._object_spaces.get((space.namespace, space.group)) is space:
                    del self._object_spaces[space.namespace, space.group]

    def _event(self, obj: L1Object, space: Space, parents: Mapping[bytes, bytes]) -> ObjectEvent:
        return ObjectEvent(obj.key, "l1", obj.space.nbytes, "", parents.get(obj.chunk_hash), space.chunk_tokens)
