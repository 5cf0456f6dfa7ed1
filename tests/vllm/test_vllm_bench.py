"""`kvcore bench engine` starts real vLLM alone and with kvcore, asks both the same, and sees what kvcore reuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

# Four beginnings of four blocks each, in turn, and room for two prompts: vLLM itself has forgotten each when it comes
# again.
WORKLOAD = "shared-prefix --prefixes 4 --requests 2 --length 540 --question 60 --output 4 --inflight 1 --order tile"
ENGINE = "--dtype float32 --enforce-eager --max-model-len 1280 --num-gpu-blocks-override 11"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PREFIX = 512
"""Tokens of a beginning in whole blocks."""


def test_vllm_alone_and_with_kvcore(models: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "kvcore", "bench", "engine", *WORKLOAD.split(), "--vllm", str(models / "tiny")]
    words += ["--memory", "64MiB", "--set", "chunk_tokens=128", "--set", "lookup_timeout=20s", "--logs", str(tmp_path)]
    words += ["--json", "--plot", str(tmp_path / "spread.svg"), "--", *ENGINE.split()]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVCORE_")}
    done = subprocess.run(
        words, env={**clean, **ENVIRONMENT}, capture_output=True, text=True, timeout=1400, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    plain, kvcore = json.loads(done.stdout)["subjects"]
    assert (plain["name"], kvcore["name"]) == ("plain", "kvcore")
    assert 2 <= json.loads(done.stdout)["tokens_per_word"] <= 8
    for subject in (plain, kvcore):
        first, again = subject["phases"]["first"], subject["phases"]["again"]
        assert (first["requests"], again["requests"]) == (4, 4)
        assert first["reused_tokens"] == 0
        assert 4 * PREFIX < again["prompt_tokens"] < 4 * 1024
        assert subject["all"]["output_tokens"] == 8 * 4, "answers are whole, whatever the model wants"
        assert subject["counters"]["vllm:prompt_tokens_total"] >= subject["all"]["prompt_tokens"]
        assert again["itl_s"]["most"] > 0
    assert plain["phases"]["again"]["reused_tokens"] == 0
    assert kvcore["phases"]["again"]["reused_tokens"] == 4 * PREFIX
    assert kvcore["counters"]["vllm:kvcore_hit_tokens_total"] == 4 * PREFIX
    assert kvcore["counters"]['vllm:kvcore_saved_tokens_total{source="l1"}'] == 4 * PREFIX
    assert (plain["behind_share"], kvcore["behind_share"]) == (None, 1.0)
    assert kvcore["cost"]["reused_us"] is not None
    assert plain["cost"]["reused_us"] is None
    assert "kvcore adds: --kv-transfer-config" in (tmp_path / "kvcore.log").read_text()
    assert (tmp_path / "spread.svg").read_text().count("<polyline") == 6
