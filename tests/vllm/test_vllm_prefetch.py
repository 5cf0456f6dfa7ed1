"""Requests that vLLM has no room to run yet: what they need comes from the disk while they wait."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_what_waiting_requests_need_is_brought_meanwhile(run_child: Any, tmp_path: Path) -> None:
    results = run_child(
        f'fill_disk:{{"folder": "{tmp_path}"}}',
        f'queued:{{"folder": "{tmp_path}"}}',
    )
    filled, waited = (results[name] for name in results)
    assert [tokens for tokens, _ in waited["texts"]] == [tokens for tokens, _ in filled["texts"]]
    brought, used, _ = waited["brought"]
    assert brought >= used > 0
    assert waited["stats"]['kvcore_hit_chunks_total{source="l1"}'] >= used
    assert waited["cached"][0] > 0  # the first one did not wait
    assert waited["faults"] == {}
    assert set(waited["leaks"].values()) == {0}
