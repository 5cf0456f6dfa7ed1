"""Under real vLLM: what tiers deliver is copied as it comes, and what they do not deliver is computed."""

from typing import Any

import pytest
from texts import same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ASYNC = '{"extra": {"kvcore.load": "async"}}'
NO_LEAKS = {"leases": 0, "staging": 0, "quarantined": 0, "plans": 0, "requests": 0}
CHUNKS = 11
"""Of 128 tokens, in the long prompt; the first four are in memory."""


@pytest.fixture(scope="module")
def results(run_child: Any) -> Any:
    modes = ("", f":{ASYNC}")
    return run_child(
        "plain",
        *(f"arriving{mode}" for mode in modes),
        *(f"undelivered{mode}" for mode in modes),
        *(f"whole{mode}" for mode in modes),
        *(f'ended:{{"how": "{how}"}}' for how in ("abort", "reset", "broken")),
    )


@pytest.mark.parametrize("mode", ["", f":{ASYNC}"], ids=["auto", "async"])
def test_objects_are_copied_as_they_come(results: Any, mode: str) -> None:
    result = results[f"arriving{mode}"]
    assert result["waiting"]  # with its blocks, while another request was computed
    assert result["before"] == ["other"]
    assert same([result["long"]], [results["plain"]["long"]])
    assert result["cached"] == CHUNKS * 128
    (parts,) = result["parts"].values()
    assert len(parts) > 2
    assert parts[0] == [True, False]
    assert parts[-1] == [False, True]
    assert all(part == [False, False] for part in parts[1:-1])
    assert result["failures"] == 0
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


@pytest.mark.parametrize("mode", ["", f":{ASYNC}"], ids=["auto", "async"])
def test_what_a_tier_does_not_deliver_is_computed(results: Any, mode: str) -> None:
    result = results[f"undelivered{mode}"]
    assert same([result["a"], result["b"], result["again"]], [results["plain"]["long"]] * 3)
    assert result["failures"] > 0
    assert all(cached >= 512 for cached in result["cached"].values())  # what came before it is used
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


@pytest.mark.parametrize(("mode", "cached"), [("", 1280), (f":{ASYNC}", 1408)], ids=["auto", "async"])
def test_a_whole_prompt_is_reused_as_from_memory(results: Any, mode: str, cached: int) -> None:
    result = results[f"whole{mode}"]
    assert result["waiting"]
    assert same([result["text"]], [result["computed"]])
    assert (result["cached"], result["computed_cached"]) == (cached, 0)
    assert result["failures"] == 0
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


def test_an_aborted_request_gives_its_blocks_back(results: Any) -> None:
    result = results['ended:{"how": "abort"}']
    assert set(result["texts"]) == {"other"}
    before, after = result["held"]
    assert after > before
    assert result["failures"] == 0
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


def test_after_a_reset_nothing_of_before_is_used(results: Any) -> None:
    result = results['ended:{"how": "reset"}']
    assert result["missing"] == CHUNKS  # one block each: those that had come, too
    assert same([result["texts"]["long"]], [results["plain"]["long"]])
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


def test_a_cache_that_breaks_meanwhile_is_a_miss(results: Any) -> None:
    result = results['ended:{"how": "broken"}']
    assert same([result["texts"]["long"]], [results["plain"]["long"]])
    assert result["leaks"] == NO_LEAKS
    assert set(result["faults"]) == {"retrieve:RuntimeError"}
