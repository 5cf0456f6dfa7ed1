"""docs/inspect.md: its commands run as they stand there, but for sizes, times, addresses, and print what it says."""

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from docs_blocks import ROOT, blocks, commands
from kvcore.cli import main
from kvcore.engine import CacheEngine
from kvcore.service import open_engine
from kvcore.service.inspect import caches
from kvcore.service.inspect.models import TierModel
from kvcore.service.inspect.routes import ROUTES
from kvcore.testing.chunks import contents, hashes, put, spec

PAGE = "docs/inspect.md"


def test_every_state_of_a_tier_is_said() -> None:
    (row,) = re.findall(r"^\| `STATE` \|(.*)$", (ROOT / PAGE).read_text(), re.M)
    assert set(re.findall(r"`(\w+)`", row)) == set(get_args(TierModel.__annotations__["state"]))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheEngine]:
    """What the page asks, in a folder of its own: an engine with a tier, whose requests two tenants have made."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        for name in [n for n in os.environ if n.startswith("KVCORE_") and not n.startswith("KVCORE_TEST_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("KVCORE_RUN_DIR", f"{folder}/run")
        monkeypatch.chdir(folder)
        Path("kvcore.yaml").write_text(
            "l1: {size: 64MiB}\nl2: [{storage: {plugin: disk, path: disk, capacity: 64MiB}}]\nlookup_timeout: 20s\n"
        )
        engine = open_engine("kvcore.yaml", flags={"min_object_size": "128KiB"}, name="vllm")
        assert isinstance(engine, CacheEngine)
        for tenant in ("alice", ""):
            space = engine.register(spec(), tenant)
            put(engine, space, hashes(4))
            for count in (8, 6):
                contents(engine, space, hashes(count))
        yield engine
        engine.close()


def found(start: str) -> list[list[str]]:
    return [words for block in blocks(PAGE) if block.language == "" for words in commands(block) if words[1] == start]


def shown(start: str) -> str:
    """The page's output that begins so."""
    (text,) = [b.text for b in blocks(PAGE) if b.language == "text" and b.text.startswith(start)]
    return text


def skeleton(text: str) -> str:
    """Without what differs from run to run: numbers and the size of their units."""
    text = re.sub(r"([KMG]i)?B\b", "B", text)
    return re.sub(r"[ \d.,:]+", " ", text)


def test_top(engine: CacheEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert [words[2:] for words in found("top")][:1] == [[]]  # with a terminal: test_top.py
    once, as_json, _ = found("top")[1:]  # the last one: test_top.py, too
    assert main(once[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    page = shown("vllm-").splitlines()
    assert [line for line in printed if line.isupper()] == [line for line in page if line.isupper()]
    assert len([line for line in page if line.isupper()]) == 4
    assert re.match(r"vllm-\d+  engine  \w+  kvcore ", page[0])
    assert re.match(r"vllm-\d+  engine  \w+  kvcore ", printed[0])
    assert main(as_json[1:]) == 0


def test_a_recording_is_simulated_and_replayed(engine: CacheEngine, capsys: pytest.CaptureFixture[str]) -> None:
    (record,), (simulate,), (replay,) = found("record"), found("simulate"), found("replay")
    assert main(["0.1" if word == "60" else word for word in record[1:]]) == 0
    assert main(simulate[1:]) == 0
    capsys.readouterr()
    assert main(["1KiB" if word == "128KiB" else word for word in replay[1:]]) == 0
    printed, page = (re.sub(r"\w{32}|\w{8}`", "HEX", text) for text in (capsys.readouterr().out, shown("trace.jsonl")))
    begins = [line.split("  ")[0] for line in page.splitlines()][1:]
    assert [line.split("  ")[0] for line in printed.splitlines()][1:] == begins
    printed = re.sub(r", \d+ began late, by up to .* s$", "", printed, flags=re.M)
    for n in (0, 3, 4, 5, 7):
        assert skeleton(page.splitlines()[n]) == skeleton(printed.splitlines()[n])


def test_it_is_asked_by_other_programs(engine: CacheEngine) -> None:
    (curl,) = [words for b in blocks(PAGE) if b.language == "" for words in commands(b) if words[0] == "curl"]
    (cache,) = caches()
    words = [cache.path if word.endswith(".sock") else word for word in curl]
    done = subprocess.run(shlex.split(shlex.join(words)), capture_output=True, text=True, check=True, timeout=60)
    assert '"name":"vllm"' in done.stdout


def test_the_table_has_every_question() -> None:
    said = set(re.findall(r"`(GET|POST) (/\w+)", (ROOT / PAGE).read_text()))
    assert said | {("GET", "/metrics")} == set(ROUTES)
