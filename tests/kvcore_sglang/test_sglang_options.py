import pytest

from kvcore.api import ConfigError
from kvcore_sglang.options import parse_options

SGLANGS_OWN = {"backend_name": "kvcore", "module_path": "kvcore_sglang.backend", "class_name": "KVCoreHiCache"}


def test_a_file_as_the_documentation_has_it() -> None:
    options = parse_options({**SGLANGS_OWN, "interface_v1": 1, "config": "kvcore.yaml"})
    assert (options.config, options.zero_copy, options.tenant, dict(options.flags)) == ("kvcore.yaml", True, "", {})


def test_values_of_the_configuration() -> None:
    tiers = [{"storage": {"plugin": "disk", "path": "/cache"}}]
    options = parse_options({**SGLANGS_OWN, "kvcore.config": "a.yaml", "kvcore.l2": tiers, "kvcore.tenant": "blue"})
    assert (options.config, options.tenant, options.zero_copy) == ("a.yaml", "blue", False)
    assert options.flags == {"l2": tiers}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"confg": "a.yaml"}, "confg: unknown; allowed are config, tenant, .* Did you mean config?"),
        ({"l2": []}, "l2: unknown; .*the prefix 'kvcore.'"),
        ({"config": 3}, "config: is 3, it must be the path of a YAML file"),
        ({"tenant": None}, "tenant: is None, it must be a name"),
        ({"config": "a", "kvcore.config": "b"}, "kvcore.config: given twice"),
    ],
)
def test_what_is_wrong_is_said(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=f"hicache-storage-backend-extra-config.{said}"):
        parse_options({**SGLANGS_OWN, **extra})


def test_every_fault_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse_options({"confg": 1, "tenant": 2})
    assert len(str(error.value).splitlines()) == 2
