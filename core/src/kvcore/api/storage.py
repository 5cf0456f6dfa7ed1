"""The storage interface (an L2 backend): batches in, one outcome per key out, caller's memory only.

Subclass `BlockingStorage` for a blocking library (the core owns the threads) or `Storage` for an asyncio one.
A backend needs `exists`, `load`, `store` and `delete`; everything else has a default.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcore.api.keys import ObjectKey


class Item(NamedTuple):
    """One object of a batch: its key and the memory it is stored from or loaded into.

    `buffers` are contiguous `memoryview`s of unsigned bytes: usually the frame's header, then the payload. They belong
    to the caller, are read-only for `store` and writable for `load`, and must not be touched once the call returned.
    Their concatenation is the object.
    """

    key: ObjectKey
    buffers: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers together: the object's size in `store`, the room for it in `load`."""
        return sum(len(b) for b in self.buffers)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The object is in the caller's buffers; it was `nbytes` long, filling them from the front."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Missing:
    """The store holds no object of this key. Also right for one that was evicted between `exists` and `load`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The object can be loaded from now on, whole."""


@dataclass(frozen=True, slots=True)
class Failed:
    """This key failed; the others of the batch did not. `reason` is for people, `kind` is a fixed word for metrics:
    `io`, `full` (no room), `too_large`, `read_only`, `timeout`, `corrupt`."""

    reason: str
    kind: str = "io"


LoadOutcome = Loaded | Missing | Failed
StoreOutcome = Stored | Failed

MISSING = Missing()
STORED = Stored()


def fill(buffers: Sequence[memoryview], data: "bytes | bytearray | memoryview") -> Loaded | Failed:
    """Copy `data` into `buffers` from the front; the outcome to return from `load`. Too long for them is `Failed`."""
    source = memoryview(data).cast("B")
    if len(source) > sum(len(b) for b in buffers):
        return Failed(f"object of {len(source)} bytes, room for {sum(len(b) for b in buffers)}", "too_large")
    at = 0
    for buffer in buffers:
        n = min(len(buffer), len(source) - at)
        buffer[:n] = source[at : at + n]
        at += n
    return Loaded(at)


class Entry(NamedTuple):
    """What `list` yields: a key, the size of its object in bytes, and when it was last stored or loaded, in seconds
    since the epoch, where the store knows."""

    key: ObjectKey
    nbytes: int
    used_s: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes and objects held, and the capacity in bytes where there is one."""

    nbytes: int
    objects: int
    capacity_bytes: int | None = None


class StorageTraits:
    """What a storage declares about itself. Override as class or instance attributes."""

    persistent: bool = False
    """Objects outlive the process."""
    shared: bool = False
    """Other machines see the same objects."""
    max_object_bytes: int | None = None
    """Larger objects are refused before they reach the storage. None: no limit."""
    preferred_concurrency: int = 4
    """How many calls may run at once. A blocking storage gets as many threads and a share of each batch in each."""
    evicts: bool = False
    """It keeps to a capacity of its own. For one that does not, the tier's `capacity` deletes what is used least."""
    zero_copy: bool = False
    """`register_memory` makes transfers from and to the arena cheaper."""


class Storage(StorageTraits, ABC):
    """An asyncio storage. One instance serves one tier, from one event loop.

    The core guarantees: every call has a deadline (after which it is cancelled), batches have no duplicate key,
    `open` comes first and `close` last, once each (but again after `StorageUnavailable`). Raise `StorageError` when
    the whole call failed.
    A `store` must be atomic: a concurrent or later `load` of the key finds a whole object or none.
    """

    def __init__(self, config: Any, context: Any) -> None:
        """`config` is the validated model of the plugin's own config; `context` is a `Context`."""

    async def open(self) -> None:
        """Connect. Raise `StorageError` with the next step when it cannot, `StorageUnavailable` when it may later: then
        it is called again."""

    async def close(self) -> None:
        """Release everything. Called once, also after a failed `open`; not where `open` was never called."""

    @abstractmethod
    async def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Whether each object is there, as a hint: a later `load` may still miss."""

    @abstractmethod
    async def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        """Read each object into its buffers; one outcome per item, in order."""

    @abstractmethod
    async def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        """Write each object from its buffers; one outcome per item, in order. A known key may be kept or replaced."""

    @abstractmethod
    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Forget each object. An absent key is no error."""

    async def list(self) -> "Sequence[Entry]":
        """All objects held. Optional; raises `NotImplementedError` where the store cannot enumerate.

        What is gone when the listing comes to it, damaged, or no object of the store is left out, and is no error.
        """
        raise NotImplementedError

    async def usage(self) -> Usage | None:
        """What is held, or None where the store cannot tell cheaply."""
        return None

    async def ping(self) -> None:
        """Prove that the store answers. Raise `StorageError` when it does not. Used by probes and `kvcore doctor`."""

    def register_memory(self, memory: memoryview) -> None:
        """The arena, once after `open`, when `zero_copy` is declared."""


class BlockingStorage(StorageTraits, ABC):
    """The same contract as `Storage` for a blocking library: the core calls it from its own threads.

    `load`, `store`, `exists` and `delete` may run at the same time on different threads with different keys, or even
    the same key. A call that overruns its deadline is abandoned, not interrupted: its thread ends when it returns.
    """

    def __init__(self, config: Any, context: Any) -> None:
        """`config` is the validated model of the plugin's own config; `context` is a `Context`."""

    def open(self) -> None:
        """See `Storage.open`."""

    def close(self) -> None:
        """See `Storage.close`. May run while calls are still in flight, which may hang."""

    @abstractmethod
    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `Storage.exists`."""

    @abstractmethod
    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        """See `Storage.load`."""

    @abstractmethod
    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        """See `Storage.store`."""

    @abstractmethod
    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See `Storage.delete`."""

    def list(self) -> "Iterator[Entry] | Sequence[Entry]":
        """See `Storage.list`."""
        raise NotImplementedError

    def usage(self) -> Usage | None:
        """See `Storage.usage`."""
        return None

    def ping(self) -> None:
        """See `Storage.ping`."""

    def register_memory(self, memory: memoryview) -> None:
        """See `Storage.register_memory`."""


def can_list(made_by: Any) -> bool:
    """Whether the storages of this class can list what they hold. True for what is no such class, such as a factory."""
    if not (isinstance(made_by, type) and issubclass(made_by, Storage | BlockingStorage)):
        return True
    return made_by.list not in (Storage.list, BlockingStorage.list)
