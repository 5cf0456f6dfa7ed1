"""Requests whose tenant is no name are counted, each once."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore_vllm import _compat, model_spec, modes, scheduler
from kvcore_vllm.options import Options

pytestmark = pytest.mark.vllm


class Request:
    resumable = False
    cache_salt = None

    def __init__(self, name: str) -> None:
        self.request_id = name
        self.kv_transfer_params = {"tenant": 5}


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> scheduler.SchedulerHalf:
    """The scheduler's half over a cache that is asked nothing."""
    for module, name, value in (
        (model_spec, "check_supported", None),
        (model_spec, "group_windows", (None,)),
        (model_spec, "block_tokens", 16),
        (modes, "resolve", modes.Modes(False, False, False, False, False)),
        (_compat, "recomputes", True),
        (_compat, "kv_events_on", False),
        (scheduler, "open_engine", SimpleNamespace(close=lambda: None)),
        (scheduler, "Spaces", True),
    ):
        monkeypatch.setattr(module, name, lambda *args, value=value, **more: value)
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True, is_kv_producer=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    return scheduler.SchedulerHalf(config, SimpleNamespace(hash_block_size=16), Options())


def test_each_is_counted_once_however_often_it_is_looked_at(half: scheduler.SchedulerHalf) -> None:
    requests = [Request("a"), Request("b")]
    for _ in range(3):  # they are queued, and looked up in each step until there is room
        for request in requests:
            half.queued(request)
            assert half.matched_tokens(request, 0) == (0, False)
    assert half.faults == {}
    assert half._counts["kvcore_refused_tenants_total"] == 2
