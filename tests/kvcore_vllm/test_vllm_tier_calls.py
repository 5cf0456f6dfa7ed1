"""The calls of `KVCoreTier` as vLLM's manager makes them, without an engine."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcore.api import ConfigError
from kvcore.engine import GroupSpec, ModelSpec
from kvcore_vllm import _compat, tier_spec

pytestmark = pytest.mark.vllm

ROW, CHUNKS = 4096, 8
PATIENCE_S = 60.0
Made = Callable[..., Any]


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def request(name: str = "r", **params: Any) -> Any:
    return SimpleNamespace(req_id=name, kv_transfer_params=params or None)


def job(number: int, keys: list[bytes], rows: list[int], req: Any) -> Any:
    return SimpleNamespace(job_id=number, keys=keys, chunk_ids=np.array(rows, dtype=np.int32), req_context=req)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    spec = ModelSpec(
        "vllm", "m", "w", "float32", 4, "rows", "b", "vec", 128, 1,
        (GroupSpec(("row",), (ROW,)), GroupSpec(("row",), (ROW,), 128)),
    )  # fmt: skip
    monkeypatch.setattr(_compat, "offloading_configs", lambda: (None, None))
    monkeypatch.setattr(tier_spec, "check_supported", lambda *_: None)
    monkeypatch.setattr(tier_spec, "build_spec", lambda *_: spec)
    made = []

    def build(fill: int = 0, **options: Any) -> Any:
        from kvcore_vllm.tier import KVCoreTier

        memory = memoryview(bytearray([fill]) * (ROW * CHUNKS)).cast("b", (CHUNKS, ROW))
        groups = [SimpleNamespace(group_id=0), SimpleNamespace(group_id=1)]
        offloading = SimpleNamespace(config=SimpleNamespace(groups=groups), num_chunks=CHUNKS)
        given = {"kvcore.l2": [{"storage": {"plugin": "disk", "path": str(tmp_path / "kv")}}], **options}
        tier = KVCoreTier(offloading, memory, "kvcore", **{"kvcore.lookup_timeout": "20s", **given})
        made.append(tier)
        return tier

    yield build
    for tier in made:
        tier.shutdown()


def finished(tier: Any, count: int) -> list[Any]:
    found: list[Any] = []
    until = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < until:
        found += tier.get_finished_jobs()
        time.sleep(0.001)
    assert len(found) == count
    return found


def answers(tier: Any, keys: list[bytes], req: Any) -> list[str]:
    until = time.monotonic() + PATIENCE_S
    while True:
        found = [tier.lookup(k, req).name for k in keys]
        if "RETRY" not in found:
            return found
        assert time.monotonic() < until
        tier.on_schedule_end(None)
        time.sleep(0.001)


def test_stored_by_one_and_loaded_by_the_next(make: Made) -> None:
    one, req = make(fill=7), request()
    one.on_new_request(req)
    assert one.lookup(key(1), req).name == "RETRY"  # never waits
    keys = [key(1), key(2), key(1, 1)]
    assert answers(one, keys, req) == ["MISS"] * 3
    one.submit_store(job(5, keys, [0, 3, 2], req))
    (result,) = finished(one, 1)
    assert (result.job_id, result.success, result.transfer_bytes) == (5, True, 3 * ROW)
    one.shutdown()
    one.shutdown()

    two = make()
    two.on_new_request(req)
    assert answers(two, [*keys, key(3)], req) == ["HIT"] * 3 + ["MISS"]
    two.submit_load(job(9, keys, [4, 5, 6], req))
    (result,) = finished(two, 1)
    assert (result.job_id, result.success) == (9, True)
    rows = two._primary_kv_view.cast("B")
    assert [set(rows[i * ROW : (i + 1) * ROW]) for i in range(3, 8)] == [{0}, {7}, {7}, {7}, {0}]
    rows.release()
    two.on_request_finished(req)
    assert two.faults == {}


def test_what_does_not_arrive_is_told_and_not_offered_again(make: Made) -> None:
    tier, req = make(), request()
    tier.submit_store(job(1, [key(1), key(2)], [0, 1], req))
    finished(tier, 1)
    assert answers(tier, [key(1), key(2)], req) == ["HIT", "HIT"]
    tier._rows._store.delete(tier._rows._space(""), [key(2)[:-4]])
    tier.submit_load(job(2, [key(1), key(2)], [2, 3], req))
    (result,) = finished(tier, 1)
    assert not result.success
    assert list(result.successful_keys) == [key(1)]
    assert answers(tier, [key(1), key(2)], req) == ["HIT", "MISS"]


def test_a_job_ends_even_where_the_tier_is_broken(make: Made) -> None:
    tier, req = make(), request()
    tier.submit_load(job(1, [key(1, group=99)], [0], req))  # no such group
    tier.submit_store(job(2, [key(1, group=99)], [0], req))
    assert sorted((r.job_id, r.success) for r in finished(tier, 2)) == [(1, False), (2, False)]
    assert answers(tier, [key(1, group=99)], req) == ["MISS"]
    assert tier.faults == {"load:KeyError": 1, "store:KeyError": 1, "exists:KeyError": 1}


def test_too_many_that_wait_are_not_stored(make: Made) -> None:
    slow = {"plugin": "faulty", "storage": "memory", "latency": "300ms"}
    tier, req = make(**{"kvcore.l2": [{"storage": slow}]}), request()
    tier.submit_store(job(1, [key(1), key(2), key(3)], [0, 1, 2], req))
    tier.submit_store(job(2, [key(4), key(5)], [3, 4], req))  # half of eight may wait
    (skipped,) = tier.get_finished_jobs()
    assert (skipped.job_id, skipped.success) == (2, False)
    (stored,) = finished(tier, 1)
    assert (stored.job_id, stored.success) == (1, True)


def test_a_reset_leaves_everything_behind(make: Made) -> None:
    tier, req = make(), request()
    tier.submit_store(job(1, [key(1)], [0], req))
    tier.drain_jobs()
    assert len(list(tier.get_finished_jobs())) == 1
    assert answers(tier, [key(1)], req) == ["MISS"]
    other = make()
    assert answers(other, [key(1)], req) == ["HIT"]


def test_tenants(make: Made) -> None:
    tier = make()
    tier.submit_store(job(1, [key(1)], [0], request(tenant="a")))
    tier.submit_store(job(2, [key(1)], [0], request(tenant="\n")))
    assert sorted((r.job_id, r.success) for r in finished(tier, 2)) == [(1, True), (2, False)]
    for name, tenant, found in (("1", "a", "HIT"), ("2", "b", "MISS"), ("3", "\n", "MISS")):
        assert answers(tier, [key(1)], request(name, tenant=tenant)) == [found]
    assert answers(tier, [key(1)], request("4")) == ["MISS"]


def test_numbers_are_increases(make: Made) -> None:
    tier, req = make(), request()
    tier.submit_store(job(1, [key(1)], [0], req))
    finished(tier, 1)
    values = tier.get_stats()._values
    assert values["vllm:kvcore_tier_stored_chunks"] == {(): 1.0}
    assert values["vllm:kvcore_tier_scheduler_seconds"][()] > 0
    assert "vllm:kvcore_tier_stored_chunks" not in tier.get_stats()._values
    assert set(values) <= set(tier.build_metric_definitions({}))


def test_what_waits_is_written_at_the_end(make: Made) -> None:
    one, req = make(), request()
    for number in range(4):  # each waits for the one before: more than half of the memory does not wait
        one._lanes["store"].wait(PATIENCE_S)
        one.submit_store(job(number, [key(number)], [0], req))
    one.shutdown()
    assert answers(make(), [key(n) for n in range(4)], req) == ["HIT"] * 4


def test_a_wrong_configuration_leaves_nothing_open(make: Made) -> None:
    with pytest.raises(ConfigError, match="l2 is empty"):
        make(**{"kvcore.l2": []})
    with pytest.raises(ConfigError, match="unknown"):
        make(l2=[])
