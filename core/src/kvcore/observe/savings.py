"""What hits have saved, and who was evicted: sums that take more than one metric."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from kvcore.observe.metrics import Metrics

OTHERS = "other"
"""In metrics, all tenants together that the configuration does not name."""


def count_saved(metrics: Metrics, tokens: int, sources: Mapping[str, int], tokens_per_s: float | None = None) -> None:
    """So many tokens need not be computed.

    Args:
        sources: where their chunks were (`l1` or a tier's name) -> objects. Of several, each has its part.
        tokens_per_s: how fast the engine would have computed them; None while that is not known.
    """
    metrics.add("hit_tokens", tokens)
    objects = sum(sources.values())
    for source, count in sources.items():
        part = tokens * count / objects
        metrics.add("saved_tokens", part, source)
        if tokens_per_s:
            metrics.add("saved_prefill_seconds", part / tokens_per_s, source)


class Evictions:
    """Counts what made room, by place, policy and tenant. From any thread.

    Args:
        named: the tenants of the configuration; without any, nobody is told apart.
        tenant: whose a namespace is.
    """

    def __init__(self, metrics: Metrics, named: Collection[str], tenant: Callable[[bytes], str]) -> None:
        self._metrics = metrics
        self._named = frozenset(named)
        self._tenant = tenant

    def count(self, place: str, policy: str, namespaces: Iterable[bytes], objects: int) -> None:
        """So many objects went, of these namespaces, each named once per object."""
        if not self._named:
            self._metrics.add("evictions", objects, place, policy, OTHERS)
            return
        tenants: Counter[str] = Counter()
        for namespace, count in Counter(namespaces).items():
            tenant = self._tenant(namespace)
            tenants[tenant if tenant in self._named else OTHERS] += count
        for tenant, count in tenants.items():
            self._metrics.add("evictions", count, place, policy, tenant)
