"""`make` on the pages: its targets can be made, and what they would run is there."""

import os
import re
import shlex
import subprocess

import pytest
from docs_named import there

from docs_blocks import LANGUAGES, ROOT, Unreadable, blocks, commands, pages, spans


def named() -> list[str]:
    """Every `make ...` of the pages, in blocks and in prose."""
    found = set()
    for page in pages():
        for block in blocks(page):
            if block.language not in LANGUAGES:
                continue
            try:
                found |= {" ".join(words[1:]) for words in commands(block) if words[0] == "make"}
            except Unreadable:
                continue
        for span in spans(page):
            words = span.split()
            if len(words) > 1 and words[0] == "make" and words[1] != "-n":
                found.add(" ".join(words[1:]))
    return sorted(found - {""})


def make(*words: str) -> str:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTEST_ARGS"))
    }  # of a `make test`
    done = subprocess.run(
        ["make", "-C", str(ROOT), *words], env=clean, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pages_name_many() -> None:
    assert {"demo", "test", "check", "demo-prefill-decode OVER=disk", "test-gpu GPU_PYTHON=python"} <= set(named())


@pytest.mark.parametrize("words", named())
def test_what_it_would_run_is_there(words: str) -> None:
    """Without making an environment, or anything else."""
    given = [w for w in words.split() if w != "..."]
    given = [f"{name}=0.0.0" if value == "X.Y.Z" else w for w in given for name, _, value in [w.partition("=")]]
    if all("=" in word for word in given):
        given.append("help")
    lines = make("-n", *given).replace("\\\n", " ").splitlines()
    assert lines
    for line in lines:
        found = re.match(r"(?:\w+=\S+ )*(?:\S*/)?(python3?|pytest|kvcore) (.*)", line)
        if found:
            there([found[1], *shlex.split(found[2])])


def test_help_names_the_targets() -> None:
    assert {"demo", "test", "help"} <= {line.split()[0] for line in make("help").splitlines()}
