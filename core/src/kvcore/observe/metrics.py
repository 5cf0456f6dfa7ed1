"""Every metric by name, behind three calls: `add`, `set` and `observe`.

`METRICS` is the whole list, so that an unknown name fails in tests and the documentation can be generated. Prometheus
text comes from prometheus_client, with a registry of our own: the engine has one too.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple


class Spec(NamedTuple):
    """One metric: its kind, help text, labels with the values they take, and a histogram's bucket bounds in seconds.
    `shown` from the beginning, or once it is set: for what says something only of some processes."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Mapping[str, str] = {}
    buckets: tuple[float, ...] = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
    shown: bool = True


_TIER = {"tier": "the tier's name"}
_FAILURES = (
    "`timeout`, `io` (the storage failed), `full`, `too_large`, `read_only`, `corrupt` (torn, or a wrong checksum; "
    "deleted), `version` and `unknown_serde` (written by another release or configuration; kept), `serde` (encoding or "
    "decoding failed), `lease_expired`, `closed`, or a word of the storage's own"
)
_OP = "`load`, `store`"
_SOURCE = {"source": "`l1`, or a tier's name"}
_TENANT = {
    "tenant": "as in `tenants:`; `other`: all tenants together that it does not name",
    "place": "`l1`, or a tier's name",
}

_TOLD = (
    "as it said when metrics were last read, at most once a minute; not of a shared store that keeps its own account"
)
_HELPER = {"helper": "the program's file name; `#2` and so on where one is listed several times"}

METRICS: dict[str, Spec] = {
    "lookups": Spec("counter", "Lookups answered"),
    "lookup_seconds": Spec("histogram", "From a lookup's registration to its answer"),
    "lookup_chunks": Spec("counter", "Chunks asked for"),
    "hit_chunks": Spec("counter", "Chunks found, by where they were", _SOURCE),
    "miss_chunks": Spec(
        "counter",
        "Chunks not found or not usable, by reason; those behind the end of a prefix count as what ended it",
        {
            "reason": "`absent` (no tier has it), `evicted_from_tier` (gone between the question and the load), "
            "`no_server` (it is away), `refused` (by the server, with a line in the log, or what cannot be keys), "
            "`lookup_timeout`, `stalled` (the tiers did not run at all), `l1_full` (no room to load into), `tier_down` "
            "(a tier that may have it was left alone: circuit breaker open), `no_answer` (a tier did not say in time "
            "whether it has it), `slow_tier` (the engine computes it sooner), `internal` (a bug, in the log), or how "
            "the load failed: see the outcomes of `kvcore_tier_operations_total`. "
            "[What `kvcore explain` makes of each](explain.md#counted-and-explained)"
        },
    ),
    "hit_tokens": Spec("counter", "Tokens whose computation was saved, counted when they were retrieved"),
    "saved_tokens": Spec(
        "counter", "The same by where they were; of several places, each has its part by chunks", _SOURCE
    ),
    "saved_prefill_seconds": Spec(
        "counter",
        "Seconds of computing that these tokens would have taken at the engine's speed as last estimated; nothing "
        "while that is not known. Of an engine that uses a server: in the server's metrics",
        _SOURCE,
    ),
    "stored_chunks": Spec("counter", "Objects published in L1"),
    "store_skipped_chunks": Spec(
        "counter",
        "Objects not stored in L1, by reason",
        {
            "reason": "`known` (resident, or on its way), `l1_full` (all else is in use), `no_block` (the engine no "
            "longer holds it), `no_server`, `refused` (by the server, with a line in the log, or what cannot be keys), "
            "`too_long` (behind the 16,384 chunks that a server takes at once)"
        },
    ),
    "evicted_objects": Spec("counter", "Objects evicted from L1"),
    "expired_leases": Spec("counter", "Leases that ran out, by kind", {"kind": "`read`, `write`"}),
    "tier_operations": Spec(
        "counter",
        "Objects through a tier, by operation and outcome",
        {
            **_TIER,
            "op": f"{_OP}; `exists` and `delete` only when the whole call failed",
            "outcome": f"`ok`, `missing`, `error` (the whole call failed), {_FAILURES}",
        },
    ),
    "tier_bytes": Spec("counter", "Bytes through a tier as stored, headers included", {**_TIER, "op": _OP}),
    "tier_seconds": Spec("histogram", "Time of one batch through a tier", {**_TIER, "op": _OP}),
    "tier_wait_seconds": Spec(
        "histogram",
        "Time that a batch waits for its turn at a tier, in its queue and for those before it",
        {**_TIER, "op": _OP},
    ),
    "tier_dropped": Spec(
        "counter",
        "Objects not written to a tier, by reason",
        {
            **_TIER,
            "reason": "`queue_full` (more than `queue_size` waits), `tier_down` (circuit breaker open), "
            "`lease_expired` (it waited too long), `failed` (see `kvcore_tier_operations_total`), `evicted_first` "
            "(with `write: evicted`, room in L1 was needed before they could be written), `removed` (the tier was), "
            "`cleared` (or its `ttl` was over, while it waited)",
        },
    ),
    "tier_held_back": Spec(
        "counter", "Objects not written to a tier with `write: reused`, because nobody had asked for them again", _TIER
    ),
    "tier_queue_bytes": Spec("gauge", "Bytes waiting to be written to a tier", _TIER),
    "tier_used_bytes": Spec("gauge", f"Bytes that a tier holds, {_TOLD}", _TIER),
    "tier_capacity_bytes": Spec("gauge", f"Bytes that a tier can hold, {_TOLD}", _TIER),
    "tier_open": Spec("gauge", "1 while the tier is used, 0 while its circuit breaker is open", _TIER),
    "tier_opened": Spec("counter", "Times a tier's circuit breaker opened", _TIER),
    "tier_load_latency_seconds": Spec("gauge", "How long a tier takes before it delivers, as last estimated", _TIER),
    "tier_load_bytes_per_second": Spec("gauge", "How fast a tier delivers KV once it does, as last estimated", _TIER),
    "prefill_tokens_per_second": Spec("gauge", "How fast the engine computes prompts, as last estimated"),
    "tier_evicted": Spec("counter", "Objects deleted to keep a tier within its `capacity`", _TIER),
    "evictions": Spec(
        "counter",
        "Objects that went to make room, by place, eviction policy and tenant; of a tier as far as its storage tells",
        {
            "place": "`l1`, or a tier's name",
            "policy": "the eviction policy's name; the storage's where it has one of its own that is not chosen",
            "tenant": "as in `tenants:`; `other`: all tenants together that it does not name",
        },
    ),
    "tier_promoted": Spec("counter", "Objects found in a later tier and offered to this one", _TIER),
    "prefetch_objects": Spec(
        "counter",
        "Objects loaded ahead of their request",
        {
            "cause": "`queued` (the request waits for its turn), `next_turn` (of a conversation, foreseen by "
            "`kvcore-prefetch`), or a word of another plugin's",
            "became": "`brought` (all), `used` (asked for while they were in L1), `wasted` (they left it before)",
        },
    ),
    "prefetch_skipped": Spec(
        "counter",
        "Loads ahead that were not made, or not to their end",
        {
            "cause": "as in `kvcore_prefetch_objects_total`",
            "reason": "`asked` (the request came before it began), `no_room` (as much as is allowed in L1 is not used "
            "yet, or only L1 has what it would take the place of), `queue_full` (256 wait), `failed` (a tier did not "
            "deliver)",
        },
    ),
    "serde_bytes": Spec(
        "counter",
        "Bytes into and out of a tier's serde chain when encoding",
        {**_TIER, "side": "`in`, `out`"},
    ),
    "l1_bytes": Spec(
        "gauge",
        "Bytes of L1 by state",
        {"state": "`size` (all), `free`, `quarantined` (a lease ran out during a write, whose end is awaited)"},
    ),
    "l1_objects": Spec("gauge", "Objects resident in L1"),
    "leases": Spec("gauge", "Leases held"),
    "expired_objects": Spec(
        "counter", "Objects deleted because their `ttl` was over", {"place": "`l1`, or a tier's name"}
    ),
    "tenant_bytes": Spec("gauge", "Bytes that a tenant holds in a place that has quotas", _TENANT),
    "tenant_share_bytes": Spec("gauge", "Bytes of such a place that a named tenant can rely on", _TENANT),
    "sessions": Spec("gauge", "Of a server: engines connected to it"),
    "refused_connections": Spec(
        "counter",
        "Of a server: connections it has refused, by reason",
        {
            "reason": "`protocol` (not our messages), `version` (another version's), `token`, `session` (a worker "
            "whose engine is gone)"
        },
    ),
    "helper_up": Spec("gauge", "Of a server: 1 while a program of `plugins.run` runs, else 0", _HELPER),
    "helper_starts": Spec("counter", "Of a server: times a program of `plugins.run` was started", _HELPER),
    "server_up": Spec("gauge", "Of an engine that uses a server: 1 while it is connected, else 0", shown=False),
    "server_lost": Spec(
        "counter",
        "Of an engine that uses a server: times the server was lost, by reason",
        {"reason": "`closed` (it has ended), `timeout` (it did not answer in time), `protocol` (not our messages)"},
    ),
}


class Metrics:
    """Counters, gauges and histograms of one cache engine."""

    def __init__(self) -> None:
        from kvcore.observe.exposition import MetricsRegistry

        self.registry = MetricsRegistry()
        self._children: dict[Any, Any] = {}
        self._families = {name: self._family(name) for name, spec in METRICS.items() if spec.shown}

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

    def forget(self, value: str, *labels: str) -> None:
        """End the gauges of which one of these labels has this value: what they told of is no more. Counters stay."""
        for name, given in list(self._children):
            spec = METRICS[name]
            if spec.kind == "gauge" and (value in (v for k, v in zip(spec.labels, given, strict=True) if k in labels)):
                del self._children[name, given]
                self._families[name].remove(*given)

    def text(self) -> str:
        """All metrics in the Prometheus text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    def values(self) -> dict[str, float]:
        """All samples but histogram buckets as a flat dict: `kvcore_hit_chunks_total{source="l1"}` -> value."""
        flat = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    labels = ",".join(f'{k}="{v}"' for k, v in sample.labels.items())
                    flat[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return flat

    def numbers(self, names: Collection[str]) -> dict[str, float]:
        """What these metrics stand at, at the cost of looking: `name`, or with its labels `tier_bytes/disk/load`, ->
        value; of a histogram its sum. Not those that nothing was said of yet."""
        found = {}
        for (name, labels), child in list(self._children.items()):
            if name in names:
                kept = child._sum if METRICS[name].kind == "histogram" else child._value
                found["/".join((name, *labels))] = kept.get()
        return found

    def _family(self, name: str) -> Any:
        from prometheus_client import Counter, Gauge, Histogram

        spec, full = METRICS[name], f"kvcore_{name}"
        labels = tuple(spec.labels)
        if spec.kind == "counter":
            return Counter(full, spec.help, labels, registry=self.registry)
        if spec.kind == "gauge":
            return Gauge(full, spec.help, labels, registry=self.registry)
        return Histogram(full, spec.help, labels, registry=self.registry, buckets=spec.buckets)

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        key = (name, labels)
        child = self._children.get(key)
        if child is None:
            family = self._families.get(name) or self._families.setdefault(name, self._family(name))
            child = self._children[key] = family.labels(*labels) if labels else family
        return child
