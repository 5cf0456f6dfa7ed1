"""Tenants of one L1, driven in any order beside plain books. Run by test_l1_tenants.py.

After every step the rights of each tenant are checked against the books: who is within its share has lost nothing
through others, is refused nothing that its share covers, and nobody has leased another's share.
"""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kvcore.builtin.eviction_fifo import FifoPolicy
from kvcore.builtin.eviction_lfu import LfuPolicy
from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.builtin.eviction_s3fifo import S3FifoPolicy
from kvcore.l1 import L1, Arena, L1Object, ReadLease, WriteLease
from kvcore.l1.allocator import ALIGN
from kvcore.tenants import Division

PAGES = 32
LEASE_S = 10.0
TTL_S = 45.0
NAMED = {"a": 12 * ALIGN, "b": 6 * ALIGN}
OTHERS = ["", "u", "v", "w"]
TENANTS = [*NAMED, *OTHERS]
HASHES = [bytes([i]) * 32 for i in range(24)]


@dataclass(eq=False)
class Held:
    """A lease and whose it is."""

    tenant: str
    lease: Any
    objects: list[L1Object] = field(default_factory=list)


class TenantsMachine(RuleBasedStateMachine):
    """Objects of one page each, so that room is a number of bytes and nothing else."""

    sizes: tuple[int, ...] = (ALIGN,)
    reads = Bundle("reads")
    writes = Bundle("writes")

    @initialize(
        policy=st.sampled_from([LruPolicy, LfuPolicy, FifoPolicy, S3FifoPolicy]),
        default=st.sampled_from([None, 4 * ALIGN, 20 * ALIGN]),
        ttl_s=st.sampled_from([None, TTL_S]),
    )
    def start(self, policy: Any, default: int | None, ttl_s: float | None) -> None:
        self.now = 1000.0
        self.quotas = dict(NAMED)
        self.default = default
        self.lowered = False
        self.gone: list[L1Object] = []
        self.open: list[Held] = []
        self.pins: dict[L1Object, float] = {}
        self.quarantined: list[Held] = []
        self.arena = Arena(PAGES * ALIGN)
        self.l1 = L1(
            self.arena,
            policy(None, None),
            lease_s=LEASE_S,
            on_evict=self.gone.extend,
            clock=lambda: self.now,
            division=Division(NAMED, default, lambda: policy(None, None)),
            ttl_s=ttl_s,
        )
        self.spaces = {
            (t, s): self.l1.space(bytes([i, s]) * 8, 0, size, t)
            for i, t in enumerate(TENANTS)
            for s, size in enumerate(self.sizes)
        }

    def teardown(self) -> None:
        if not hasattr(self, "l1"):
            return
        for held in [*self.open, *self.quarantined]:
            if isinstance(held.lease, ReadLease):
                self.l1.end_read(held.lease)
            else:
                self.l1.finish_write(held.lease, ok=False)
        for space in self.spaces.values():
            self.l1.unpin(space, HASHES)
        self.now += 1000
        self.l1.reap()
        for usage in self.l1.tenants().values():
            assert usage.pinned == 0, "somebody still leases what nobody leases"
        for space in self.spaces.values():
            self.l1.clear(space.namespace)
        assert self.l1.free_bytes == PAGES * ALIGN, "a slot is lost"
        assert all(u.used == 0 for u in self.l1.tenants().values())
        self.arena.close()

    # -- what tenants do ---------------------------------------------------------------------------------------------

    @rule(
        target=writes,
        tenant=st.sampled_from(TENANTS),
        s=st.integers(0, 1),
        first=st.integers(0, 20),
        count=st.integers(1, 16),
        temporary=st.booleans(),
    )
    def reserve_write(self, tenant: str, s: int, first: int, count: int, temporary: bool) -> Any:
        return self.reserve(tenant, s, HASHES[first : first + count], temporary) or multiple()

    def reserve(self, tenant: str, s: int, hashes: list[bytes], temporary: bool) -> Held | None:
        space = self.spaces[tenant, s % len(self.sizes)]
        self.settle()
        before = self.l1.tenants()
        wanted = [h for h in hashes if h not in space.objects and h not in space.staging]
        lease, _, no_room = self.l1.reserve_write(space, hashes, temporary=temporary)
        self.check_losses(tenant, before)
        nbytes = len(wanted) * space.slot_bytes
        mine, share = before[tenant], self.l1.tenants()[tenant].share
        covered = mine.used + nbytes <= share and mine.pinned + nbytes <= share
        if tenant in self.quotas and covered and len(self.sizes) == 1 and not self.lowered:
            assert no_room == 0, "refused what its share covers"
        if not lease.objects:
            return None
        held = Held(tenant, lease, list(lease.objects))
        self.open.append(held)
        return held

    @rule(tenant=st.sampled_from(TENANTS), s=st.integers(0, 1), count=st.integers(8, 24))
    def store(self, tenant: str, s: int, count: int) -> None:
        """What fills the arena: a whole prompt."""
        write = self.reserve(tenant, s, HASHES[:count], temporary=False)
        if write is not None:
            self.finish(write, ok=True, read=False)

    @rule(target=reads, write=writes, ok=st.booleans(), read=st.booleans())
    def finish_write(self, write: Held, ok: bool, read: bool) -> Any:
        return self.finish(write, ok, read)

    def finish(self, write: Held, ok: bool, read: bool) -> Any:
        published, lease = self.l1.finish_write(write.lease, ok, read=read)
        for books in (self.open, self.quarantined):
            if write in books:
                books.remove(write)
        assert all(o.space.tenant == write.tenant for o in published)
        return self.lease(write.tenant, lease)

    @rule(
        target=reads, tenant=st.sampled_from(TENANTS), s=st.integers(0, 1), first=st.integers(0, 20), each=st.booleans()
    )
    def read(self, tenant: str, s: int, first: int, each: bool) -> Any:
        space, hashes = self.spaces[tenant, s % len(self.sizes)], HASHES[first : first + 4] * 2
        self.settle()
        before = self.l1.tenants()
        lease = self.l1.reserve_each(space, hashes)[0] if each else self.l1.reserve_read(space, hashes)
        assert all(o.space is space for o in lease.objects), "saw another's objects"
        self.check_losses(tenant, before)
        return self.lease(tenant, lease)

    @rule(read=reads, keep=st.booleans())
    def end_read(self, read: Held, keep: bool) -> None:
        if keep:
            self.l1.keep(read.lease)
        self.l1.end_read(read.lease)
        if read in self.open:
            self.open.remove(read)

    @rule(tenant=st.sampled_from(TENANTS), first=st.integers(0, 20), seconds=st.sampled_from([1.0, 30.0, 500.0]))
    def pin(self, tenant: str, first: int, seconds: float) -> None:
        space = self.spaces[tenant, 0]
        pinned = HASHES[first : first + 4][: self.l1.pin(space, HASHES[first : first + 4], seconds)]
        self.pins |= {space.objects[h]: self.now + seconds for h in pinned}

    @rule(tenant=st.sampled_from(TENANTS), first=st.integers(0, 20))
    def unpin(self, tenant: str, first: int) -> None:
        space = self.spaces[tenant, 0]
        there = [o for h in HASHES[first : first + 4] if (o := space.objects.get(h)) in self.pins]
        assert self.l1.unpin(space, HASHES[first : first + 4]) == len(there)
        for obj in there:
            del self.pins[obj]

    # -- what happens to them ----------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 1.0, LEASE_S, 70.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule(tenant=st.sampled_from([*NAMED, "u"]), pages=st.sampled_from([None, 0, 3, 12, 20]))
    def set_quota(self, tenant: str, pages: int | None) -> None:
        self.l1.set_quota(tenant, None if pages is None else pages * ALIGN)
        self.quotas = {t: q for t, q in self.quotas.items() if t != tenant}
        if pages is not None:
            self.quotas[tenant] = pages * ALIGN
        self.lowered = True  # what was leased by right stays so, though it may be more than the new share
        self.settle()

    @rule(tenant=st.sampled_from(TENANTS))
    def clear(self, tenant: str) -> None:
        space = self.spaces[tenant, 0]
        ended = {o for o in self.pins if space.objects.get(o.chunk_hash) is o}
        self.l1.clear(space.namespace)
        self.pins = {o: end for o, end in self.pins.items() if o not in ended}

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "l1"):
            return
        self.settle()
        usages = self.l1.tenants()
        assert sum(u.used for u in usages.values()) + self.l1.free_bytes == PAGES * ALIGN
        for tenant, usage in usages.items():
            mine = [s for (t, _), s in self.spaces.items() if t == tenant]
            held: dict[int, L1Object] = {id(o): o for s in mine for o in (*s.objects.values(), *s.staging.values())}
            leased = {id(o): o for h in (*self.open, *self.quarantined) if h.tenant == tenant for o in h.objects}
            leased |= {id(o): o for o in self.pins if o.space.tenant == tenant}
            held |= leased
            assert usage.used == sum(o.space.slot_bytes for o in held.values())
            assert usage.pinned == sum(o.space.slot_bytes for o in leased.values())

    @invariant()
    def nobody_leases_anothers_share(self) -> None:
        if not hasattr(self, "l1") or self.lowered:
            return
        usages = self.l1.tenants()
        for tenant in self.quotas:
            assert usages[tenant].pinned <= usages[tenant].share
        rest = PAGES * ALIGN - sum(usages[t].share for t in self.quotas)
        assert sum(u.pinned for t, u in usages.items() if t not in self.quotas) <= rest

    @invariant()
    def shares_fit(self) -> None:
        if hasattr(self, "l1"):
            holders = [u for t, u in self.l1.tenants().items() if u.used or t in self.quotas]
            assert sum(u.share for u in holders) <= PAGES * ALIGN

    # -- helpers -----------------------------------------------------------------------------------------------------

    def check_losses(self, asking: str, before: Any) -> None:
        """What was evicted for `asking` was its own, or of tenants that were over their shares, down to those."""
        largest = max(s.slot_bytes for s in self.spaces.values())
        after = self.l1.tenants()
        losers = {o.space.tenant for o in self.gone} - {asking}
        self.gone.clear()
        for loser in losers:
            share = min(before[loser].share, after[loser].share) if loser in self.quotas else after[loser].share
            assert before[loser].used > share, "lost an object while within its share"
            assert after[loser].used > share - largest, "lost more than it had over its share"

    def lease(self, tenant: str, lease: ReadLease) -> Any:
        if not lease.objects:
            return multiple()
        held = Held(tenant, lease, list(lease.objects))
        self.open.append(held)
        return held

    def settle(self) -> None:
        """Have what has run out ended, here and there."""
        self.l1.reap()
        for held in [h for h in self.open if h.lease.ended]:
            self.open.remove(held)
            if isinstance(held.lease, WriteLease):
                self.quarantined.append(held)
        found = {o for space in self.spaces.values() for o in space.objects.values()}
        self.pins = {o: end for o, end in self.pins.items() if end > self.now and o in found}
        if self.lowered:
            usages = self.l1.tenants()
            named = [u for t, u in usages.items() if t in self.quotas]
            others = sum(u.pinned for t, u in usages.items() if t not in self.quotas)
            self.lowered = any(u.pinned > u.share for u in named) or others > PAGES * ALIGN - sum(
                u.share for u in named
            )


class MixedSizesMachine(TenantsMachine):
    """Objects of one and of three pages: free bytes are not always a hole, all else holds."""

    sizes = (ALIGN, 3 * ALIGN)
