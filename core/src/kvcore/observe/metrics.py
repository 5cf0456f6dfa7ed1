"""Every metric by name, behind three calls: `add`, `set` and `observe`.

`METRICS` is the whole list, so that an unknown name fails in tests and the documentation can be generated. Prometheus
text comes from prometheus_client, with a registry of our own: the engine has one too.
"""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    pass


class Spec(NamedTuple):
    """One metric: its kind, help text, label names, and bucket bounds in seconds for a histogram."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


METRICS: dict[str, Spec] = {
    "lookups": Spec("counter", "Lookups registered"),
    "lookup_seconds": Spec("histogram", "From a lookup's registration to its answer"),
    "lookup_chunks": Spec("counter", "Chunks asked for"),
    "hit_chunks": Spec("counter", "Chunks found, by where they were", ("source",)),
    "miss_chunks": Spec("counter", "Chunks not found or not usable, by reason", ("reason",)),
    "hit_tokens": Spec("counter", "Tokens whose computation was saved, counted when they were retrieved"),
    "stored_chunks": Spec("counter", "Objects published in L1"),
    "store_skipped_chunks": Spec("counter", "Objects not stored in L1, by reason", ("reason",)),
    "evicted_objects": Spec("counter", "Objects evicted from L1"),
    "expired_leases": Spec("counter", "Leases that ran out, by kind", ("kind",)),
    "tier_operations": Spec("counter", "Objects through a tier, by operation and outcome", ("tier", "op", "outcome")),
    "tier_bytes": Spec("counter", "Bytes through a tier as stored, headers included", ("tier", "op")),
    "tier_seconds": Spec("histogram", "Time of one batch through a tier", ("tier", "op")),
    "tier_dropped": Spec("counter", "Objects not written to a tier, by reason", ("tier", "reason")),
    "tier_queue_bytes": Spec("gauge", "Bytes waiting to be written to a tier", ("tier",)),
    "tier_open": Spec("gauge", "1 while the tier is used, 0 while its circuit breaker is open", ("tier",)),
    "serde_bytes": Spec("counter", "Bytes into and out of a tier's serde chain when encoding", ("tier", "side")),
    "l1_bytes": Spec("gauge", "Bytes of L1 by state", ("state",)),
    "l1_objects": Spec("gauge", "Objects resident in L1"),
    "leases": Spec("gauge", "Leases held"),
}


class Metrics:
    """Counters, gauges and histograms of one cache engine."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry: CollectorRegistry = CollectorRegistry()
        self._children: dict[Any, Any] = {}
        self._families: dict[str, Any] = {}
        for name, spec in METRICS.items():
            full = f"kvcore_{name}"
            if spec.kind == "counter":
                self._families[name] = Counter(full, spec.help, spec.labels, registry=self.registry)
            elif spec.kind == "gauge":
                self._families[name] = Gauge(full, spec.help, spec.labels, registry=self.registry)
            else:
                self._families[name] = Histogram(
                    full, spec.help, spec.labels, registry=self.registry, buckets=spec.buckets
                )

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Count `amount` more. `labels` are the values in the order of the metric's label names."""
        if amount:
            self._child(name, labels).inc(amount)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._child(name, labels).set(value)

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Add one observation to a histogram."""
        self._child(name, labels).observe(seconds)

    def text(self) -> str:
        """All metrics in the Prometheus text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    def values(self) -> dict[str, float]:
        """All samples but histogram buckets as a flat dict: `kvcore_hit_chunks_total{source="l1"}` -> value."""
        flat = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    labels = ",".join(f'{k}="{v}"' for k, v in sample.labels.items())
                    flat[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return flat

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        key = (name, labels)
        child = self._children.get(key)
        if child is None:
            family = self._families[name]
            child = self._children[key] = family.labels(*labels) if labels else family
        return child
