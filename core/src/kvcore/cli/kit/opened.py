"""The tiers of a configuration, opened to be examined."""

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvcore.api import ConfigError, KVCoreError, StorageError
from kvcore.config import Config, TierConfig, load_config
from kvcore.l2 import Threads
from kvcore.l2.frames import Frames
from kvcore.plugins import Registry, registry_from_env

PATIENCE_S = 30.0
"""The least deadline of a storage's call: nobody's request waits here."""


class VolatileError(StorageError):
    """The tier's objects live in another process and end with it."""


class NothingStored(StorageError):
    """What would hold the tier's objects does not exist."""


class Source(NamedTuple):
    """A configuration, and where its plugins come from."""

    config: Config
    registry: Registry

    def told(self, error: KVCoreError) -> str:
        """The text of an error, with what may be meant where nothing is stored."""
        if not isinstance(error, NothingStored):
            return str(error)
        if self.config.file is None:
            return f"{error}. No configuration was given: name the engine's with --config FILE or KVCORE_CONFIG"
        return f"{error}. Is {self.config.file} the engine's configuration, and its path the engine's?"


def read_config(path: str | None, flags: Mapping[str, str]) -> Source:
    """The configuration of `path`, with its hooks loaded. Raises `ConfigError` or `PluginError`."""
    registry = registry_from_env()
    config = load_config(path, env=os.environ, flags=flags, registry=registry)
    if not config.l2:
        raise ConfigError(f"{config.file or 'the default configuration'} has no tiers: there is no store (see `l2`)")
    registry.use_hooks(config.hooks)
    return Source(config, registry)


def chosen(config: Config, names: Sequence[str]) -> list[TierConfig]:
    """The tiers of these names, or all. Raises `ConfigError`."""
    by_name = {tier.name: tier for tier in config.l2}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"no tier is named {name!r}; the tiers are {', '.join(by_name)}")
    return [by_name[name] for name in dict.fromkeys(names)] if names else list(config.l2)


@asynccontextmanager
async def opened(
    tier: TierConfig, registry: Registry, *, passive: bool = True, for_own_use: bool = False
) -> AsyncIterator[Frames]:
    """The tier's frames. Raises `StorageError` (such as `VolatileError`, `NothingStored`) or
    `PluginError`.

    Args:
        passive: see `Context`.
        for_own_use: also a tier whose objects end with this process.
    """
    spec = tier.storage
    storage = registry.create("storage", spec, registry.context(spec.where, passive=passive))
    if not (storage.persistent or storage.shared or for_own_use):
        raise VolatileError(f"tier {tier.name}: {spec.plugin} lives in the engine's own process and ends with it")
    threads = Threads("store-check", max(1, min(4, os.cpu_count() or 1)))
    try:
        frames = Frames(tier.name, storage, threads=threads, timeout_s=max(PATIENCE_S, tier.timeout))
        try:
            await frames.open()
        except StorageError as e:
            if passive and (path := _absent(tier)) is not None:
                raise NothingStored(f"tier {tier.name}: nothing is stored yet: {path} does not exist") from e
            raise
        try:
            yield frames
        finally:
            with suppress(KVCoreError):
                await frames.close()
    finally:
        threads.close()


def tier_path(tier: TierConfig) -> Path | None:
    """The whole path of a tier that has one, as far as it can be told."""
    path = getattr(tier.storage.options, "path", None)
    if isinstance(path, str | Path):
        with suppress(OSError, RuntimeError):  # a home directory that is not known
            return Path(path).expanduser().absolute()
    return None


def _absent(tier: TierConfig) -> Path | None:
    """The tier's path, when it has one and that does not exist."""
    with suppress(OSError, ValueError):
        path = tier_path(tier)
        return None if path is None or path.exists() else path
    return None
