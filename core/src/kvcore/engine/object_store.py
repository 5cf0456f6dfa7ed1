"""The object store: the L2 stack without L1, for engines that own their host memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvcore.api import ConfigError, Loaded, ObjectKey, ObjectLayout, Stored
from kvcore.config import load_config
from kvcore.control import StorageManager
from kvcore.engine import space as spaces
from kvcore.engine.space import ModelSpec
from kvcore.l2 import Transfer
from kvcore.observe import Metrics
from kvcore.plugins import registry_from_env


class ObjectStore:
    """Batches of objects between the caller's buffers and the tiers. Calls block, for at most the tiers' timeouts; a
    `load` whose storage hangs beyond that blocks until the storage has let go of the caller's buffers.

    No method raises for a storage's fault: what could not be done is False.
    """

    def __init__(self, manager: StorageManager) -> None:
        self._manager = manager
        self.metrics = manager.metrics

    @classmethod
    def open(cls, path: str | None = None, *, flags: Mapping[str, Any] | None = None) -> "ObjectStore":
        """Open the tiers of a configuration. Raises `ConfigError` or `PluginError`."""
        registry = registry_from_env()
        config = load_config(path, flags=dict(flags or {}), registry=registry)
        if not config.l2:
            raise ConfigError("l2 is empty: an object store needs at least one tier, such as `l2: [{storage: disk}]`")
        return cls(StorageManager(config, registry, Metrics(), with_l1=False))

    def namespace(self, spec: ModelSpec, chunk_tokens: int, key_scheme: str) -> bytes:
        """The namespace for objects of this model whose keys come from `key_scheme`."""
        spaces.check(spec)
        config = self._manager.config
        return spaces.namespace(spec, chunk_tokens, key_scheme, self._manager.lossy_tags, config.salt)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Which objects any tier says it has."""
        answers = [self._run(tier.exists(keys)) for tier in self._manager.tiers]
        return [any(column) for column in zip(*answers, strict=True)]

    def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], layout: ObjectLayout) -> list[bool]:
        """Bring each object into its buffer (exactly the payload's length); which of them are there now.

        A buffer whose load was False may hold anything.
        """
        arrived = [False] * len(keys)
        for tier in self._manager.tiers:
            open_ends = [i for i, done in enumerate(arrived) if not done]
            if not open_ends:
                break
            loads = self._run(tier.load([Transfer(keys[i], buffers[i], layout) for i in open_ends]))
            for i, outcome in zip(open_ends, loads.outcomes, strict=True):
                arrived[i] = isinstance(outcome, Loaded)
            if loads.settled is not None:
                self._run(_wait(loads.settled))
        return arrived

    def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], layout: ObjectLayout) -> list[bool]:
        """Write each object to every tier; which of them are in at least one."""
        stored = [False] * len(keys)
        for tier in self._manager.tiers:
            stores = self._run(tier.store([Transfer(k, b, layout) for k, b in zip(keys, buffers, strict=True)]))
            for i, outcome in enumerate(stores.outcomes):
                stored[i] = stored[i] or isinstance(outcome, Stored)
        return stored

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Forget the objects in every tier."""
        for tier in self._manager.tiers:
            self._run(tier.delete(keys))

    def close(self) -> None:
        """Close the tiers. Idempotent."""
        self._manager.close()

    def _run(self, coroutine: Any) -> Any:
        return self._manager.loop.submit(coroutine).result()


async def _wait(settled: Any) -> None:
    import asyncio

    await asyncio.wait((settled,))
