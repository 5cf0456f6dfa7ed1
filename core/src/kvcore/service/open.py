"""The engine or the object store that a configuration asks for: of this process, or behind a server."""

from collections.abc import Mapping
from typing import Any

from kvcore.config import load_config
from kvcore.engine import CacheEngine, Engine, LocalStore, ObjectStore
from kvcore.plugins import registry_from_env


def open_engine(path: str | None = None, *, flags: Mapping[str, Any] | None = None, name: str = "kvcore") -> Engine:
    """A cache of this process, or with `server:` a client of that one (or those), which need not be there yet.

    Args:
        path: the configuration's file; default: the one that `KVCORE_CONFIG` names.
        flags: values laid over it, such as `{"l1.size": "8GiB"}`.
        name: of this engine, for logs and observers.

    Raises `ConfigError`, `PluginError` or `ArenaError`: what is wrong at start is the user's to see.
    """
    registry = registry_from_env()
    config = load_config(path, flags=dict(flags or {}), registry=registry)
    if config.server is None:
        return CacheEngine.of(config, registry, name)
    from kvcore.service.autostart import Autostart
    from kvcore.service.client import RemoteEngine
    from kvcore.service.several import SeveralEngine

    start = Autostart(config, flags or {}) if config.server.autostart else _nothing
    each = [config.server.model_copy(update={"url": (address,)}) for address in config.server.url]
    engines = [RemoteEngine(config.model_copy(update={"server": one}), registry, name, start) for one in each]
    return engines[0] if len(engines) == 1 else SeveralEngine(engines)


def open_store(path: str | None = None, *, flags: Mapping[str, Any] | None = None, name: str = "kvcore") -> ObjectStore:
    """An object store over the tiers of a configuration, in this process (without L1), or with `server:` over the cache
    of that one, which need not be there yet.

    Args: as of `open_engine`.

    Raises `ConfigError` or `PluginError`: what is wrong at start is the user's to see. A tier or a server that is down
    does not raise.
    """
    registry = registry_from_env()
    config = load_config(path, flags=dict(flags or {}), registry=registry)
    if config.server is None:
        return LocalStore.of(config, registry, name)
    raise NotImplementedError("a store over `server:` comes next")


def _nothing() -> None:
    pass
