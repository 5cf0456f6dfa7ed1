"""The object store: the L2 stack without L1, for engines that own their host memory."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvcore.api import (
    ConfigError,
    Loaded,
    LoadOutcome,
    ObjectKey,
    ObjectLayout,
    Stored,
    StoreOutcome,
)
from kvcore.config import load_config
from kvcore.control import StorageManager, sort_events
from kvcore.engine import space as spaces
from kvcore.engine.presence import Presence
from kvcore.engine.space import ModelSpec
from kvcore.l2 import Tier, Transfer
from kvcore.observe import Metrics
from kvcore.plugins import registry_from_env


class ObjectStore:
    """Batches of objects between the caller's buffers and the tiers. Calls block, for at most the tiers' timeouts; a
    `load` whose storage hangs beyond that blocks until the storage has let go of the caller's buffers.

    No method raises for a storage's fault: what could not be done is False. Observers (`hooks:`) hear of what was
    stored, loaded and failed, and `metrics_port` is served, as by `CacheEngine`.
    """

    def __init__(self, manager: StorageManager, name: str = "kvcore") -> None:
        self._manager = manager
        self.metrics = manager.metrics
        self._presence = Presence(manager, name)

    @classmethod
    def open(
        cls, path: str | None = None, *, flags: Mapping[str, Any] | None = None, name: str = "kvcore"
    ) -> "ObjectStore":
        """Open the tiers of a configuration. Raises `ConfigError` or `PluginError`."""
        registry = registry_from_env()
        config = load_config(path, flags=dict(flags or {}), registry=registry)
        if not config.l2:
            raise ConfigError("l2 is empty: an object store needs at least one tier, such as `l2: [{storage: disk}]`")
        manager = StorageManager(config, registry, Metrics(), with_l1=False)
        try:
            return cls(manager, name)
        except BaseException:
            manager.close()
            raise

    def namespace(self, spec: ModelSpec, chunk_tokens: int, key_scheme: str) -> bytes:
        """The namespace for objects of this model whose keys come from `key_scheme`."""
        spaces.check(spec)
        config = self._manager.config
        return spaces.namespace(spec, chunk_tokens, key_scheme, self._manager.lossy_tags, config.salt)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Which objects any tier says it has."""
        if self._manager.closed:
            return [False] * len(keys)
        answers = [self._run(tier.exists(keys)) for tier in list(self._manager.tiers)]
        return [any(column) for column in zip(*answers, strict=True)]

    def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], layout: ObjectLayout) -> list[bool]:
        """Bring each object into its buffer (exactly the payload's length); which of them are there now.

        A buffer whose load was False may hold anything.
        """
        arrived = [False] * len(keys)
        for tier in self._open_tiers():
            open_ends = [i for i, done in enumerate(arrived) if not done]
            if not open_ends:
                break
            loads = self._run(tier.load([Transfer(keys[i], buffers[i], layout) for i in open_ends]))
            for i, outcome in zip(open_ends, loads.outcomes, strict=True):
                arrived[i] = isinstance(outcome, Loaded)
            told = [(keys[i], len(buffers[i])) for i in open_ends]
            self._tell("loaded", tier.name, told, loads.outcomes)
            if loads.settled is not None:
                self._run(_wait(loads.settled))
        return arrived

    def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], layout: ObjectLayout) -> list[bool]:
        """Write each object to every tier; which of them are in at least one."""
        stored = [False] * len(keys)
        for tier in self._open_tiers():
            stores = self._run(tier.store([Transfer(k, b, layout) for k, b in zip(keys, buffers, strict=True)]))
            for i, outcome in enumerate(stores.outcomes):
                stored[i] = stored[i] or isinstance(outcome, Stored)
            told = [(k, len(b)) for k, b in zip(keys, buffers, strict=True)]
            self._tell("stored", tier.name, told, stores.outcomes)
        return stored

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Forget the objects in every tier."""
        for tier in self._open_tiers():
            self._run(tier.delete(keys))

    def close(self) -> None:
        """Close the tiers. Idempotent."""
        self._presence.close()

    def _open_tiers(self) -> Sequence[Tier]:
        """None once closed, or in a fork: everything is a miss there."""
        return () if self._manager.closed else self._manager.tiers

    def _tell(
        self,
        event: Literal["loaded", "stored"],
        tier: str,
        objects: Sequence[tuple[ObjectKey, int]],
        outcomes: Sequence[LoadOutcome | StoreOutcome],
    ) -> None:
        """Tell the observers of one batch through a tier what was done and what failed. Absent objects are neither."""
        hooks = self._manager.hooks
        if not (hooks.listens(event) or hooks.listens("failed")):
            return
        good, bad = sort_events(tier, objects, outcomes)
        (hooks.loaded if event == "loaded" else hooks.stored)(good)
        hooks.failed(bad)

    def _run(self, coroutine: Any) -> Any:
        return self._manager.loop.submit(coroutine).result()


async def _wait(settled: Any) -> None:
    import asyncio

    await asyncio.wait((settled,))
