"""The options of the connector and of the secondary tier, from vLLM's `kv_connector_extra_config`."""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from kvcore.api import ConfigError
from kvcore_vllm.config import VllmConfig

PREFIX = "kvcore."
_OWN: dict[str, tuple[Any, ...]] = {
    name: (True, False) if field.annotation is bool else () if name == "config" else get_args(field.annotation)
    for name, field in VllmConfig.model_fields.items()
}
"""Option -> the values that it may have; empty where these cannot be counted."""


class Options(VllmConfig):
    """Validated options, and `flags`: values for kvcore's configuration, such as `{"l1.size": "8GiB"}`."""

    flags: Mapping[str, Any] = {}
    """What goes before the file."""


def parse_options(extra: Mapping[str, Any]) -> Options:
    """The options in `kv_connector_extra_config`. Raises `ConfigError` with every fault."""
    own: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    faults = []
    for key, value in extra.items():
        name = key.removeprefix(PREFIX)
        if name == key:
            hint = difflib.get_close_matches(PREFIX + key, [PREFIX + n for n in _OWN], 1)
            faults.append(
                f"{key}: unknown; kvcore's keys begin with {PREFIX!r}" + (f", such as {hint[0]}" if hint else "")
            )
        elif name not in _OWN:
            flags[name] = value
        elif _OWN[name] and value not in _OWN[name]:
            faults.append(f"{key}: is {value!r}, allowed are {', '.join(repr(v) for v in _OWN[name])}")
        elif name == "config" and not isinstance(value, str):
            faults.append(f"{key}: is {value!r}, it must be the path of a YAML file")
        else:
            own[name] = value
    try:
        options = Options(**own, flags=flags)
    except ValidationError as error:
        faults += [f"{PREFIX}{e['loc'][0]}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
    if faults:
        raise ConfigError("\n".join(f"kv_connector_extra_config.{fault}" for fault in faults))
    return options


class TierOptions(NamedTuple):
    """What a secondary tier was given: the YAML file, values laid over it, and where its storage is."""

    config: str | None
    flags: dict[str, Any]
    locality: str | None


LOCALITIES = ("LOCAL", "REMOTE")
"""What vLLM knows of where a tier's storage is."""


def parse_tier_options(given: Mapping[str, Any]) -> TierOptions:
    """The keys of one of `secondary_tiers` that vLLM leaves to the tier. Raises `ConfigError` with every fault."""
    flags: dict[str, Any] = {}
    config = locality = None
    faults = []
    for key, value in given.items():
        name = key.removeprefix(PREFIX)
        if name == "config":
            config = value
            if not isinstance(value, str):
                faults.append(f"{key}: is {value!r}, it must be the path of a YAML file")
        elif key == "locality":
            locality = value.upper() if isinstance(value, str) else value
            if locality is not None and locality not in LOCALITIES:
                faults.append(f"{key}: is {value!r}, allowed are {', '.join(map(repr, LOCALITIES))}")
        elif name in _OWN:
            faults.append(f"{key}: an option of KVCoreConnector, the tier has none of this name: leave it out")
        elif name == key:
            known = ["config", "locality", PREFIX + "l2", PREFIX + "lookup_timeout", PREFIX + "server"]
            hint = difflib.get_close_matches(key, known, 1) or difflib.get_close_matches(PREFIX + key, known, 1)
            faults.append(
                f"{key}: unknown; beside `config` and `locality`, kvcore's keys begin with {PREFIX!r}"
                + (f": did you mean {hint[0]}?" if hint else "")
            )
        else:
            flags[name] = value
    if faults:
        raise ConfigError("\n".join(f"secondary_tiers: {fault}" for fault in faults))
    return TierOptions(config, flags, locality)
