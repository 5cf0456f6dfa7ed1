"""`adapter_params`, and what `kvcore doctor` says."""

import pytest

from kvcore.api import ConfigError
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
