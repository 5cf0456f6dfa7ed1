"""Fixtures of the simulator's tests."""

import pytest
from simulate_samples import lines_of

from kvcore.testing.traces import CONVERSATION, TOOL_AGENT, synthetic_trace


@pytest.fixture
def small(tmp_path):
    """A file of 300 requests, of agents and of conversations in turn."""
    mixed = (
        r
        for pair in zip(synthetic_trace(TOOL_AGENT, 150), synthetic_trace(CONVERSATION, 150, seed=1), strict=True)
        for r in pair
    )
    path = tmp_path / "small.jsonl"
    path.write_text(lines_of({**r, "hash_ids": [f"{i % 2}-{b}" for b in r["hash_ids"]]} for i, r in enumerate(mixed)))
    return path
