"""The pages' command lines of scripts, at their smallest: benchmarks, and the example of two engines."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from page_lines import ENVIRONMENT

from docs_blocks import ROOT, lines
from warm import Warm

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

ALONE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else every engine imports vLLM twice
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def words(page: str, start: str, model: Path, **changed: str) -> list[str]:
    """Those of the page's line, with this model and other places."""
    (line,) = lines(page, start)
    for old, new in {"build/models/smollm2": str(model), **changed}.items():
        line = line.replace(old, new)
    program, *rest = shlex.split(line)
    assert program == "python"
    return rest


def run(command: list[str], *more: object, **env: str) -> str:
    """What it prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVCORE_")}
    done = subprocess.run(
        [sys.executable, *command, *map(str, more)],
        cwd=ROOT, env={**clean, **env}, capture_output=True, text=True, timeout=1400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.parametrize(("name", "small", "count"), [("layerwise", "--rounds 1", 3), ("record_cost", "--pairs 2", 4)])
def test_one_engine(name: str, small: str, count: int, warm: Warm, models: Path, tmp_path: Path) -> None:
    """Scripts with an engine in their own process: a table with so many rows of numbers."""
    script, *rest = words("docs/performance.md", f"python benchmarks/{name}.py", models / "tiny")
    typed = ["python", str(ROOT / script), *rest, *small.split()]
    log = tmp_path / "log"
    code = warm.run("page_lines:work", str(tmp_path), *typed, environment=ENVIRONMENT, output=log, timeout_s=1400)
    said = log.read_text()
    assert code == 0, said[-6000:]
    rows = [line for line in said.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + count, said[-6000:]
    assert all(re.search(r"\d", row) for row in rows[1:])


@pytest.mark.parametrize("page", ["docs/performance.md", "benchmarks/README.md"])
def test_lines_of_ttft_are_the_same(page: str, models: Path) -> None:
    """So that one of each is run below."""
    for script in ("ttft.py", "ttft_timeline.py"):
        start = f"python benchmarks/{script}"
        assert words(page, start, models) == words("docs/performance.md", start, models)


def test_the_time_to_a_first_token(models: Path, tmp_path: Path) -> None:
    """Its part with kvcore: engines of the others, and LMCache's server, take minutes more."""
    command = words("docs/performance.md", "python benchmarks/ttft.py", models / "tiny")
    small = ["--only", "kvcore", "--prompts", 1, "--tokens", 700, "--turns", 1, "--out", tmp_path / "out"]
    rows = {row["name"]: row for row in json.loads(run(command, *small, **ALONE, KVCORE_CHUNK_TOKENS="128"))["rows"]}
    assert list(rows) == ["kvcore.cold", "kvcore.hot_memory", "kvcore.hot_disk"]
    assert rows["kvcore.cold"]["cached_tokens"] == [0]
    assert rows["kvcore.hot_memory"]["cached_tokens"] == [640]


def test_where_the_time_goes(models: Path, tmp_path: Path) -> None:
    picture = tmp_path / "ttft.svg"
    command = words(
        "docs/performance.md", "python benchmarks/ttft_timeline.py", models / "tiny", **{"docs/ttft.svg": str(picture)}
    )
    small = ["--repeat", 1, "--tokens", 700, "--out", tmp_path / "out"]
    assert "| **first token** |" in run(command, *small, **ALONE, KVCORE_CHUNK_TOKENS="128")
    assert "copy in" in picture.read_text()


def test_what_quantization_costs(models: Path) -> None:
    (line,) = lines("docs/performance.md", "python benchmarks/quant_quality.py")
    command = shlex.split(line.replace("MODEL", str(models / "tiny")).replace("--prompts 24", "--prompts 1"))[1:]
    rows = [line for line in run(command, **ALONE).splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:4]] == ["| bfloat16", "| fp8", "| int4"]


def test_loading_ahead() -> None:
    (line,) = lines("docs/performance.md", "python benchmarks/prefetch.py")
    plain, ahead = map(json.loads, run(shlex.split(line.replace("--seconds 165", "--seconds 4"))[1:]).splitlines())
    assert (plain["hooks"], ahead["hooks"]) == ([], ["prefetch"])
    assert plain["requests"] == ahead["requests"] > 0


def test_two_engines(models: Path, tmp_path: Path) -> None:
    """The example's own script judges what it sees."""
    (line,) = lines("examples/two-engines/README.md", "python examples/two-engines/run.py")
    command = shlex.split(line.replace("DIR", str(models / "tiny")))[1:]
    said = run(command, "--out", tmp_path, KVCORE_CHUNK_TOKENS="128")
    assert "Every answer is the same as vLLM's own." in said
