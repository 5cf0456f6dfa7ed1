"""What every component is given beside its config."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcore.api.errors import PluginError
from kvcore.api.eviction import EvictionPolicy
from kvcore.api.metrics import PluginMetrics
from kvcore.api.storage import BlockingStorage, Entry, Storage


def _no_eviction(spec: Any) -> EvictionPolicy:
    raise PluginError(f"this context cannot make an eviction policy (asked for {spec!r})")


def _no_storage(spec: Any) -> Storage | BlockingStorage:
    raise PluginError(f"this context cannot make a storage (asked for {spec!r})")


def _nobody(gone: Sequence[Entry]) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Context:
    """Given to every factory as its second argument. Fields are only ever added, with defaults.

    Args:
        name: where the component stands in the configuration, such as `l2[0].storage`.
        log: the component's logger.
        make_eviction: makes an eviction policy from its YAML form (`lru` or `{plugin: lru, ...}`), for storages that
            hold a capacity of their own. Raises `PluginError` when no such policy is installed.
        passive: the store is examined, not served from, as `kvcore store` does. Then opening a storage makes and evicts
            nothing, a load does not count as a use, and a delete that cannot be done is a `StorageError`.
        make_storage: makes a storage from its YAML form, unopened, for storages that stand before another one. Raises
            `PluginError` or `ConfigError`.
        on_evict: for storages that keep to a capacity of their own: tell it what was deleted to make room, from any
            thread, so that observers hear of it.
        metrics: the component's own numbers, on `/metrics` beside kvcore's.
    """

    name: str = ""
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("kvcore"))
    make_eviction: Callable[[Any], EvictionPolicy] = _no_eviction
    passive: bool = False
    make_storage: Callable[[Any], Storage | BlockingStorage] = _no_storage
    on_evict: Callable[[Sequence[Entry]], None] = _nobody
    metrics: PluginMetrics = field(default_factory=PluginMetrics)
