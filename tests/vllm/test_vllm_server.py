"""Real vLLM over a real server: engines that share it, and everything that can die."""

import signal
from typing import Any

import pytest
from texts import same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NOTHING = {"leases": 0, "quarantined": 0}
AWAY = {"retrieve:LeaseError", "load:ArenaError", "save:ArenaError"}
"""What the guards may have caught when a server was killed in the midst of a step."""
REUSED = [1408, 512, 384, 0, 1408]


@pytest.fixture(scope="module")
def results(run_child: Any) -> Any:
    return run_child("plain", "two_engines", "comes_and_goes", "windows", "tenants")


@pytest.fixture(scope="module")
def expected(results: Any) -> Any:
    return [results["plain"]["long"], *results["plain"]["prompts"]]


def test_what_one_process_computed_another_reuses(results: Any, expected: Any) -> None:
    result = results["two_engines"]
    assert same(result["first"], expected)
    assert same(result["second"], expected)
    assert result["second_cached"] == REUSED
    assert result["unasked"] == [None] * 5
    (promised,) = result["asked"]  # as routers ask for it
    assert promised["kvcore"]["tokens"] == 1408
    assert result["counted"] == 11 + 4 + 4 + 11  # of 512 tokens 4 chunks are found, and 3 are loaded


def test_an_engine_killed_in_the_middle_of_a_store_harms_nobody(results: Any, expected: Any) -> None:
    result = results["two_engines"]
    assert result["ended_with"] == -signal.SIGKILL
    assert same(result["meanwhile"], expected[1:])
    assert result["survivor_cached"] == 0  # nothing of what it had half written is ever found
    assert same(result["again"], result["survivor"])
    assert result["again_cached"] == 896  # and its place is free again
    assert result["held"] == NOTHING
    assert result["faults"] == {}


def test_two_models_on_one_server(run_child: Any) -> None:
    result = run_child("two_models")["two_models"]
    for model in ("tiny", "swa"):
        assert same(result[model], result[f"{model}_plain"])
        assert same(result[f"{model}_hot"], result[f"{model}_plain"])
        assert sum(result[f"{model}_hot_cached"]) > 0
    assert result["tiny_cached"] == [0] * len(result["tiny"])  # the other's KV of these tokens is not found
    assert result["held"] == NOTHING
    assert result["faults"] == {}


def test_a_server_that_is_started_after_the_engine(results: Any, expected: Any) -> None:
    result = results["comes_and_goes"]
    assert same(result["without"], expected)
    assert result["without_cached"] == [0, 0, 0, 0, 0]
    assert same(result["late"], expected)
    assert same(result["late_hot"], expected)
    assert result["late_cached"] == REUSED


def test_a_server_killed_in_the_middle_of_requests(results: Any, expected: Any) -> None:
    result = results["comes_and_goes"]
    assert same(result["dying"], result["plain"])
    assert same(result["dead"], expected)
    assert sum(result["dead_cached"]) == 0
    assert result["mapped_while_dead"] == 0
    assert same(result["back"], expected)
    assert same(result["back_hot"], expected)
    assert result["back_cached"] == REUSED


def test_a_server_that_is_frozen(results: Any, expected: Any) -> None:
    result = results["comes_and_goes"]
    assert same(result["frozen"], expected)
    assert sum(result["frozen_cached"]) == 0
    assert result["frozen_s"] < 0.5  # one time-out of 0.1 s, not one for each request
    assert same(result["thawed"], expected)
    assert result["thawed_cached"] == REUSED
    assert result["mapped"] == 1
    assert result["held"] == NOTHING
    assert result["requests"] == 0
    assert set(result["faults"]) <= AWAY, result["faults"]


def test_a_model_with_windows(results: Any) -> None:
    result = results["windows"]
    assert same(result["served"], result["plain"])
    assert same(result["served_hot"], result["plain"])
    assert result["served_cached"] == [1408, 512, 384, 0, 1408]
    assert same(result["dying"], result["plain_crowd"])
    assert result["requests"] == 0
    assert set(result["faults"]) <= AWAY, result["faults"]


def test_tenants_do_not_see_each_other(results: Any, expected: Any) -> None:
    result = results["tenants"]
    for name, cached in (
        ("a", 0), ("a_again", 1408), ("a_salted", 0), ("b", 0), ("salt", 0), ("nobody", 0), ("wrong", 0),
        ("wrong_again", 0),
    ):  # fmt: skip
        assert same(result[name], expected[0]), name
        assert result[f"{name}_cached"] == cached, name
    assert result["refused"] == 2
    assert result["faults"] == {}


def test_two_ranks(run_child: Any) -> None:
    results = run_child(
        "tensor_parallel", VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1", timeout_s=290
    )
    result = results["tensor_parallel"]
    for cache in ("own", "served"):
        assert same(result[f"{cache}_cold"], result["plain"])
        assert same(result[f"{cache}_hot"], result["plain"])
        assert result[f"{cache}_cached"] == [512, 512, 0, 1408]
    assert result["held"] == NOTHING
