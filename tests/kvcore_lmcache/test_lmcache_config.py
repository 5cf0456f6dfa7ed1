"""`adapter_params`, and what `kvcore doctor` says."""

import json
import sys

import pytest

from kvcore.api import ConfigError, Launch, LaunchRequest, PluginError
from kvcore_lmcache import _compat
from kvcore_lmcache.config import parse
from kvcore_lmcache.integration import LMCacheIntegration
from kvcore_lmcache.plugin import kvcore_engine


def test_options() -> None:
    options = parse({"config": "kvcore.yaml", "set": {"l1.size": "1GiB"}, "weights": "v2", "queue_size": "2GiB"})
    assert (options.config, options.set, options.weights, options.queue_size) == (
        "kvcore.yaml",
        {"l1.size": "1GiB"},
        "v2",
        2 << 30,
    )
    assert parse({}).queue_size == 1 << 30


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"confg": "a"}, "adapter_params.confg"),
        ({"queue_size": "5 apples"}, "adapter_params.queue_size"),
        ({"set": "l1.size"}, "adapter_params.set"),
    ],
)
def test_wrong_options_are_refused(params: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(params)
    assert says in str(refused.value)
    assert "config, set, weights, queue_size" in str(refused.value)


@pytest.mark.parametrize(
    ("version", "level", "says"),
    [(None, "note", "not installed"), (_compat.TESTED, "ok", _compat.TESTED), ("9.9", "warning", "tested with")],
)
def test_what_doctor_says(version: str | None, level: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_lmcache.integration.installed_lmcache", lambda: version)
    component = kvcore_engine()
    integration = component.factory(None, None)
    assert isinstance(integration, LMCacheIntegration)
    (finding,) = integration.check()
    assert finding.level == level
    assert says in finding.text
    assert '"module_path":"kvcore_lmcache.adapter"' in integration.usage()


SERVER = ("server", "--l1-size-gb", "1")


def launched(monkeypatch: pytest.MonkeyPatch, request: LaunchRequest, version: str | None = _compat.TESTED) -> Launch:
    monkeypatch.setattr("kvcore_lmcache.integration.installed_lmcache", lambda: version)
    return LMCacheIntegration(None, None).launch(request)


def test_run_adds_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    request = LaunchRequest(SERVER, "l2", config="/etc/kvcore.yaml", values={"l2[0].storage.path": "/cache"})
    launch = launched(monkeypatch, request)
    assert launch.command == (sys.executable, "-m", "lmcache.cli.main", *SERVER, *launch.added)
    flag, adapter = launch.added
    assert flag == "--l2-adapter"
    assert json.loads(adapter) == {
        "type": "plugin",
        "module_path": "kvcore_lmcache.adapter",
        "class_name": "KVCoreL2Adapter",
        "adapter_params": {"config": "/etc/kvcore.yaml", "set": {"l2[0].storage.path": "/cache"}},
    }
    assert not launch.untested


def test_run_keeps_the_users_own_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*SERVER, "--l2-adapter", json.dumps({"type": "plugin", "module_path": "kvcore_lmcache.adapter"}))
    launch = launched(monkeypatch, LaunchRequest(words, "l2"))
    assert launch.added == ()
    assert launch.command[-len(words) :] == words


def test_run_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="bench l2 is not LMCache's server"):
        launched(monkeypatch, LaunchRequest(("bench", "l2"), "l2"))
    with pytest.raises(ConfigError, match="--role prefill"):
        launched(monkeypatch, LaunchRequest(SERVER, "l2", role="prefill"))
    with pytest.raises(PluginError, match="pip install lmcache"):
        launched(monkeypatch, LaunchRequest(SERVER, "l2"), None)
    assert "9.9" in launched(monkeypatch, LaunchRequest(SERVER, "l2"), "9.9").untested
