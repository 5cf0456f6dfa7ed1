import threading
import time
from typing import Any

import prometheus_client
import pytest

from kvcore_sglang import _compat, stats
from kvcore_sglang.stats import Exporter, Transfers


@pytest.fixture(autouse=True)
def _without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "storage_metrics", lambda *lists: lists)
    monkeypatch.setattr(stats, "_metrics", {})


def unexpected(error: Exception) -> None:
    raise AssertionError from error


def test_transfers_are_told_once_and_cost_nothing_when_there_are_none() -> None:
    transfers = Transfers()
    assert transfers.take() is None
    transfers.add(True, 3, 1 << 30, 2.0)
    transfers.add(False, 4, 1 << 29, 0.5)
    assert transfers.take() == ([3], [4], [0.5], [1.0])
    assert transfers.take() is None


def test_no_transfer_is_lost_between_threads() -> None:
    transfers = Transfers()
    over = threading.Event()
    seen: list[int] = []

    def take() -> None:
        while not over.is_set() or transfers._moved:
            if (found := transfers.take()) is not None:
                seen.extend(found[0])

    reader = threading.Thread(target=take)
    reader.start()
    writers = [threading.Thread(target=lambda: [transfers.add(True, 1, 1, 1.0) for _ in range(500)]) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    over.set()
    reader.join()
    assert sum(seen) == 2000


def values(registry: prometheus_client.CollectorRegistry) -> dict[str, float]:
    return {
        f"{s.name}{sorted(s.labels.items())}": s.value
        for family in registry.collect()
        for s in family.samples
        if not s.name.endswith("_created")
    }


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """What metrics are made in."""
    made = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge"):
        kind = getattr(prometheus_client, name)
        monkeypatch.setattr(prometheus_client, name, lambda *a, _kind=kind, **k: _kind(*a, registry=made, **k))
    return made


def test_numbers_in_the_metrics_of_the_process(
    registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "PERIOD_S", 0.0)
    numbers: dict[str, Any] = {
        'kvcore_hit_chunks_total{source="disk"}': 2.0,
        "kvcore_l2_open": 1.0,
        "kvcore_x_total": 0,
    }
    exporter = Exporter(lambda: numbers, {"tp_rank": "0"}, unexpected)
    exporter.update()
    numbers |= {'kvcore_hit_chunks_total{source="disk"}': 5.0, "kvcore_l2_open": 0.0}
    exporter.update()
    assert values(registry) == {
        "sglang:kvcore_hit_chunks_total[('source', 'disk'), ('tp_rank', '0')]": 5.0,
        "sglang:kvcore_l2_open[('tp_rank', '0')]": 0.0,
    }


def test_the_last_change_is_handed_over_too(registry: prometheus_client.CollectorRegistry) -> None:
    """Also when nobody moves pages any more."""
    numbers = {"kvcore_hit_tokens_total": 1.0}
    exporter = Exporter(lambda: numbers, {"tp_rank": "0"}, unexpected)
    exporter.update()
    numbers["kvcore_hit_tokens_total"] = 7.0
    exporter.update()
    give_up = time.monotonic() + 60
    while values(registry) != {"sglang:kvcore_hit_tokens_total[('tp_rank', '0')]": 7.0}:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_a_backend_that_is_attached_anew_goes_on_counting(registry: prometheus_client.CollectorRegistry) -> None:
    """SGLang detaches and attaches in one process, where a metric can be made once."""
    for count in (3.0, 4.0):
        Exporter(lambda count=count: {"kvcore_hit_tokens_total": count}, {"tp_rank": "0"}, unexpected).update()  # type: ignore[misc]
    assert values(registry) == {"sglang:kvcore_hit_tokens_total[('tp_rank', '0')]": 7.0}


def test_numbers_that_cannot_be_had_cost_no_page() -> None:
    told: list[str] = []

    def fail() -> dict[str, float]:
        raise RuntimeError("no numbers")

    Exporter(fail, {}, lambda error: told.append(str(error))).update()
    assert told == ["no numbers"]
