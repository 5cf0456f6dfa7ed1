"""What docs/engine-plugins.md shows works: its files are written out and run, and print what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "engine-plugins.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engine")
    for block in re.findall(r"^```(?:python|yaml)\n(.*?)^```$", GUIDE, re.S | re.M):
        first, _, _ = block.partition("\n")
        assert first.startswith("# file: "), f"a block of the guide does not say which file it is: {first!r}"
        (root / first.removeprefix("# file: ")).write_text(block)
    return root


RUNS = re.findall(r"^    \$ python (\S+)\n((?:    [^\n]*\n)+)", GUIDE, re.M)


@pytest.mark.parametrize(("script", "said"), RUNS, ids=[script for script, _ in RUNS])
def test_a_script_prints_what_the_guide_says(folder: Path, script: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [line.strip() for line in said.splitlines()]


def test_both_faces_are_shown() -> None:
    assert [script for script, _ in RUNS] == ["demo.py", "blocks.py"]


def test_its_files_are_as_the_linter_wants_them(folder: Path) -> None:
    rules = ["--isolated", "--line-length", "120", "--no-cache"]
    for command in (["check", "--select", "E,F,W,I,UP,B"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *rules, "."],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
