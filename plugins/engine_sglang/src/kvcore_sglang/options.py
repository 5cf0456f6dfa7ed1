"""The backend's own options, from SGLang's `--hicache-storage-backend-extra-config`."""

import difflib
from collections.abc import Mapping
from typing import Any

from kvcore.api import ConfigError
from kvcore_sglang._compat import EXTRA_CONFIG_KEYS
from kvcore_sglang.config import SglangConfig

PREFIX = "kvcore."
_OWN = tuple(SglangConfig.model_fields)


class Options(SglangConfig):
    """Validated options; `zero_copy`: SGLang's `interface_v1`; `flags`: values for kvcore's configuration, such as
    `{"l1.size": "8GiB"}`."""

    zero_copy: bool = False
    """Does SGLang hand over its pages, or copies of them?"""

    flags: Mapping[str, Any] = {}
    """What goes before the file."""


def parse_options(extra: Mapping[str, Any]) -> Options:
    """The options among SGLang's. Raises `ConfigError` with every fault."""
    own: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    faults = []
    for key, value in extra.items():
        name = key.removeprefix(PREFIX)
        if name in _OWN:
            if name in own:
                faults.append(f"{key}: given twice, with and without {PREFIX!r}")
            elif not isinstance(value, str):
                what = "the path of a YAML file" if name == "config" else "a name"
                faults.append(f"{key}: is {value!r}, it must be {what}")
            own[name] = value
        elif name != key:
            flags[name] = value
        elif key not in EXTRA_CONFIG_KEYS:
            hint = difflib.get_close_matches(key, [*_OWN, *EXTRA_CONFIG_KEYS], 1)
            faults.append(
                f"{key}: unknown; allowed are {', '.join(_OWN)}, values of kvcore's configuration with the prefix "
                f"{PREFIX!r} ({PREFIX}l2), and SGLang's own keys" + (f". Did you mean {hint[0]}?" if hint else "")
            )
    if faults:
        raise ConfigError("\n".join(f"hicache-storage-backend-extra-config.{fault}" for fault in faults))
    return Options(**own, zero_copy=bool(extra.get("interface_v1")), flags=flags)
