"""The benchmarks' command lines that measure LMCache beside kvcore, as the pages have them, at their smallest: PEER is
the environment of these tests."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from docs_blocks import ROOT, lines

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(900)]
PAGES = ("benchmarks/README.md", "docs/performance.md")


def run(line: str, peer: Path, environment: Mapping[str, str], *more: object) -> str:
    program, *words = shlex.split(line.replace("PEER/bin/python", str(peer)), comments=True)
    start = {"kvcore": [sys.executable, "-m", "kvcore"], "python": [sys.executable]}[program]
    command = [*start, *words, *map(str, more)]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(environment), capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_kvcore_bench_beside_a_peer(lmcache_python: Path, environment: Mapping[str, str]) -> None:
    (line,) = (line for line in lines("docs/performance.md", "kvcore bench") if "PEER" in line)
    rows = {row["name"]: row for row in json.loads(run(line, lmcache_python, environment, "--quick", "--json"))["rows"]}
    for name in ("keys.tokens_list", "l1.lookup_hit", "calls.lookup"):
        assert rows[name]["peer"] > 0, rows[name]
        assert rows[name]["ratio_to_peer"] > 0


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_made(page: str, lmcache_python: Path, environment: Mapping[str, str], tmp_path: Path) -> None:
    (line,) = lines(page, "python benchmarks/run.py")
    more = ["--quick", "--only", "keys", "--runs", 1, "--out", tmp_path]
    assert "| `keys.tokens_list` |" in run(line, lmcache_python, environment, *more)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "table.md"]
    assert json.loads((tmp_path / "latest.json").read_text())[0]["machine"]["peer"].startswith("lmcache")
