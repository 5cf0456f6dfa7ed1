"""Real vLLM: its KV-event stream tells of kvcore's objects."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def result(run_child: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("e")
    own, served = (f'{name}:{{"folder": "{folder}"}}' for name in ("kv_events", "kv_events_served"))
    results = run_child(own, served)
    return {**results[own], "served": results[served]}


def test_what_is_told_is_what_l1_and_the_disk_hold(result: Any) -> None:
    first = result["first"]
    assert result["evicted"] > 0
    assert first["l1"] > 4
    assert first["l1_told"]
    assert first["disk"] > first["l1"]
    assert first["disk_told"] == first["disk"]
    assert first["disk_blocks"] == 4 * first["disk"]


def test_hashes_and_tokens_are_vllms_own(result: Any) -> None:
    """Each hash stands for the same parent and tokens in vLLM's events and in kvcore's."""
    assert result["disagreements"] == 0
    assert result["faults"] == result["second_faults"] == {}


def test_a_reset_takes_all_back(result: Any) -> None:
    assert result["after_reset"] == [0, 0]


def test_what_comes_from_a_disk_of_an_earlier_process_is_told(result: Any) -> None:
    assert result["loaded"] == 1408
    assert result["second"]["l1"] >= 11
    assert result["second"]["l1_told"]


def test_without_kv_events_nobody_listens(result: Any) -> None:
    assert result["off"] == [[], False, False]


def test_a_servers_objects_are_told_by_its_engine(result: Any) -> None:
    served = result["served"]
    assert served["evicted"] > 0
    assert served["told"] == 4 * served["objects"] > 0
    assert served["without_server"] == 0
    assert served["disagreements"] == 0
    assert served["faults"] == {}
