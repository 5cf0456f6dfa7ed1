"""Tenants of one cache: their quotas in every place, whose a namespace is, and when a tenant is forgotten."""

import math
from collections.abc import Callable, Mapping, Sequence

from kvcore.api import ConfigError, EvictionPolicy, ObjectLayout, format_size
from kvcore.config.tenants import DEFAULT_TENANT, MAX_NAME
from kvcore.control.loop import LoopThread
from kvcore.l1 import L1, ObjectSpace
from kvcore.l2 import Capacity, Tier
from kvcore.observe import Metrics
from kvcore.observe.savings import OTHERS
from kvcore.tenants import Division, Usage

ANSWER_S = 2.0
"""How long a question to the tiers' loop may take."""


def division(
    tenants: Mapping[str, Mapping[str, int]], place: str, make_policy: Callable[[], EvictionPolicy], spare: int = 0
) -> Division | None:
    """How `place` (`l1` or a tier's name) is divided; None when nobody has a quota in it."""
    quotas = {t: int(places[place]) for t, places in tenants.items() if place in places}
    if not quotas:
        return None
    default = quotas.pop(DEFAULT_TENANT, None)
    return Division(quotas, default, make_policy, spare)


class Tenancy:
    """Quotas and usage in L1 and the tiers. Thread-safe.

    Args:
        named: the tenants of the configuration.
        layouts: forgotten together with the spaces.
    """

    def __init__(
        self,
        named: Sequence[str],
        l1: L1,
        tiers: Sequence[Tier],
        loop: LoopThread,
        layouts: dict[ObjectSpace, ObjectLayout],
    ) -> None:
        self.held: Callable[[bytes], bool] = lambda namespace: True
        """Whether somebody may still use this namespace."""
        self.forgotten: Callable[[Sequence[ObjectSpace]], None] = lambda spaces: None
        """Told which spaces of L1 are gone."""
        self._named = tuple(sorted(set(named) - {DEFAULT_TENANT}))
        self._given: dict[str, set[str]] = {}
        self._l1 = l1
        self._tiers = tiers
        self._loop = loop
        self._layouts = layouts
        self._tenants: dict[bytes, str] = {}

    def bind(self, namespace: bytes, tenant: str) -> None:
        """Objects of this namespace are the tenant's, also those that the tiers have from earlier."""
        if namespace not in self._tenants:
            self._tenants[namespace] = tenant
            for capacity in self._capacities():
                self._loop.post(capacity.bind, namespace, tenant)

    def tenant(self, namespace: bytes) -> str:
        """Whose it is; nobody's where that is not known. From any thread."""
        return self._tenants.get(namespace, "")

    def bound(self) -> dict[bytes, str]:
        """Namespace -> whose it is, of those that hold something in L1 or that somebody uses. From any thread."""
        return self._tenants.copy()

    @property
    def given(self) -> list[str]:
        """Tenants that were given a quota since the start, and have it. From any thread."""
        return list(self._given)

    def joined(self, tier: Tier) -> None:
        """One more tier is in use. On the tiers' loop."""
        if tier.capacity is not None:
            for namespace, tenant in list(self._tenants.items()):
                tier.capacity.bind(namespace, tenant)

    def forget(self) -> None:
        """Forget what nobody uses and that holds nothing; at little cost when there is little. From any thread."""
        gone = self._l1.forget(lambda space: self.held(space.namespace))
        if not gone:
            return
        self.forgotten(gone)
        for space in gone:
            self._layouts.pop(space, None)
        others = {space.namespace for space in list(self._layouts)}  # other groups' spaces, which hold something
        for namespace in {space.namespace for space in gone} - others:
            if not self.held(namespace) and self._tenants.pop(namespace, None) is not None:
                for capacity in self._capacities():
                    self._loop.post(capacity.unbind, namespace)

    def usage(self) -> dict[str, dict[str, Usage]]:
        """Tenant -> place (`l1` or a tier's name) -> what it holds there and may. Only places that are divided.

        Raises `TimeoutError` when a plugin blocks the tiers' loop.
        """
        found: dict[str, dict[str, Usage]] = {}
        for place, tenants in self._loop.submit(self._asked()).result(ANSWER_S):
            for tenant, usage in tenants.items():
                found.setdefault(tenant, {})[place] = usage
        return found

    def defaults(self) -> dict[str, Usage]:
        """Place -> what each tenant without a quota of its own has there, and what they hold together.

        Raises `TimeoutError` as `usage` does.
        """
        return self._loop.submit(self._asked_defaults()).result(ANSWER_S)

    def set_quotas(self, tenant: str, quotas: Mapping[str, int | None]) -> None:
        """Give a tenant so many bytes of each place from now on; None: as much as those without a quota of their own.

        `default` is what those have; None there: what the others leave. Raises `ConfigError` for a place that is not
        there, is not divided, or is smaller, and for a name that no tenant has; then nothing has changed.
        """
        if len(tenant) > MAX_NAME:
            raise ConfigError(f"a tenant's name has at most {MAX_NAME} characters, not {len(tenant)}")
        changed = {place: self._divided(place, nbytes) for place, nbytes in quotas.items()}
        own = None if tenant == DEFAULT_TENANT else tenant
        given = self._given.get(tenant, set()) - quotas.keys()
        if given := given | {place for place, nbytes in quotas.items() if nbytes is not None}:
            self._given[tenant] = given
        else:
            self._given.pop(tenant, None)
        for place, capacity in changed.items():
            if capacity is None:
                self._l1.set_quota(own, quotas[place])
            else:
                self._loop.post(capacity.set_quota, own, quotas[place])

    def _divided(self, place: str, nbytes: int | None) -> Capacity | None:
        """The capacity of a tier in which a quota of `nbytes` is possible; None: L1. Raises `ConfigError`."""
        tiers = {t.name: t for t in list(self._tiers)}
        capacity = tiers[place].capacity if place in tiers else None
        if place != "l1" and place not in tiers:
            raise ConfigError(f"there is no place {place!r}: the places are {', '.join(['l1', *tiers])}")
        divided = self._l1.divided if place == "l1" else capacity is not None and capacity.divided
        if not divided:
            raise ConfigError(
                f"{place} is not divided among tenants: give at least one of them a quota there in `tenants:`, such as "
                f"`{DEFAULT_TENANT}: {{{place}: 1GiB}}`, and start again"
            )
        size = self._l1.arena.size if capacity is None else capacity.limit
        if nbytes is not None and not 0 <= nbytes <= (math.inf if size is None else size):
            raise ConfigError(f"a quota of {nbytes} bytes does not fit {place}, which has {format_size(size or 0)}")
        return capacity

    def refresh(self, metrics: Metrics) -> None:
        """Bring the tenants' metrics up to date: a series for each named tenant, and one for all others together. On
        the tiers' loop."""
        for place, tenants in self._places():
            used = dict.fromkeys((*self._named, OTHERS), 0)
            for tenant, usage in tenants.items():
                used[tenant if tenant in self._named else OTHERS] += usage.used
                if tenant in self._named:
                    metrics.set("tenant_share_bytes", usage.share, tenant, place)
            for tenant, nbytes in used.items():
                metrics.set("tenant_bytes", nbytes, tenant, place)

    def _places(self) -> list[tuple[str, dict[str, Usage]]]:
        places = [("l1", self._l1.tenants())] if self._l1.divided else []
        places += [(t.name, t.capacity.tenants()) for t in self._tiers if t.capacity is not None and t.capacity.divided]
        return places

    async def _asked(self) -> list[tuple[str, dict[str, Usage]]]:
        return self._places()

    async def _asked_defaults(self) -> dict[str, Usage]:
        places = [
            ("l1", self._l1.others()),
            *((t.name, t.capacity.others()) for t in self._tiers if t.capacity is not None),
        ]
        return {place: usage for place, usage in places if usage is not None}

    def _capacities(self) -> list[Capacity]:
        return [tier.capacity for tier in list(self._tiers) if tier.capacity is not None]
