import json
import re
import shlex
from pathlib import Path

import pytest

from kvcore.api import API_VERSIONS, Context
from kvcore.config import load_config
from kvcore.plugins import Registry
from kvcore_sglang import _compat
from kvcore_sglang.integration import SglangIntegration
from kvcore_sglang.options import parse_options
from kvcore_sglang.plugin import kvcore_engine

README = Path(__file__).parents[2] / "plugins" / "engine_sglang" / "README.md"


def integration() -> SglangIntegration:
    return SglangIntegration(None, Context())


def test_component() -> None:
    component = kvcore_engine()
    assert component.api == API_VERSIONS["engine"]
    assert isinstance(component.factory(None, Context()), SglangIntegration)


def test_usage_is_the_command_of_the_readme_and_its_options_are_accepted() -> None:
    words = shlex.split(integration().usage())
    extra = words[words.index("--hicache-storage-backend-extra-config") + 1]
    options = parse_options(json.loads(extra))
    assert (options.config, options.zero_copy) == ("kvcore.yaml", True)
    assert extra in README.read_text()


@pytest.mark.parametrize(
    ("version", "level"),
    [(None, "note"), (_compat.TESTED, "ok"), (f"{_compat.TESTED}.post1", "ok"), ("0.5.19", "warning")],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str | None, level: str) -> None:
    monkeypatch.setattr("kvcore_sglang.integration.installed_sglang", lambda: version)
    (finding,) = integration().check()
    assert finding.level == level
    assert (level == "ok") == (not finding.remedy)


def test_what_is_tested() -> None:
    assert _compat.is_tested(f"{_compat.TESTED}+cpu")
    assert not _compat.is_tested(f"{_compat.TESTED}1")


def test_the_readmes_yaml_is_accepted(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", README.read_text(), re.S | re.M)
    file = tmp_path / "kvcore.yaml"
    file.write_text(text)
    (tier,) = load_config(str(file), env={}, registry=Registry()).l2
    assert tier.storage.plugin == "disk"
