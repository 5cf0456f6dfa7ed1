"""What docs/engine-plugins.md shows works: its files are written out and run, and print what it says."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvcore.testing.servers.kvcore import KVCoreServer

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


def test_the_store_faces_demo_over_a_server(folder: Path) -> None:
    """`server:` beside `l2` is all that changes: the demo waits until it is connected."""
    tiers = {"l1": {"size": "16MiB"}, "l2": [], "lookup_timeout": "20s"}
    with tempfile.TemporaryDirectory(prefix="kv") as short, KVCoreServer(Path(short), tiers) as server:
        for name in ("page_cache.py", "demo.py"):
            shutil.copy(folder / name, short)
        (Path(short) / "kvcore.yaml").write_text(f"server: {server.url}\nl2:\n  - storage: memory\n")
        done = subprocess.run(
            [sys.executable, "demo.py"], cwd=short, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [line.strip() for line in dict(RUNS)["demo.py"].splitlines()]
