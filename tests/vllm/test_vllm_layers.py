"""Layer by layer under real vLLM: the text never changes, and no step believes half an object."""

from typing import Any

import pytest
from texts import same

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

SAVES_BESIDE = '{"extra": {"kvcore.save": "async"}}'
SWA = '{"model": "swa"}'
SWA_BESIDE = '{"model": "swa", "extra": {"kvcore.save": "async"}}'
NO_LEAKS = {"leases": 0, "staging": 0, "quarantined": 0, "plans": 0, "requests": 0}
EACH = [[i, i + 1] for i in range(4)]


@pytest.fixture(scope="module")
def results(run_child: Any) -> Any:
    return run_child(
        "plain",
        "layers_hot",
        "layers_fail",
        f"layers_fail:{SAVES_BESIDE}",
        f"plain:{SWA}",
        f"layers_hot:{SWA_BESIDE}",
        timeout_s=560,
    )


def test_hot(results: Any) -> None:
    result = results["layers_hot"]
    same_text(result, results["plain"])
    assert result["hot_cached"] == [512, 384, 0, 1408]
    assert result["beyond_cached"] == 1408
    assert result["turn_cached"] == 256
    assert sorted(map(tuple, result["loads"])) == sorted(map(tuple, EACH * (len(result["loads"]) // 4)))
    assert sorted(map(tuple, result["saves"])) == sorted(map(tuple, EACH * (len(result["saves"]) // 4)))
    assert result["loads"]


def test_sliding_windows(results: Any) -> None:
    """Each group is saved as its own layers are computed; loads are whole, since they can fail only beside a step."""
    result = results[f"layers_hot:{SWA_BESIDE}"]
    same_text(result, results[f"plain:{SWA}"])
    assert result["beyond_cached"] > 1000
    assert set(map(tuple, result["saves"])) == {(0, 1), (1, 2)}
    assert set(result["loads"]) == {None}


@pytest.mark.parametrize("mode", ["", f":{SAVES_BESIDE}"], ids=["sync", "async"])
def test_copies_that_fail_in_the_middle(results: Any, mode: str) -> None:
    result, plain = results[f"layers_fail{mode}"], results["plain"]
    for name in ("unsaved", "unsaved_again", "saved", "silent", "silent_again"):
        assert same(result[name], plain["long"]), name
    for name in ("unloaded", "stolen", "loaded"):
        assert same(result[name], plain["prompts"]), name
    assert result["save_failures"] > 0
    assert result["unsaved_again_cached"] == 0
    assert result["saved_cached"] == 1408
    assert result["load_failures"] > 0
    assert result["stolen_failures"] > 0
    assert sum(result["loaded_cached"]) > 2000
    assert result["faults"].keys() == {"save:OSError", "load:OSError"}
    assert result["leaks"] == NO_LEAKS


@pytest.mark.parametrize("mode", ["", f":{SAVES_BESIDE}"], ids=["sync", "async"])
def test_a_vllm_that_does_not_tell_of_its_layers(results: Any, mode: str) -> None:
    result = results[f"layers_fail{mode}"]
    assert result["silent_loads"][:4] == EACH
    assert set(result["silent_again_loads"]) == {None}
    assert result["silent_again_cached"] == 1408


def test_two_ranks(run_child: Any) -> None:
    results = run_child(
        "layers_two_ranks", VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1", timeout_s=560
    )
    result = results["layers_two_ranks"]
    assert same(result["hot"], result["cold"])
    assert result["cached"] == [512, 384, 0, 1408]
    log = results.log.read_text()
    assert "loads are sync, layer by layer; saves are sync, layer by layer" in log
    assert "goes on without" not in log


def same_text(result: dict[str, Any], plain: dict[str, Any]) -> None:
    for name in ("cold", "own", "hot"):
        assert same(result[name], plain["prompts"]), name
    for name in ("long", "partial", "short", "turn"):
        assert same(result[name], plain[name]), name
    assert same(result["beyond"], plain["long"])
    assert same(result["reset"], plain["long"])
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}
