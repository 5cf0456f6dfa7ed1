"""docs/simulate.md: its policy is written, installed and tested, its commands are run, and print its tables."""

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "simulate.md").read_text()
POINTS = 1.5
"""How far, in percentage points, a policy's figures in the text may be from those of today's L1."""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.S | re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the reader works: a checkout's examples, the new package, and the place where it is installed."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "examples").symlink_to(ROOT / "examples")
    run(folder, "kvcore new-plugin eviction twice")
    (policy,) = blocks("python")
    (folder / policy.splitlines()[0].removeprefix("# file: ")).write_text(policy)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, "site", "./kvcore-twice"], cwd=folder, check=True, capture_output=True, timeout=120)
    return folder


def run(folder, command):
    """The output of a command line of the text."""
    program, _, rest = command.partition(" ")
    words = rest if program == "python" else f"-m {program} {rest}"
    env = {**os.environ, "PYTHONPATH": str(folder / "site"), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        f"{sys.executable} {words}", shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures(text):
    """Of a table: size -> name -> percents."""
    (head,) = (line.split() for line in text.splitlines() if "SIZE" in line)
    rows = [line.split() for line in text.splitlines() if re.match(r" *[0-9.]+ [GT]iB ", line)]
    return {
        " ".join(row[:2]): dict(zip(head[3:], (float(c.rstrip("%")) for c in row[4:]), strict=True)) for row in rows
    }


def test_the_commands_print_the_tables(folder):
    commands = re.findall(r"^    ((?:kvcore simulate|python|pytest) .*)$", TEXT, re.M)
    assert len(commands) == 5
    printed = {command: run(folder, command) for command in commands}
    assert " passed" in printed["pytest kvcore-twice/tests"]
    simulated = [out for command, out in printed.items() if command.startswith("kvcore simulate")]
    tables = blocks("text")
    assert len(tables) == len(simulated) == 3
    for table, out in zip(tables, simulated, strict=True):
        assert all(line in out for line in table.splitlines() if "requests" in line or "different" in line)
        said, shown = figures(table), figures(out.partition("│")[0])
        assert len(said) >= 5
        for size, rates in said.items():
            assert rates["optimum"] == shown[size]["optimum"]
            assert {n: pytest.approx(shown[size][n], abs=POINTS) for n in rates} == rates


def test_the_examples_trace_is_the_one_that_the_text_says(folder):
    (command,) = re.findall(r"was made by `(.*?)`", TEXT)
    made = run(folder, command)
    assert gzip.decompress((ROOT / "examples/traces/agents.jsonl.gz").read_bytes()).decode() == made


def test_the_formats_line_is_a_request(folder):
    (line,) = blocks("json")
    (folder / "one.jsonl").write_text(line)
    assert "1 requests, 1,100 tokens" in run(folder, "kvcore simulate one.jsonl --policy lru")
