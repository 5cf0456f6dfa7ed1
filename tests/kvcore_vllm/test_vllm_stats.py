from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvcore_vllm.stats import Deltas, KVCorePromMetrics, KVCoreStats, is_counter, split_sample

pytestmark = pytest.mark.vllm

HITS = 'kvcore_hit_chunks_total{source="l1"}'
BYTES = 'kvcore_l1_bytes{state="free"}'


def test_kinds_and_labels() -> None:
    assert is_counter(HITS)
    assert is_counter("kvcore_lookup_seconds_sum")
    assert not is_counter(BYTES)
    assert split_sample(HITS) == ("kvcore_hit_chunks_total", {"source": "l1"})
    assert split_sample("kvcore_leases") == ("kvcore_leases", {})


def test_intervals_add_counters_and_keep_the_last_gauge() -> None:
    stats = KVCoreStats(data={HITS: 2.0, BYTES: 10.0})
    stats.aggregate(KVCoreStats(data={HITS: 3.0, BYTES: 4.0}))
    assert stats.data == {HITS: 5.0, BYTES: 4.0}
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_the_log_line_is_short() -> None:
    stats = KVCoreStats(data={"kvcore_hit_tokens_total": 512.0, HITS: 4.0, "kvcore_load_failures_total": 0.0})
    assert stats.reduce() == {"tokens reused": 512}


def test_deltas() -> None:
    deltas = Deltas()
    assert deltas.take({HITS: 5.0, BYTES: 1.0}) == {HITS: 5.0, BYTES: 1.0}
    assert deltas.take({HITS: 5.0, BYTES: 2.0}) == {BYTES: 2.0}
    assert deltas.take({HITS: 9.0, BYTES: 2.0}) == {HITS: 4.0, BYTES: 2.0}


def test_prometheus() -> None:
    registry = CollectorRegistry()
    kinds = {
        kind: lambda kind=kind, **kwargs: kind(registry=registry, **kwargs) for kind in (Counter, Gauge, Histogram)
    }
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = KVCorePromMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    metrics.observe({HITS: 2.0, BYTES: 7.0})
    metrics.observe({HITS: 3.0, BYTES: 5.0})
    metrics.observe({HITS: 1.0}, engine_idx=1)
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:kvcore_hit_chunks_total", {**labels, "source": "l1"}) == 5
    assert registry.get_sample_value("vllm:kvcore_l1_bytes", {**labels, "state": "free"}) == 5
    other = {**labels, "engine": "1", "source": "l1"}
    assert registry.get_sample_value("vllm:kvcore_hit_chunks_total", other) == 1
    metrics.observe({"kvcore_lookup_seconds_sum": 0.5})  # as examples/monitoring's dashboard reads it
    assert registry.get_sample_value("vllm:kvcore_lookup_seconds_sum_total", labels) == 0.5
