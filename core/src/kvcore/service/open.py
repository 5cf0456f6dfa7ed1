"""The engine or the object store that a configuration asks for: of this process, or behind a server."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcore.api import ConfigError
from kvcore.config import Config, load_config
from kvcore.engine import CacheEngine, Engine, LocalStore, ObjectStore
from kvcore.plugins import Registry, registry_from_env
from kvcore.service.inspect.door import show
from kvcore.service.inspect.subject import Subject

if TYPE_CHECKING:
    from kvcore.service.client import RemoteEngine


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
        engine = CacheEngine.of(config, registry, name)
        show(Subject(engine, name, engine.manager))
        return engine
    engines = _remote(config, registry, flags or {}, name)
    several: Engine = engines[0]
    if len(engines) > 1:
        from kvcore.service.several import SeveralEngine

        several = SeveralEngine(engines)
    show(Subject(several, name, clients=engines))
    return several


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
        local = LocalStore.of(config, registry, name)
        show(Subject(local, name, local.manager))
        return local
    if len(config.server.url) > 1:
        raise ConfigError(
            f"server: {len(config.server.url)} servers, over which an object store cannot be spread: give `server.url` "
            "one address"
        )
    from kvcore.service.store import RemoteStore

    (engine,) = _remote(config, registry, flags or {}, name)
    store = RemoteStore(engine)
    show(Subject(store, name, clients=[engine]))
    return store


def _remote(config: Config, registry: Registry, flags: Mapping[str, Any], name: str) -> "list[RemoteEngine]":
    """A client of each of the servers."""
    from kvcore.service.autostart import Autostart
    from kvcore.service.client import RemoteEngine

    server = config.server
    assert server is not None
    start = Autostart(config, flags) if server.autostart else lambda: None
    each = [server.model_copy(update={"url": (address,)}) for address in server.url]
    return [RemoteEngine(config.model_copy(update={"server": one}), registry, name, start) for one in each]
