"""What the examples say when something goes wrong."""

import sys
from pathlib import Path

import pytest


def test_of_a_dead_engine_the_cause_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples" / "common"))
    from vllm_server import telling  # type: ignore[import-not-found]

    monkeypatch.delitem(sys.modules, "vllm_server")
    cause = "ERROR (APIServer pid=1) Engine core proc EngineCore_DP0 died unexpectedly (exit code: -9)"
    lines = ["INFO starting", cause, *(f"traceback {i}" for i in range(60))]
    told = telling(lines)
    assert told[0] == cause
    assert "memory ran out" in told[1]
    assert told[-20:] == lines[-20:]
    assert "memory" not in telling([cause.replace("-9", "1")])[1]
    assert telling(lines[:1]) == lines[:1]
