"""Prefill and decode on engines of their own, and kvcore beside other connectors, under real vLLM."""

from typing import Any

import pytest
from texts import same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def judge(result: dict[str, Any]) -> None:
    """Every answer is right; what was promised is waited for and used; what is not kept is computed."""
    for name in ("kept", "foreign", "broken"):
        assert same(result[name], result[f"plain_{name}"]), name
    assert result["promised"] == 1408
    assert result["kept_cached"] == 1408
    assert result["waited"] > 0.1  # the producer had answered long before its KV was there
    assert result["foreign_cached"] == 0
    assert result["broken_cached"] < 896
    assert 2 <= result["waited_in_vain"] < 10
    assert [result[f"count_{outcome}"] for outcome in ("kept", "broken", "foreign")] == [1, 1, 1]
    assert result["stored_by_consumer"] == 0
    assert result["consumer_answered"] == [None]
    assert result["requests"] == 0
    assert result["faults"] == {}


@pytest.fixture(scope="module")
def results(run_child: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("shared")
    scenarios = ("over_a_tier", "beside_another")
    found = run_child(
        "plain", "over_a_server", *(f'{name}:{{"folder": "{folder / name}"}}' for name in scenarios), timeout_s=290
    )
    return {name.partition(":")[0]: found[name] for name in found}


def test_over_a_tier_without_a_server(results: Any) -> None:
    judge(results["over_a_tier"])


def test_over_a_server(results: Any) -> None:
    judge(results["over_a_server"])


def test_beside_another_connector(results: Any) -> None:
    result, plain = results["beside_another"], results["plain"]["long"]
    for other in ("example", "kvcore"):
        for phase in ("cold", "hot", "other"):
            assert same(result[f"{other}_{phase}"], plain), (other, phase)
        assert result[f"{other}_cold_cached"] == 0
        assert result[f"{other}_hot_cached"] == 1408
        assert result[f"{other}_other_cached"] >= 1280
