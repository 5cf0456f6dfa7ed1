"""Real vLLM with two ranks, each with a server of its own."""

from typing import Any

import pytest
from texts import same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_two_ranks_on_two_servers(run_child: Any) -> None:
    results = run_child(
        "split_over_servers", VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1", timeout_s=560
    )
    result = results["split_over_servers"]
    assert same(result["hot"], result["cold"])
    assert sum(result["cold_cached"]) == 0
    assert result["hot_cached"] == [512, 512, 0, 1408]
    assert result["objects"][0] == result["objects"][1] > 0
    assert result["hit_tokens"] == [sum(result["hot_cached"])] * 2
    assert result["held"] == [{"leases": 0, "quarantined": 0}] * 2
