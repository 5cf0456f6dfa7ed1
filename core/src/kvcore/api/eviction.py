"""The eviction policy interface: which object goes first when room is needed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any


class EvictionPolicy(ABC):
    """Orders keys for eviction. Used by L1 and by storages with a capacity of their own.

    All calls come from one thread at a time. Keys are opaque. Batches are ordered from the tail of a prefix to its
    head, so that with recency alone a head outlives the tail that is useless without it.
    """

    def __init__(self, config: Any, context: Any) -> None:
        """`config` is the validated model of the plugin's own config; `context` is a `Context`."""

    @abstractmethod
    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        """Keys that became evictable, with their sizes in bytes. A key already known counts as touched."""

    @abstractmethod
    def touch(self, keys: Sequence[Hashable]) -> None:
        """Keys that were used. Unknown keys are ignored."""

    @abstractmethod
    def remove(self, keys: Sequence[Hashable]) -> None:
        """Keys that are gone for another reason. Unknown keys are ignored."""

    @abstractmethod
    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        """Choose and forget victims whose sizes sum to at least `nbytes`, or as many as there are.

        A key for which `pinned` returns True must not be chosen and must stay known.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many keys are known."""
