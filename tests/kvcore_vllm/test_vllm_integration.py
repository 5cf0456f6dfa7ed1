import sys

import pytest

from kvcore.api import API_VERSIONS, ConfigError, Context, Prompt
from kvcore_vllm import _compat
from kvcore_vllm.integration import VllmIntegration
from kvcore_vllm.plugin import kvcore_engine


def integration() -> VllmIntegration:
    return VllmIntegration(None, Context())


def test_component() -> None:
    component = kvcore_engine()
    assert component.api == API_VERSIONS["engine"]
    assert isinstance(component.factory(None, Context()), VllmIntegration)


def test_usage_is_the_command_of_the_readme() -> None:
    assert "vllm serve" in integration().usage()
    assert '"kv_connector":"KVCoreConnector"' in integration().usage()


def test_a_good_installation() -> None:
    levels = {f.subject: f.level for f in integration().check()}
    assert levels["vllm connector"] == "ok"
    assert levels["vllm"] == ("note" if _compat.installed_vllm() is None else "ok")


def test_without_vllm_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_vllm.integration.installed_vllm", lambda: None)
    assert [(f.level, f.subject) for f in integration().check()] == [("note", "vllm")]


def test_a_plugin_filter_that_leaves_kvcore_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    finding = integration().check()[1]
    assert finding.level == "error"
    assert "VLLM_PLUGINS=other" in finding.text
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvcore")
    assert integration().check()[1].level == "ok"


def test_another_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_vllm.integration.installed_vllm", lambda: ("vllm", "9.9.0"))
    finding = integration().check()[0]
    assert finding.level == "warning"
    assert "9.9.0" in finding.text
    assert _compat.TESTED in finding.text


def test_versions() -> None:
    assert _compat.is_tested(f"{_compat.TESTED}.0+cpu")
    assert not _compat.is_tested(f"{_compat.TESTED}1.0")


def test_a_prefix_hash_that_cannot_be_made_here_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cbor2", None)
    with pytest.raises(ConfigError, match="'sha256_cbor' needs cbor2 here: pip install cbor2"):
        integration().key_source(Prompt(range(64), 16, 32, {"hash": "sha256_cbor"}))
