"""KV that kvcore-quant keeps, under real vLLM on a CPU: its keys are transposed, its elements float32."""

import json
from typing import Any

import pytest
from texts import same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FORMATS = ("fp8", "int4")


@pytest.fixture(scope="module")
def results(run_child: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    names = {
        form: f"lossy:{json.dumps({'folder': str(tmp_path_factory.mktemp(form)), 'form': form})}" for form in FORMATS
    }
    found = run_child(*names.values())
    return {form: found[name] for form, name in names.items()}


@pytest.mark.parametrize(("form", "ratio", "near"), [("fp8", 3.3, 5.0), ("int4", 4.5, 8.0)])
def test_what_comes_back_is_near(results: Any, form: str, ratio: float, near: float) -> None:
    """`near`: by how much the log probabilities of 16 tokens may differ in sum; they are about -4 each."""
    result = results[form]
    assert result["cached"][0] == 1408
    assert result["cached"][3] == 0
    assert min(result["cached"][:3]) >= 384
    assert result["ratio"] > ratio
    for cold, hot, cached in zip(result["cold"], result["hot"], result["cached"], strict=True):
        assert abs(hot[1] - cold[1]) < (near if cached else 5e-3)
    assert not any(result["leaks"].values())
    assert result["faults"] == {}


def test_fp8_begins_alike(results: Any) -> None:
    """The model's numbers are random, and its 1024 tokens nearly as likely: once two texts part, they stay apart. So
    what is counted is the tokens before that, of 64; by chance it would be none."""
    alike = 0
    for cold, hot, cached in zip(*(results["fp8"][name] for name in ("cold", "hot", "cached")), strict=True):
        if cached:
            alike += next((i for i in range(16) if cold[0][i] != hot[0][i]), 16)
    assert alike >= 8


@pytest.mark.parametrize("form", FORMATS)
def test_exact_kv_is_never_met(results: Any, form: str) -> None:
    assert results[form]["exact_cached"] == [0]
    assert same(results[form]["exact"], results[form]["cold"][:1])
