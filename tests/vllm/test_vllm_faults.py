"""kvcore under real vLLM, with faults: no request fails, no token changes."""

from pathlib import Path
from typing import Any

import pytest
from texts import same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SYNC = '{"extra": {"kvcore.load": "sync", "kvcore.save": "sync"}}'
ASYNC = '{"extra": {"kvcore.load": "async", "kvcore.save": "async"}}'
SWA = '{"model": "swa"}'
NO_LEAKS = {"leases": 0, "staging": 0, "quarantined": 0, "plans": 0, "requests": 0}


@pytest.fixture(scope="module")
def results(run_child: Any) -> Any:
    return run_child(
        "plain",
        f"plain:{SWA}",
        *(f"failed_loads:{mode}" for mode in (SYNC, ASYNC, SWA)),
        "broken",
        "detached",
        "slow",
        "refused",
    )


@pytest.mark.parametrize(("mode", "plain"), [(SYNC, ""), (ASYNC, ""), (SWA, f":{SWA}")], ids=["sync", "async", "swa"])
def test_failed_loads_are_computed(results: Any, mode: str, plain: str) -> None:
    result = results[f"failed_loads:{mode}"]
    reference = results[f"plain{plain}"]["prompts"]
    assert same(result["stolen"], reference)
    assert result["failures"] > 0
    assert same(result["after"], reference)
    assert sum(result["after_cached"]) > 2000
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


@pytest.mark.parametrize("call", ["lookup", "retrieve", "reserve", "publish", "release"])
def test_a_broken_cache_is_a_miss(results: Any, call: str) -> None:
    result = results["broken"][call]
    assert same(result["long"], results["plain"]["long"])
    assert same(result["prompts"], results["plain"]["prompts"])
    assert any("RuntimeError" in kind for kind in result["faults"]), result["faults"]


def test_a_cache_that_is_whole_again_serves_again(results: Any) -> None:
    assert same(results["broken"]["healed"], results["plain"]["long"])
    assert results["broken"]["healed_cached"] == 1408


def test_a_worker_without_the_arena(results: Any) -> None:
    result = results["detached"]
    assert same(result["long"], results["plain"]["long"])
    assert same(result["prompts"], results["plain"]["prompts"])
    assert result["failures"][0] > 0
    assert result["failures"][1] > 0
    assert set(result["faults"]) == {"load:ArenaError", "save:ArenaError"}
    assert same(result["again"], results["plain"]["long"])
    assert result["again_cached"] == 1408
    assert result["leaks"] == NO_LEAKS


def test_a_slow_storage(results: Any) -> None:
    result = results["slow"]
    assert same(result["long"], results["plain"]["long"])
    assert same(result["patient"], results["plain"]["long"])
    assert same(result["prompts"], results["plain"]["prompts"])
    assert result["long_cached"] == 0
    assert result["timeouts"] > 0
    assert result["seconds"] < 2.5
    assert result["patient_cached"] == 1408
    assert result["faults"] == {}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("chunk_tokens", ("ConfigError", "200", "128")),
        ("mode", ("ConfigError", "kv_connector_extra_config.kvcore.load", "'maybe'", "'sync'")),
        ("no_prefix", ("ConfigError", "kv_connector_extra_config.config", "kvcore.config")),
        ("unknown_field", ("ConfigError", "l1.sise", "size")),
        ("no_unit", ("ConfigError", "l1.size", "many")),
        ("unknown_plugin", ("nonesuch", "engine", "tokens")),
        ("no_file", ("ConfigError", "/nonexistent/kvcore.yaml")),
        ("sync_hybrid", ("ConfigError", "kvcore.load", "3 KV cache groups")),
    ],
)
def test_refused_at_start(results: Any, case: str, words: tuple[str, ...]) -> None:
    text = results["refused"][case]
    for word in words:
        assert word in text, text


def test_restart_and_damaged_files(run_child: Any, tmp_path: Path) -> None:
    folder = f'"folder": "{tmp_path}"'
    first = run_child("plain", f"fill_disk:{{{folder}}}")
    damages = ("flipped", "truncated", "empty", "deleted")
    names = [f"from_disk:{{{folder}}}", *(f'damaged:{{{folder}, "how": "{how}"}}' for how in damages)]
    then = run_child(*names)
    plain = [first["plain"]["long"], *first["plain"]["prompts"]]
    assert same(first[f"fill_disk:{{{folder}}}"]["texts"], plain)
    assert first[f"fill_disk:{{{folder}}}"]["files"] > 10
    hot = then[names[0]]
    assert same(hot["texts"], plain)
    assert hot["cached"] == [1408, 512, 384, 0, 1408]
    assert hot["sources"] == {"disk": sum(hot["cached"])}
    for name in names[1:]:
        result = then[name]
        assert same(result["texts"], plain), name
        assert sum(result["cached"]) == 0, name
    for name in names:
        assert then[name]["leaks"] == NO_LEAKS
        assert then[name]["faults"] == {}


def test_a_store_that_dies_in_the_middle_of_forty_requests(run_child: Any) -> None:
    result = run_child("store_dies")["store_dies"]
    assert result["from_store"] > 0  # it did serve before it died
    assert result["failed"] > 0  # and was asked for more
    for phase in ("cold", "dying", "dead", "again"):
        assert same(result[phase], result["plain"]), phase
    assert not result["open_while_dead"]
    assert result["back"]
    assert result["from_store_again"] > 0
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}
