"""The documentation site: builds without a warning, holds every page, and loads nothing from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LOADED = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(https?:)?//", re.I)


def build(script: Path, out: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, script, "--out", out]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT / "docs/site.py", out)
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_there(site: Path) -> None:
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("plugins/*/README.md"), *ROOT.glob("examples/*/README.md")]
    assert len(pages) > 30
    for page in pages:
        made = page.relative_to(ROOT).with_suffix(".html")
        assert (site / made.with_stem("index") if made.stem == "README" else site / made).is_file(), page
    assert "Start here" in (site / "docs/start.html").read_text()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert _LOADED.search('<script src="https://elsewhere/x.js">')
    pages = list(site.rglob("*.html"))
    for page in pages:
        found = [m for m in _LOADED.finditer(page.read_text()) if "canonical" not in m.group()]
        assert not found, (page, found[0])


def test_a_dead_link_and_a_page_left_out_are_errors(tmp_path: Path) -> None:
    for name in os.listdir(ROOT):
        if name not in ("docs", "build", ".git"):
            (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs/alone.md").write_text("# Alone\n\n[gone](gone.md) and [nowhere](server.md#no-such-place)\n")
    done = build(tmp_path / "docs/site.py", tmp_path / "out")
    assert done.returncode == 1
    for said in ("alone.md", "gone.md", "no-such-place"):
        assert said in done.stderr
