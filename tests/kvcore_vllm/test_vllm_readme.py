"""What the package's README shows."""

import json
import re
import shlex
from pathlib import Path

import pytest

from kvcore.api import Context, LaunchRequest
from kvcore.cli import main
from kvcore_vllm import _compat, register
from kvcore_vllm.integration import VllmIntegration
from kvcore_vllm.launch import FLAG
from kvcore_vllm.options import parse_tier_options

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "plugins" / "engine_vllm" / "README.md"


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that was tested, whatever is here."""
    monkeypatch.setattr("kvcore_vllm.integration.installed_vllm", lambda: ("vllm", f"{_compat.TESTED}.0"))


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize("page", ["README.md", "plugins/engine_vllm/README.md"])
def test_the_line_to_write_by_hand_is_the_one_that_run_writes(page: str) -> None:
    text = (ROOT / page).read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^(?:    |\$ )(vllm serve MODEL.*?\}\}'[^\n]*)$", text, re.M | re.S)
    words = shlex.split(line)
    at = words.index(FLAG)
    shown = json.loads(words[at + 1])
    request = LaunchRequest(tuple(words[1:at]), "connector", config=shown["kv_connector_extra_config"]["kvcore.config"])
    made = list(VllmIntegration(None, Context()).launch(request).command)[-len(words) :]
    assert json.loads(made.pop(at + 1)) == shown
    assert made[1:] == [*words[1 : at + 1], *words[at + 2 :]]


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize(
    "page", ["README.md", "docs/server.md", "docs/from-lmcache.md", "plugins/engine_vllm/README.md"]
)
def test_kvcore_run_takes_what_the_pages_show(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it but the start: what it prints is vLLM's command line with kvcore in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvcore.yaml").write_text("l1: {size: 64MiB}\nl2: []\n")
    text = (ROOT / page).read_text().replace("\\\n", " ")
    lines = re.findall(r"(?:^    |^\$ |`)(kvcore run vllm [^`\n]*)", text, re.M)
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert main(["run", "--print", *words[2:]]) == 0, line
        printed = shlex.split(capsys.readouterr().out)
        assert "KVCore" in printed[printed.index(FLAG) + 1]
        assert "MODEL" in printed


def test_the_tiers_configuration_is_accepted() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", README.read_text(), re.DOTALL)
    shown = json.loads(text)
    (tier,) = shown["kv_connector_extra_config"]["secondary_tiers"]
    assert tier.pop("type") == register.TIER
    assert parse_tier_options(tier).config == "kvcore.yaml"
    assert f'"type": "{register.TIER_NAME}", "module_path": "{register.TIER_MODULE}"' in README.read_text()


@pytest.mark.vllm
def test_every_counter_of_the_tier_is_told() -> None:
    from kvcore_vllm.tier import KVCoreTier

    prefix = "vllm:kvcore_tier_"
    told = {f"{prefix}{name}" for name in re.findall(r"`(\w+)_total`", README.read_text())}
    names = set(KVCoreTier.build_metric_definitions({}))
    assert names
    assert names <= told
