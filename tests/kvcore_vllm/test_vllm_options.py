import pytest

from kvcore.api import ConfigError
from kvcore.config import describe
from kvcore.plugins import PluginSpec, Registry
from kvcore_vllm.options import Options, parse_options


def test_defaults() -> None:
    assert parse_options({}) == Options()


def test_the_options_are_told_to_people() -> None:
    registry = Registry()
    options = {o.name: o for o in describe.options(registry.config_model("engine", "vllm"))}
    assert set(options) == set(Options.model_fields) - {"flags"}
    assert options["load"].type == "`auto` or `sync` or `async`"
    assert all(o.description and not o.required for o in options.values())
    assert registry.create("engine", PluginSpec("vllm", {}, "test")).usage().startswith("vllm serve")


def test_own_options_and_flags_are_told_apart() -> None:
    options = parse_options(
        {"kvcore.config": "a.yaml", "kvcore.load": "async", "kvcore.save_decode": False, "kvcore.l1.size": "1GiB"}
    )
    assert options == Options(config="a.yaml", load="async", save_decode=False, flags={"l1.size": "1GiB"})


def test_every_fault_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options({"kvcore.load": "maybe", "conifg": "x", "kvcore.config": 5, "kvcore.save": "sync"})
    text = str(caught.value)
    assert "kv_connector_extra_config.kvcore.load: is 'maybe', allowed are 'auto', 'sync', 'async'" in text
    assert "kv_connector_extra_config.conifg: unknown" in text
    assert "such as kvcore.config" in text
    assert "kv_connector_extra_config.kvcore.config: is 5" in text
    assert "kvcore.save:" not in text


def test_a_number_is_not_taken_for_a_switch() -> None:
    with pytest.raises(ConfigError, match="save_decode"):
        parse_options({"kvcore.save_decode": "yes"})


def test_a_time_has_a_unit_and_is_no_nothing() -> None:
    assert parse_options({"kvcore.pd_timeout": "200ms"}).pd_timeout == 0.2
    for wrong in ("soon", "0s", True):
        with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.kvcore\.pd_timeout: "):
            parse_options({"kvcore.pd_timeout": wrong, "kvcore.load": "sync"})
