"""What kvcore-sglang relies on in SGLang: each name by itself, so that a new version says which one it has changed."""

from typing import Any

import pytest
from apis import APIS, SHARED_POOLS

from kvcore_sglang import _compat

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def results(run_child: Any) -> Any:
    return run_child("apis", "pool_attributes", "page_keys")


@pytest.mark.parametrize("api", APIS)
def test_api(results: Any, api: str) -> None:
    assert results["apis"][api] == "", f"SGLang has changed {api}"


def test_attributes_of_host_pools(results: Any) -> None:
    assert results["pool_attributes"] == {"mha": [], "mla": []}


def test_page_keys_are_chained_hashes_of_tokens_adapter_and_salt(results: Any) -> None:
    assert set(results["page_keys"].values()) == {True}, results["page_keys"]
    assert len(results["page_keys"]) == 5


def test_the_pools_that_ranks_share_are_checked_by_name() -> None:
    assert set(SHARED_POOLS) == _compat._SHARED_BY_RANKS
