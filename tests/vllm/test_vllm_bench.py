"""`kvcore bench engine` starts real vLLM alone and with kvcore, by the line of docs/bench-engine.md, asks both the
same, and sees what kvcore reuses."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs_blocks import lines

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

# Four documents of four blocks each, in turn, and room for two prompts: vLLM itself has forgotten each when it comes
# again.
WORKLOAD = "--documents 4 --questions 1 --length 540 --output 4 --inflight 1 --order tile"
ENGINE = "--dtype float32 --enforce-eager --num-gpu-blocks-override 11"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PREFIX = 512
"""Tokens of a document in whole blocks."""


def test_vllm_alone_and_with_kvcore(models: Path, tmp_path: Path) -> None:
    (line,) = (line for line in lines("docs/bench-engine.md", "kvcore bench engine") if "--vllm" in line)
    line = line.replace("MODEL", str(models / "tiny")).replace("16384", "1280")  # the model has no more positions
    given, engine = line.split(" -- ")
    words = [sys.executable, "-m", *shlex.split(given), *WORKLOAD.split(), "--logs", str(tmp_path)]
    words += ["--memory", "64MiB", "--set", "chunk_tokens=128", "--set", "lookup_timeout=20s"]
    words += ["--json", "--", *engine.split(), *ENGINE.split()]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVCORE_")}
    done = subprocess.run(
        words, cwd=tmp_path, env={**clean, **ENVIRONMENT}, capture_output=True, text=True, timeout=1400, check=False
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
