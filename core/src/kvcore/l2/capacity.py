"""What a tier holds, for storages that do not say it themselves: how much, of whom, how old, and who goes first."""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence

from kvcore.api import Entry, EvictionPolicy, ObjectKey
from kvcore.tenants import Account, Division, Shares, Usage

_UNBOUNDED = 1 << 62
_FEW_ENDS = 1024


class Capacity:
    """The account of one tier. Used from one event loop.

    It knows what this process has stored and what the storage listed at open, so it survives a restart. Of a shared
    storage each process has an account of its own, brought in line by listing again.

    Args:
        nbytes: the limit; frames count as stored, headers included. None: the storage looks after that itself.
        policy: who goes first. With `division`, of objects that belong to no tenant yet.
        division: how the tier is divided among tenants; without a limit, a quota is the most that a tenant may hold.
            None: it is not divided.
        ttl_s: how long an object may stay; None: as long as there is room.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        nbytes: int | None,
        policy: EvictionPolicy,
        *,
        division: Division | None = None,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limit = nbytes
        self.used = 0
        self.coming = 0
        """Bytes that are being written."""
        self.ttl_s = ttl_s
        self._clock = clock
        self._nobody = _Account("", policy)
        self._shares: Shares[_Account] | None = None
        if division is not None:
            make: Callable[[str], _Account] = lambda t: _Account(t, division.make_policy())  # noqa: E731
            self._shares = Shares(nbytes or _UNBOUNDED, division.quotas, division.default, make)
        self._held: dict[bytes, _Held] = {}
        self._ends: dict[ObjectKey, float] = {}
        self._next_ends: list[tuple[float, ObjectKey]] = []  # a heap; what `_ends` contradicts is out of date

    def __len__(self) -> int:
        return sum(len(held.sizes) for held in self._held.values())

    # -- what is there -----------------------------------------------------------------------------------------------

    def add(self, entries: Iterable[Entry], stored: bool = False) -> None:
        """Objects that the storage holds; `stored`: as of now, so their tenants use it."""
        new: dict[bytes, dict[ObjectKey, int]] = {}
        written: set[bytes] = set()
        for entry in entries:
            if not _sound(entry):
                continue
            if stored:
                written.add(entry.key.namespace)
            size = self._size(entry.key)
            if size != entry.nbytes:  # new, or stored anew by others, longer or shorter
                new.setdefault(entry.key.namespace, {})[entry.key] = entry.nbytes
            if self.ttl_s is not None and (stored or size is None):
                now = self._clock()
                since = now if stored or entry.used_s is None else min(now, entry.used_s)
                self._ends[entry.key] = since + self.ttl_s
                heapq.heappush(self._next_ends, (since + self.ttl_s, entry.key))
        if len(self._next_ends) > 2 * len(self._ends) + _FEW_ENDS:  # most of it is of what has left before its time
            self._next_ends = [(end, key) for key, end in self._ends.items()]
            heapq.heapify(self._next_ends)
        for namespace, sizes in new.items():
            held = self._held_of(namespace)
            before = sum(held.sizes.get(key, 0) for key in sizes)
            held.sizes.update(sizes)
            held.account.policy.insert(list(sizes), list(sizes.values()))
            self._count(held.account, sum(sizes.values()) - before)
        for namespace in written:
            self._seen(self._account(namespace))

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Objects that were used."""
        for held, some in self._by_namespace(keys):
            self._seen(held.account)
            held.account.policy.touch(some)

    def remove(self, keys: Iterable[ObjectKey]) -> None:
        """Objects that are gone."""
        for held, some in self._by_namespace(dict.fromkeys(keys)):
            self._count(held.account, -sum(held.sizes.pop(k) for k in some))
            held.account.policy.remove(some)
            for key in some if self.ttl_s is not None else ():
                self._ends.pop(key, None)
            if not held.sizes and not held.bound:
                del self._held[some[0].namespace]
                self._left(held.account)

    def kept(self, victims: Sequence[ObjectKey]) -> None:
        """Deleting these has failed: they may be named again."""
        for held, some in self._by_namespace(victims):
            held.account.policy.insert(some, [held.sizes[k] for k in some])

    def known(self) -> set[ObjectKey]:
        """The keys now in the account."""
        return {key for held in self._held.values() for key in held.sizes}

    def entries(self, keys: Sequence[ObjectKey]) -> list[Entry]:
        """Those of `keys` that are known, with their sizes."""
        return [Entry(k, size) for k in keys if (size := self._size(k)) is not None]

    # -- room --------------------------------------------------------------------------------------------------------

    def expect(self, namespace: bytes, nbytes: int) -> None:
        """So many bytes are being written (or, negative, are so no longer)."""
        self.coming += nbytes
        account = self._account(namespace)
        account.coming += nbytes
        if self._shares is not None and account is not self._nobody:
            self._shares.add(account, nbytes)

    def most(self, namespace: bytes) -> int:
        """Bytes of this namespace that can be there at once, at best."""
        account, limit = self._account(namespace), _UNBOUNDED if self.limit is None else self.limit
        if self._shares is None or account is self._nobody:
            return limit
        return max(self._shares.share(account), min(limit, self._shares.quota(account)))

    def waits(self, namespace: bytes) -> bool:
        """Something is being written that can be deleted once it is there. Of a tenant's own, where there are any."""
        return bool(self.coming if self._shares is None else self._account(namespace).coming)

    def missing(self, namespace: bytes, nbytes: int) -> int:
        """By how many bytes `nbytes` more of this namespace would not fit. Not above 0: they may be written."""
        if self.limit is not None:
            return self.used + self.coming + nbytes - self.limit
        account = self._account(namespace)
        if self._shares is None or account is self._nobody:
            return -_UNBOUNDED
        return account.used + nbytes - self._shares.quota(account)

    def victims(self, namespace: bytes, nbytes: int, most: int = _UNBOUNDED) -> list[ObjectKey]:
        """Whom to delete so that `nbytes` more of this namespace fit, `most` of them at once; they count until they are
        removed, and are known until then. Say when they are `kept`.

        Fewer than needed when there is nobody left, or only objects of tenants that are within their shares.
        """
        over = self.missing(namespace, nbytes)
        if over <= 0:
            return []
        account = self._account(namespace)
        if self._shares is None or (account is self._nobody and self._nobody.used):
            return self._choose(self._nobody, over, most)
        if self.limit is None:
            return self._choose(account, over, most)
        asking = None if account is self._nobody else account
        within = asking is None or asking.used + nbytes <= self._shares.quota(asking)
        if within and self._nobody.used and (chosen := self._choose(self._nobody, over, most)):
            return chosen
        for donor, gives in self._shares.donors(asking, nbytes):
            chosen = self._choose(donor, min(over, gives), most)
            if chosen:
                return chosen
        return []

    @property
    def divided(self) -> bool:
        """Tenants have quotas."""
        return self._shares is not None

    def namespaces(self) -> list[bytes]:
        """One namespace for each tenant that holds something."""
        return list({held.account.tenant: namespace for namespace, held in self._held.items()}.values())

    # -- tenants -----------------------------------------------------------------------------------------------------

    def bind(self, namespace: bytes, tenant: str) -> None:
        """Objects of this namespace are the tenant's."""
        if self._shares is None:
            return
        held = self._held_of(namespace)
        held.bound = True
        if held.account is not self._nobody:
            return
        sizes, nbytes = list(held.sizes.values()), sum(held.sizes.values())
        self._nobody.policy.remove(list(held.sizes))
        self._count(self._nobody, -nbytes)
        held.account = self._shares.account(tenant)
        held.account.namespaces += 1
        held.account.policy.insert(list(held.sizes), sizes)
        self._count(held.account, nbytes)

    def unbind(self, namespace: bytes) -> None:
        """Nobody uses this namespace any more. What is there stays its tenant's; one with nothing is forgotten."""
        held = self._held.get(namespace)
        if held is not None:
            held.bound = False
            if not held.sizes:
                del self._held[namespace]
                self._left(held.account)

    def tenants(self) -> dict[str, Usage]:
        """Each tenant's part; empty when the tier is not divided."""
        return {} if self._shares is None else self._shares.usage()

    def others(self) -> Usage | None:
        """See `Shares.others`; None when the tier is not divided."""
        return None if self._shares is None else self._shares.others()

    def set_quota(self, tenant: str | None, nbytes: int | None) -> None:
        """See `Shares.set_quota`. Nothing for a tier that is not divided."""
        if self._shares is not None:
            self._shares.set_quota(tenant, nbytes)

    # -- age ---------------------------------------------------------------------------------------------------------

    def expired(self, key: ObjectKey) -> bool:
        """The object's time is over: it counts as absent."""
        return self.ttl_s is not None and self._ends.get(key, float("inf")) <= self._clock()

    def due(self, most: int) -> list[ObjectKey]:
        """Up to `most` objects whose time is over. They are named again until they are removed."""
        now, found = self._clock(), dict[ObjectKey, float]()
        while self._next_ends and len(found) < most and self._next_ends[0][0] <= now:
            end, key = heapq.heappop(self._next_ends)
            if self._ends.get(key) == end:
                found[key] = end
        for key, end in found.items():
            heapq.heappush(self._next_ends, (end, key))
        return list(found)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _held_of(self, namespace: bytes) -> "_Held":
        held = self._held.get(namespace)
        if held is None:
            held = self._held[namespace] = _Held(self._nobody)
        return held

    def _account(self, namespace: bytes) -> "_Account":
        held = self._held.get(namespace)
        return self._nobody if held is None else held.account

    def _seen(self, account: "_Account") -> None:
        if self._shares is not None and account is not self._nobody:
            self._shares.seen(account)

    def _size(self, key: ObjectKey) -> int | None:
        held = self._held.get(key.namespace)
        return None if held is None else held.sizes.get(key)

    def _by_namespace(self, keys: Iterable[ObjectKey]) -> list[tuple["_Held", list[ObjectKey]]]:
        """Those that are known."""
        found: dict[bytes, list[ObjectKey]] = {}
        for key in keys:
            if self._size(key) is not None:
                found.setdefault(key.namespace, []).append(key)
        return [(self._held[namespace], some) for namespace, some in found.items()]

    def _count(self, account: "_Account", nbytes: int) -> None:
        self.used += nbytes
        if self._shares is not None and account is not self._nobody:
            self._shares.add(account, nbytes)
        else:
            account.used += nbytes

    def _left(self, account: "_Account") -> None:
        if self._shares is not None and account is not self._nobody:
            account.namespaces -= 1
            if not account.namespaces and not account.used:
                self._shares.forget(account)

    def _choose(self, account: "_Account", nbytes: int, most: int) -> list[ObjectKey]:
        mine: dict[ObjectKey, int] = {}
        # One by one: whom the policy has named and who is not deleted now would count as used.
        while nbytes > 0 and len(mine) < most and (named := account.policy.evict(1, _never)):
            for key in named:
                if not isinstance(key, ObjectKey) or (size := self._size(key)) is None:
                    continue
                if self._held[key.namespace].account is account:
                    mine[key] = size
                    nbytes -= size
        return list(mine)


class _Account(Account):
    """One tenant's objects in the order in which they go."""

    def __init__(self, tenant: str, policy: EvictionPolicy) -> None:
        super().__init__(tenant)
        self.policy = policy
        self.namespaces = 0
        """Namespaces that are known to be its."""
        self.coming = 0


class _Held:
    """One namespace's objects. `bound`: somebody uses it."""

    __slots__ = ("account", "bound", "sizes")

    def __init__(self, account: _Account) -> None:
        self.account = account
        self.sizes: dict[ObjectKey, int] = {}
        self.bound = False


def _sound(entry: Entry) -> bool:
    """What a plugin lists need not be."""
    return isinstance(entry.key, ObjectKey) and isinstance(entry.nbytes, int) and entry.nbytes >= 0


def _never(key: object) -> bool:
    return False
