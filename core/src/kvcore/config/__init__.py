"""The configuration: `load_config`. pydantic and PyYAML are imported when it is called."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.config.address import Address
    from kvcore.config.http import HttpConfig
    from kvcore.config.load import load_config
    from kvcore.config.model import Config, InspectConfig, L1Config, ServerConfig, TierConfig
    from kvcore.config.scripts import PluginsConfig, ScriptConfig
    from kvcore.config.tree import InvalidConfigError

__all__ = [
    "Address",
    "Config",
    "HttpConfig",
    "InspectConfig",
    "InvalidConfigError",
    "L1Config",
    "PluginsConfig",
    "ScriptConfig",
    "ServerConfig",
    "TierConfig",
    "load_config",
]

_HOMES = {
    "Address": "address",
    "HttpConfig": "http",
    "InvalidConfigError": "tree",
    "PluginsConfig": "scripts",
    "ScriptConfig": "scripts",
    "load_config": "load",
}
"""Where they are that are not in `model`."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"kvcore.config.{_HOMES.get(name, 'model')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
