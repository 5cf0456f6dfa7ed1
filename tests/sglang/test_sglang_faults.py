"""A real SGLang engine whose storage fails in every way: its answers are the same."""

import json
from typing import Any

import pytest
from answers import LOADED, PAGES, same

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def results(run_child: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name = f"failing:{json.dumps({'folder': str(tmp_path_factory.mktemp('pages'))})}"
    return run_child(name)[name]


@pytest.mark.parametrize("storage", ["dead", "flaky", "failing", "dies", "slow", "hangs"])
def test_answers_are_the_same(results: Any, storage: str) -> None:
    reference = results["healthy"]["texts"][:3]
    assert same(results[storage]["texts"], reference * 2)


def test_a_healthy_storage_for_comparison(results: Any) -> None:
    healthy = results["healthy"]
    assert healthy["from_storage"] == sum(LOADED)
    assert (healthy["stored"], healthy["loaded"]) == (PAGES, sum(LOADED) / 16)


def test_a_store_that_is_down_at_the_start(results: Any) -> None:
    """The engine starts, and finds nothing."""
    assert (results["dead"]["from_storage"], results["dead"]["stored"]) == (0, 0)


def test_a_storage_that_fails_in_part_serves_in_part(results: Any) -> None:
    assert results["flaky"]["loaded"] > 0
    assert results["flaky"]["not_loaded"] > 0


@pytest.mark.parametrize("storage", ["failing", "hangs"])
def test_what_cannot_be_loaded_is_not_used(results: Any, storage: str) -> None:
    assert (results[storage]["from_storage"], results[storage]["loaded"]) == (0, 0)
