"""`KVCoreTier` below vLLM's own offloading, in real vLLM. All text is compared to vLLM without kvcore, in float32.

vLLM's copies between its KV cache and its CPU tier are those of a stand-in: it ships none for its CPU backend.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from texts import same

from kvcore.testing.servers.redis import RedisServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SWA = 'plain:{"model": "swa"}'
CACHED = {"tiny": [1408, 512, 512, 0, 1408], "swa": [1408, 512, 384, 0, 1408]}
CASES = [("tiny", "disk"), ("swa", "disk"), ("tiny", "redis")]
CALL_S = 0.1
"""A call takes some 20 us, longer where a busy machine interrupts it. A store takes longer in `tier_dead`."""


def name(scenario: str, **arguments: Any) -> str:
    return f"{scenario}:{json.dumps(arguments)}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("tier"))


@pytest.fixture(scope="module")
def storages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], dict[str, Any]]]:
    files = tmp_path_factory.mktemp("files")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield {
            ("tiny", "disk"): {"plugin": "disk", "path": f"{files}/tiny"},
            ("swa", "disk"): {"plugin": "disk", "path": f"{files}/swa"},
            ("tiny", "redis"): {"plugin": "redis", "url": f"redis://127.0.0.1:{server.port}"},
        }


@pytest.fixture(scope="module")
def first(run_child: Any, storages: Any) -> Any:
    """One process."""
    return run_child("plain", SWA, *(name("tier_cold", model=m, storage=storages[m, s]) for m, s in CASES))


@pytest.fixture(scope="module")
def second(run_child: Any, first: Any, storages: Any) -> Any:
    """Another process, after the first."""
    return run_child(*(again(storages, model, store) for model, store in CASES), damaged(storages))


@pytest.fixture(scope="module")
def faults(run_child: Any, folder: str) -> Any:
    """A process with stores that fail."""
    return run_child(
        "tier_dead",
        "tier_hanging_load",
        name("tier_small", model="tiny", folder=f"{folder}/small"),
        name("tier_faulty", model="tiny", folder=f"{folder}/faulty"),
    )


@pytest.fixture(scope="module")
def names(run_child: Any, folder: str) -> Any:
    """A process that asks under other names, and with configurations that are wrong."""
    return run_child(
        name("tier_reset", folder=f"{folder}/reset"),
        name("tier_weights", folder=f"{folder}/weights"),
        name("tier_tenants", folder=f"{folder}/tenants"),
        "tier_refused",
    )


def of(results: Any, scenario: str) -> Any:
    """The result of a scenario that was run once."""
    (key,) = (key for key in results if key.partition(":")[0] == scenario)
    return results[key]


def again(storages: Any, model: str, store: str) -> str:
    return name("tier_again", model=model, storage=storages[model, store], module_path=store == "redis")


def damaged(storages: Any) -> str:
    return name("tier_damaged", model="swa", folder=storages["swa", "disk"]["path"])


def plain(first: Any, model: str = "tiny") -> list[Any]:
    texts = first["plain" if model == "tiny" else SWA]
    return [texts["long"], *texts["prompts"]]


@pytest.mark.parametrize(("model", "store"), CASES)
def test_a_first_engine_stores_what_it_computes(first: Any, storages: Any, model: str, store: str) -> None:
    result = first[name("tier_cold", model=model, storage=storages[model, store])]
    assert same(result["cold"], plain(first, model))
    assert same(result["memory"], plain(first, model))
    assert result["cold_cached"] == [0] * 5
    assert result["memory_cached"] == CACHED[model]
    assert result["counts"]["host"] == sum(CACHED[model])
    assert result["counts"]["disk"] == 0
    assert result["faults"] == {}


@pytest.mark.parametrize(("model", "store"), CASES)
def test_after_a_restart_everything_is_found(first: Any, second: Any, storages: Any, model: str, store: str) -> None:
    result = second[again(storages, model, store)]
    assert same(result["texts"], plain(first, model))
    assert same(result["part"], first["plain" if model == "tiny" else SWA]["partial"])
    assert result["cached"] == CACHED[model]
    assert result["counts"]["disk"] == sum(CACHED[model])
    assert result["counts"]["loaded_chunks"] >= sum(CACHED[model]) // 128
    assert "lost_chunks" not in result["counts"]
    assert result["faults"] == {}


def test_a_damaged_object_is_computed_and_stored_again(first: Any, second: Any, storages: Any) -> None:
    result = second[damaged(storages)]
    for one in (result, result["repaired"]):
        assert same(one["texts"], plain(first, "swa"))
        assert one["faults"] == {}
    assert result["counts"]["lost_chunks"] > 10
    assert sum(result["cached"]) == 0
    assert result["repaired"]["cached"] == CACHED["swa"]
    assert "lost_chunks" not in result["repaired"]["counts"]


def test_most_comes_from_the_store_where_memory_is_small(first: Any, faults: Any) -> None:
    result = of(faults, "tier_small")
    assert same(result["cold"], first["plain"]["crowd"])
    assert same(result["hot"], first["plain"]["crowd"])
    assert result["counts"]["disk"] > 2000
    assert result["faults"] == {}


def test_a_store_that_fails_now_and_then(first: Any, faults: Any) -> None:
    result = of(faults, "tier_faulty")
    for time in ("cold", "hot", "again"):
        assert same(result[time], plain(first)), time
    assert result["counts"]["unstored_chunks"] > 0
    assert result["faults"] == {}


@pytest.mark.parametrize("how", ["nowhere", "hangs"])
def test_a_dead_store_costs_its_own_hits_only(first: Any, faults: Any, how: str) -> None:
    result = faults["tier_dead"][how]
    assert same(result["texts"], plain(first))
    assert same(result["again"], plain(first))
    assert result["cached"] == [0] * 5
    assert result["counts"]["host"] == sum(CACHED["tiny"])  # vLLM's own tier serves as ever
    assert result["counts"]["unstored_chunks"] > 0
    assert result["faults"] == {}


def test_a_load_that_hangs_holds_its_own_request_only(first: Any, faults: Any) -> None:
    result = faults["tier_hanging_load"]
    assert result["held_meanwhile"]
    assert same([result["cold"], result["held"]], [first["plain"]["long"]] * 2)
    assert same(result["other"], first["plain"]["prompts"][2])
    assert result["counts"]["lost_chunks"] > 0
    assert result["faults"] == {}


def test_no_call_keeps_the_scheduler_waiting(second: Any, faults: Any, storages: Any) -> None:
    dead = faults["tier_dead"]
    for result in (of(faults, "tier_small"), dead["nowhere"], dead["hangs"], second[again(storages, "swa", "disk")]):
        assert result["calls"]["count"] > 100
        assert result["calls"]["p99_s"] < CALL_S


def test_over_a_server(run_child: Any, first: Any, folder: str) -> None:
    result = of(run_child(name("tier_served", folder=f"{folder}/served")), "tier_served")
    for time in ("first", "second", "away", "back"):
        assert same(result[time], plain(first)), time
    assert result["first_cached"] == result["away_cached"] == [0] * 5
    assert result["second_cached"] == CACHED["tiny"]
    assert result["first_faults"] == result["second_faults"] == result["back_faults"] == {}


def test_after_a_reset_nothing_kept_so_far_is_used(first: Any, names: Any) -> None:
    result = of(names, "tier_reset")
    assert same([result["reset"], result["then"]], [first["plain"]["long"]] * 2)
    assert result["reset_cached"] == 0
    assert result["then_cached"] == 1408
    assert result["faults"] == {}


def test_checkpoints_of_one_name_are_told_apart(first: Any, names: Any) -> None:
    result = of(names, "tier_weights")
    assert [result[f"{one}_cached"] for one in ("first", "second", "moved")] == [0, 0, 1408]
    assert same([result["first"], result["moved"]], [first["plain"]["long"]] * 2)
    assert not same(result["second"], first["plain"]["long"])


def test_tenants_do_not_find_each_others_objects(first: Any, names: Any) -> None:
    result = of(names, "tier_tenants")
    assert [result[f"{one}_cached"] for one in ("first", "others", "again")] == [0, 0, 1408]
    assert [result[f"{one}_refused"] for one in ("first", "others", "again")] == [0, 1, 0]
    assert [result[f"{one}_explained"] for one in ("others", "again")] == [[-1, -1], [11, 0]]
    assert same(result["again"], first["plain"]["long"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("connectors", ("ConfigError", "secondary_tiers: kvcore.load", "KVCoreConnector")),
        ("no_tier", ("ConfigError", "l2 is empty")),
        ("unknown_plugin", ("nonesuch", "disk")),
        ("lora", ("LayoutError", "enable_lora", "KVCoreConnector")),
    ],
)
def test_refused_at_start(names: Any, case: str, words: tuple[str, ...]) -> None:
    text = names["tier_refused"][case]
    for word in words:
        assert word in text, text
    assert names["tier_refused"]["threads"] == []
