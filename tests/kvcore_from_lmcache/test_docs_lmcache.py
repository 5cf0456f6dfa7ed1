"""docs/from-lmcache.md and kvcore-lmcache's README show what happens."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from kvcore.cli.app import run
from kvcore.config import load_config
from kvcore.plugins import Registry
from kvcore_lmcache.config import LMCacheConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from-lmcache.md").read_text()
README = (ROOT / "plugins" / "bridge_lmcache" / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.S | re.M)


def commands(text: str) -> list[list[str]]:
    whole = "\n".join(blocks(text, "console")).replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^\$ (kvcore .*)$", whole, re.M)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256")
    return tmp_path


def test_the_conversion_is_as_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = blocks(PAGE, "yaml")
    (said,) = blocks(PAGE, "text")
    (folder / "lmcache.yaml").write_text(before)
    assert run(["from-lmcache", "lmcache.yaml", "--out", "kvcore.yaml"]) == 0
    assert capsys.readouterr().out == said
    assert yaml.safe_load((folder / "kvcore.yaml").read_text()) == yaml.safe_load(after)
    assert run(["config", "check", "kvcore.yaml"]) == 0


def test_the_commands_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "lmcache.yaml").write_text(blocks(PAGE, "yaml")[0])
    (folder / "lmcache-engine.yaml").write_text(
        "apiVersion: lmcache.lmcache.ai/v1alpha1\nkind: LMCacheEngine\nspec: {l1: {sizeGB: 60}}\n"
    )
    # Not these: they ask tiers, and start an engine, that are not here.
    found = [words[1:] for words in commands(PAGE) if words[1] not in ("doctor", "run")]
    assert [words[0] for words in found] == ["from-lmcache"] * 5 + ["config"]
    readme = (ROOT / "plugins" / "command_from_lmcache" / "README.md").read_text()
    found += [shlex.split(line) for line in re.findall(r"^    kvcore (.*)$", readme, re.M)]
    assert len(found) == 7
    for words in found:
        if words[0] == "from-lmcache":
            (folder / "kvcore.yaml").unlink(missing_ok=True)
        assert run(words) == 0, capsys.readouterr()


def test_the_bridges_yaml_is_accepted(tmp_path: Path) -> None:
    (text,) = blocks(README, "yaml")
    file = tmp_path / "kvcore.yaml"
    file.write_text(text)
    assert load_config(str(file), env={}, registry=Registry()).l2[0].storage.plugin == "disk"


def test_the_bridges_options_are_all_told() -> None:
    assert re.findall(r"^\| `(\w+)` \|", README, re.M) == list(LMCacheConfig.model_fields)
