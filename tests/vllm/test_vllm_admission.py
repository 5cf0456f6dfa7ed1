"""Under real vLLM: what is computed sooner than it is loaded is computed, with the same text."""

import json
from typing import Any

import pytest
from texts import same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NO_LEAKS = {"leases": 0, "staging": 0, "quarantined": 0, "plans": 0, "requests": 0}
LOADS = 5
"""So many loads are needed to know a tier."""
NAMES = {
    (read, mode): f"slow_tier:{json.dumps({'read': read, 'load': mode, 'save': mode})}"
    for read, mode in (("auto", "sync"), ("auto", "async"), ("always", "async"))
}


@pytest.fixture(scope="module")
def results(run_child: Any) -> Any:
    return run_child(*NAMES.values())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_tier_slower_than_the_engine_is_left_alone_once_that_is_known(results: Any, mode: str) -> None:
    result = results[NAMES["auto", mode]]
    assert result["speed"] > 0
    assert min(result["cached"][:LOADS]) > 0
    assert result["cached"][LOADS:] == [0, 0]
    assert result["refused"] > 0
    assert max(result["seconds"][LOADS:]) < min(result["seconds"][:LOADS])
    assert all(same([text], result["texts"][:1]) for text in result["texts"])
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


def test_read_always_goes_on_loading(results: Any) -> None:
    result = results[NAMES["always", "async"]]
    assert min(result["cached"]) > 0
    assert result["refused"] == 0
    assert all(same([text], result["texts"][:1]) for text in result["texts"])
