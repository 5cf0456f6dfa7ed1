"""kvcore's numbers in vLLM: its periodic log line and its `/metrics`."""

import re
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_COUNTERS = ("_total", "_sum", "_count")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LOGGED = {
    "kvcore_hit_tokens_total": "tokens reused",
    "kvcore_load_bytes_total": "bytes loaded",
    "kvcore_save_bytes_total": "bytes saved",
    "kvcore_load_failures_total": "failed loads",
    "kvcore_faults_total": "faults",
}


class KVCoreStats(KVConnectorStats):  # type: ignore[misc]
    """Sample name -> value: `kvcore_hit_chunks_total{source="l1"}`. Counters hold the increase of one interval."""

    data: dict[str, float]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's, half's or interval's numbers; of a gauge the later value stays."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0.0) + value if is_counter(name) else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The few numbers that vLLM logs."""
        return {text: round(self.data[name]) for name, text in _LOGGED.items() if self.data.get(name)}

    def is_empty(self) -> bool:
        """Nothing was counted."""
        return not self.data


class KVCorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Every sample as `vllm:` plus its name, made at first sight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval of one engine."""
        engine = [str(v) for v in self.per_engine_labelvalues[engine_idx]]
        for sample, value in transfer_stats_data.items():
            name, labels = split_sample(sample)
            metric = self._metrics.get(name)
            if metric is None:
                kind = self._counter_cls if is_counter(name) else self._gauge_cls
                metric = self._metrics[name] = kind(
                    name=f"vllm:{name.removesuffix('_total')}",
                    documentation="kvcore: see its documentation.",
                    labelnames=[*self._labelnames, *labels],
                )
            child = metric.labels(*engine, *labels.values())
            if is_counter(name):
                child.inc(value)
            else:
                child.set(value)


class Deltas:
    """Turns running totals into the increase since the last call."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def take(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Increases of counters (unchanged ones left out) and values of gauges."""
        out = {}
        for name, value in totals.items():
            if not is_counter(name):
                out[name] = value
            elif value > (last := self._last.get(name, 0.0)):
                out[name] = value - last
                self._last[name] = value
        return out


def is_counter(sample: str) -> bool:
    """Does this sample only grow?"""
    return sample.partition("{")[0].endswith(_COUNTERS)


def split_sample(sample: str) -> tuple[str, dict[str, str]]:
    """Name and labels of `name{label="value"}`."""
    name, _, labels = sample.partition("{")
    return name, dict(_LABEL.findall(labels))
