"""What the package's README shows."""

import json
import re
from pathlib import Path

import pytest

from kvcore_vllm import register
from kvcore_vllm.options import parse_tier_options

README = Path(__file__).resolve().parents[2] / "plugins" / "engine_vllm" / "README.md"


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
