"""The connector's own options, from vLLM's `kv_connector_extra_config`."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.api import ConfigError

PREFIX = "kvcore."
_MODES = ("auto", "sync", "async")
_OWN: dict[str, tuple[Any, ...]] = {
    "config": (),
    "load": _MODES,
    "save": _MODES,
    "save_decode": (True, False),
    "on_load_failure": ("recompute", "fail"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Validated options.

    Args:
        config: path of kvcore's YAML, or None for `KVCORE_CONFIG` or the defaults.
        load, save: `sync` copies inside the engine's step, `async` on a thread beside it; `auto` is `sync` on a CPU
            engine, where both would share the cores, and `async` elsewhere.
        save_decode: also keep the KV of generated tokens.
        on_load_failure: `recompute` makes vLLM compute what could not be loaded; `fail` leaves vLLM's own policy.
        flags: values for kvcore's configuration, such as `{"l1.size": "8GiB"}`.
    """

    config: str | None = None
    load: str = "auto"
    save: str = "auto"
    save_decode: bool = True
    on_load_failure: str = "recompute"
    flags: Mapping[str, Any] = field(default_factory=dict)


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
    if faults:
        raise ConfigError("\n".join(f"kv_connector_extra_config.{fault}" for fault in faults))
    return Options(**own, flags=flags)
