"""Storage `memory`: objects in this process's memory, for tests, examples and a second chance behind a small L1."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcore.api import (
    MISSING,
    STORED,
    ApiVersion,
    BlockingStorage,
    Component,
    Context,
    Entry,
    EvictionPolicy,
    Failed,
    Item,
    LoadOutcome,
    ObjectKey,
    StoreOutcome,
    Usage,
    fill,
    hookimpl,
)

if TYPE_CHECKING:
    from kvcore.builtin.memory_config import MemoryConfig


@hookimpl
def kvcore_storage() -> Component:
    """The `memory` storage."""
    from kvcore.builtin.memory_config import MemoryConfig

    return Component(api=ApiVersion(1, 0), factory=MemoryStorage, config=MemoryConfig)


class MemoryStorage(BlockingStorage):
    """A dict of byte strings. With a capacity, the eviction policy makes room before an object is taken in."""

    persistent = False
    shared = False
    max_object_bytes = None

    def __init__(self, config: "MemoryConfig", context: Context) -> None:
        self._capacity = config.capacity
        self.evicts = config.capacity is not None
        self._policy: EvictionPolicy | None = None
        if self._capacity is not None:
            self._policy = context.make_eviction(config.eviction)
        self._on_evict = context.on_evict
        self._lock = threading.Lock()
        self._objects: dict[ObjectKey, bytes] = {}
        self._nbytes = 0

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            if self._policy is not None:
                self._policy.remove(list(self._objects))
            self._objects.clear()
            self._nbytes = 0

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `Storage.exists`."""
        return [key in self._objects for key in keys]

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        """See `Storage.load`. Copies outside the lock: an object never changes once it is in the dict."""
        found = [self._objects.get(item.key) for item in items]
        if self._policy is not None:
            with self._lock:  # from the tail of the prefix to its head, as policies expect
                self._policy.touch(
                    [item.key for item, data in zip(items, found, strict=True) if data is not None][::-1]
                )
        return [MISSING if data is None else fill(item.buffers, data) for item, data in zip(items, found, strict=True)]

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        """See `Storage.store`."""
        outcomes: list[StoreOutcome] = []
        kept: set[ObjectKey] = set()
        for i, item in enumerate(items):
            kept.add(item.key)
            outcome = self._put(item, kept)
            outcomes.append(outcome)
            if isinstance(outcome, Failed) and outcome.kind == "full":  # the front is kept: a tail is of no use alone
                return outcomes + [outcome] * (len(items) - i - 1)
        return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See `Storage.delete`."""
        with self._lock:
            self._drop(keys)
            if self._policy is not None:
                self._policy.remove(keys)

    def list(self) -> Sequence[Entry]:
        """See `Storage.list`."""
        with self._lock:
            return [Entry(key, len(data)) for key, data in self._objects.items()]

    def ping(self) -> None:
        """See `Storage.ping`. It answers as long as this process does."""

    def usage(self) -> Usage:
        """See `Storage.usage`. Counts the objects' bytes, not the dict's own."""
        with self._lock:
            return Usage(self._nbytes, len(self._objects), self._capacity)

    def _put(self, item: Item, kept: set[ObjectKey]) -> StoreOutcome:
        key, nbytes, capacity = item.key, item.nbytes, self._capacity
        if capacity is not None and nbytes > capacity:
            return Failed(f"an object of {nbytes} bytes, the capacity is {capacity}", "too_large")
        data = b"".join(item.buffers)
        with self._lock:
            if self._policy is not None and capacity is not None:
                if (excess := self._with(item) - capacity) > 0:
                    self._on_evict(self._drop(self._policy.evict(excess, kept.__contains__)))
                if self._with(item) > capacity:
                    return Failed(
                        f"all {capacity} bytes are taken by its batch, or the eviction policy found no room", "full"
                    )
                self._policy.remove([key])
                self._policy.insert([key], [nbytes])
            self._drop([key])
            self._objects[key] = data
            self._nbytes += nbytes
        return STORED

    def _with(self, item: Item) -> int:
        """Bytes with this object in the place of what is there of its name."""
        return self._nbytes - len(self._objects.get(item.key, b"")) + item.nbytes

    def _drop(self, keys: Sequence[Any]) -> Sequence[Entry]:
        gone = [Entry(key, len(self._objects.pop(key, b""))) for key in keys]
        self._nbytes -= sum(entry.nbytes for entry in gone)
        return gone
