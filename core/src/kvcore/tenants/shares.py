"""The division of one place (L1, or a tier) among tenants.

A **quota** is what a tenant is given, its **share** what it can rely on: its quota, scaled down where the quotas exceed
the place. Memory that nobody needs may be borrowed beyond both. Who is within its share never loses an object through
others and is never refused what its share covers, except while others hold leases, which are bounded by the share, too.

Tenants with a quota of their own come first. All others have the quota `default` each, and together what the named
ones leave: so however many names somebody invents, the named tenants' shares stay. Of the others, those that have not
used the place for `IDLE_S` give first, the longest unused before the rest.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from kvcore.api import EvictionPolicy

IDLE_S = 60.0
"""A tenant without a quota of its own that has not used the place for so long has no share of it."""
_PINNED_PART = 8
"""Of what tenants without a quota of their own have not leased, each may lease one part in so many in any case."""


class Usage(NamedTuple):
    """A tenant's part of one place, in bytes: what it holds, how much of that is leased, its quota and its share."""

    used: int
    pinned: int
    quota: int
    share: int


class Division(NamedTuple):
    """How a place is divided at the start.

    Args:
        quotas: bytes by tenant.
        default: bytes for each other tenant; None: what the named ones leave.
        make_policy: an eviction policy for one more tenant.
        spare: bytes of the place that are not shared out, because they are kept free.
    """

    quotas: Mapping[str, int]
    default: int | None
    make_policy: Callable[[], EvictionPolicy]
    spare: int = 0


class Account:
    """What one tenant holds of one place, in bytes. Changed by `Shares` only, under its owner's lock."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.used = 0
        self.pinned = 0
        """Of these, what cannot be evicted now: being written or read."""
        self.quota: int | None = None
        """Its own, or None: it has `default`."""
        self.share = 0
        """Of a quota of its own."""
        self.seen_s = 0.0
        self.level = 0
        """The length of `used` in bits: the row of the table of the largest."""


A = TypeVar("A", bound=Account)


class Shares(Generic[A]):
    """All accounts of one place. Not thread-safe. Every operation takes constant time, however many tenants there are,
    but for `donors`, which looks at each tenant with a quota of its own, at the idle ones, and of the others at those
    who hold about as much as their share.

    Args:
        size: bytes that can be shared out.
        quotas: by tenant.
        default: what every other tenant is given; None: what the named ones leave.
        make: a new account.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        size: int,
        quotas: Mapping[str, int],
        default: int | None,
        make: Callable[[str], A],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self.accounts: dict[str, A] = {}
        self.default = default
        self._quotas = dict(quotas)
        self._make = make
        self._clock = clock
        self._named: dict[str, A] = {}
        self._active: OrderedDict[str, A] = OrderedDict()  # of the others, the longest unused first
        self._idle: OrderedDict[str, A] = OrderedDict()
        self._others_pinned = 0
        self._levels: dict[int, OrderedDict[str, A]] = {}  # of the active others, by the length of `used` in bits
        self._rest = size
        self._scale()

    # -- accounts ----------------------------------------------------------------------------------------------------

    def account(self, tenant: str) -> A:
        """The tenant's account, made at first use."""
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = self._make(tenant)
            if tenant in self._quotas:
                self._name(account)
            else:
                self.seen(account)
        return account

    def seen(self, account: A) -> None:
        """The tenant uses the place."""
        if account.quota is not None:
            return
        account.seen_s = self._clock()
        if account.tenant in self._active:
            self._active.move_to_end(account.tenant)
            return
        self._idle.pop(account.tenant, None)
        self._active[account.tenant] = account
        self._levels.setdefault(account.level, OrderedDict())[account.tenant] = account

    def forget(self, account: A) -> None:
        """The tenant has gone: it holds nothing, and nobody refers to it. It may come again."""
        del self.accounts[account.tenant]
        self._named.pop(account.tenant, None)
        self._leave_others(account)

    def set_quota(self, tenant: str | None, nbytes: int | None) -> None:
        """Give a tenant a quota of its own, or take it away (None). Tenant None: what all others are given each; None
        then: what the named ones leave."""
        if tenant is None:
            self.default = nbytes
        elif nbytes is None:
            self._quotas.pop(tenant, None)
        else:
            self._quotas[tenant] = nbytes
        self._scale()
        account = self.accounts.get(tenant) if tenant is not None else None
        if account is None:
            return
        if nbytes is not None:
            if account.quota is None:
                self._leave_others(account)
                self._others_pinned -= account.pinned
            self._name(account)
        elif account.quota is not None:
            account.quota, account.share = None, 0
            del self._named[account.tenant]
            self._others_pinned += account.pinned
            self.seen(account)

    # -- bytes -------------------------------------------------------------------------------------------------------

    def add(self, account: A, nbytes: int) -> None:
        """The tenant holds so much more, or less."""
        account.used += nbytes
        level = account.used.bit_length()
        if level != account.level:
            self._leave_level(account)
            account.level = level
            if account.tenant in self._active:
                self._levels.setdefault(level, OrderedDict())[account.tenant] = account

    def pin(self, account: A, nbytes: int) -> None:
        """So many bytes more, or fewer, of what it holds are leased."""
        account.pinned += nbytes
        if account.quota is None:
            self._others_pinned += nbytes

    def may_pin(self, account: A) -> int:
        """Bytes that the tenant may lease beside those it has leased. Negative when its share has become smaller."""
        if account.quota is not None:
            return account.share - account.pinned
        left = self._rest - self._others_pinned
        part = left // _PINNED_PART
        if self.default is not None:
            part = min(part, self.default)
        return min(left, max(self.share(account), part) - account.pinned)

    # -- rights ------------------------------------------------------------------------------------------------------

    def quota(self, account: A) -> int:
        """Bytes that the tenant is given."""
        if account.quota is not None:
            return account.quota
        return self._rest if self.default is None else self.default

    def share(self, account: A) -> int:
        """Bytes that the tenant can rely on."""
        if account.quota is not None:
            return account.share
        self._retire()
        if account.tenant not in self._active:
            return 0
        return self._share_of_others(account)

    def donors(self, asking: A | None, step: int = 1) -> Iterator[tuple[A, int]]:
        """Whose objects make room for `asking` (None: for nobody), in turn, and how many bytes each has to give.

        Those of idle tenants first, then of the tenant most over its share, as it is when the turn comes (of the
        others by powers of two); at last, or when `step` bytes more would be over its quota, its own.
        """
        self._retire()
        for account, most in chain(self._given_up(asking), self._over_share(asking)):
            left = most if asking is None else min(most, self.quota(asking) - asking.used)
            if asking is not None and left < min(step, most):
                break
            yield account, left
        if asking is not None and asking.used:
            yield asking, asking.used

    def usage(self) -> dict[str, Usage]:
        """All tenants, for people; those with a quota of their own also when they hold nothing."""
        absent = {
            tenant: Usage(0, 0, quota, self._shares[tenant])
            for tenant, quota in self._quotas.items()
            if tenant not in self.accounts
        }
        return absent | {
            tenant: Usage(account.used, account.pinned, self.quota(account), self.share(account))
            for tenant, account in self.accounts.items()
        }

    def others(self) -> Usage:
        """What tenants without a quota of their own have, for people: `used` and `pinned` of all of them together, and
        the quota and the share that each has."""
        self._retire()
        used = sum(account.used for account in self.accounts.values() if account.quota is None)
        quota = self._rest if self.default is None else self.default
        return Usage(used, self._others_pinned, quota, self._share_of_others(None))

    # -- the table ---------------------------------------------------------------------------------------------------

    def _scale(self) -> None:
        """The named tenants' shares; those of the others change with every one that comes and goes."""
        default = self.default or 0
        wanted = sum(self._quotas.values()) + default
        shares = {t: q if wanted <= self.size else q * self.size // wanted for t, q in self._quotas.items()}
        self._rest = self.size - sum(shares.values())
        self._shares = shares
        for tenant, account in self._named.items():
            if tenant in shares:
                account.share = shares[tenant]

    def _name(self, account: A) -> None:
        account.quota, account.share = self._quotas[account.tenant], self._shares[account.tenant]
        self._named[account.tenant] = account

    def _given_up(self, asking: A | None) -> Iterator[tuple[A, int]]:
        for account in list(self._idle.values()):
            if account.used and account is not asking:
                yield account, account.used

    def _over_share(self, asking: A | None) -> Iterator[tuple[A, int]]:
        """Ends where `asking` is the one most over its share."""
        named = dict(self._named)
        their_share = self._share_of_others(asking)
        others = self._others_over(their_share)
        other = next(others, None)
        while True:
            best, best_share = asking, self.share(asking) if asking is not None else 0
            if best is not None and best.used <= best_share:
                best = None
            for account in named.values() if other is None else (*named.values(), other):
                share = their_share if account is other else account.share
                if account.used > share and (best is None or account.used * best_share > best.used * share):
                    best, best_share = account, share
            if best is None or best is asking:
                return
            yield best, best.used - best_share
            if best is other:
                other = next(others, None)
            else:
                del named[best.tenant]

    def _others_over(self, share: int) -> Iterator[A]:
        """From the highest row down; in a row, whose turn was longest ago comes first."""
        for level in sorted((x for x in self._levels if x >= share.bit_length()), reverse=True):
            row = self._levels.get(level) or OrderedDict()  # who asks may have been alone in it, and have grown
            for _ in range(len(row)):
                if not row:  # they have given, and stand in other rows now
                    break
                tenant, account = next(iter(row.items()))
                row.move_to_end(tenant)
                if account.used > share:
                    yield account

    def _share_of_others(self, asking: A | None) -> int:
        """The share of each who has no quota of its own and holds something, `asking` included."""
        holding = len(self._active) - len(self._levels.get(0, ()))
        joins = asking is not None and asking.quota is None and not asking.used
        share = self._rest // max(1, holding + joins)
        return share if self.default is None else min(share, self.default)

    def _retire(self) -> None:
        then = self._clock() - IDLE_S
        while self._active:
            account = next(iter(self._active.values()))
            if account.seen_s > then:
                return
            del self._active[account.tenant]
            self._leave_level(account)
            self._idle[account.tenant] = account

    def _leave_others(self, account: A) -> None:
        self._active.pop(account.tenant, None)
        self._idle.pop(account.tenant, None)
        self._leave_level(account)

    def _leave_level(self, account: A) -> None:
        row = self._levels.get(account.level)
        if row is not None and row.pop(account.tenant, None) is not None and not row:
            del self._levels[account.level]
