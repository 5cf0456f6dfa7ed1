"""kvcore's object store by vLLM's names: offload keys, and rows of the CPU tier. All calls block."""

import dataclasses
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvcore.engine import Asked, ModelSpec, ObjectStore, StoreSpace
from kvcore_vllm.prompts import TIER_KEYS
from kvcore_vllm.spaces import MAX_SPACES

Key = bytes
"""vLLM's `OffloadKey`: a block hash and, in the last four bytes, the KV cache group."""


class Batch(NamedTuple):
    """Chunks of one group. `indexes`: which of the caller's they are."""

    group: int
    hashes: list[bytes]
    indexes: list[int]


class RowStore:
    """Thread-safe; does not raise for a fault of the store.

    Args:
        rows: vLLM's CPU tier, bytes of chunk after chunk in two dimensions. Read and written in place.
        groups: vLLM's number of a KV cache group -> its place in `spec.groups`.

    Raises a `KVCoreError` for a model that cannot be kept.
    """

    def __init__(self, store: ObjectStore, spec: ModelSpec, rows: memoryview, groups: Mapping[int, int]) -> None:
        self._store = store
        self._spec = spec
        self._stride = rows.shape[1] if rows.shape else 0
        self._bytes = rows.cast("B")
        self._groups = groups
        self._lock = threading.Lock()
        self._spaces: dict[str, StoreSpace] = {}
        self._used = self._space("").layouts[0].nbytes  # the rest of a row is padding

    def exists(self, tenant: str, keys: Sequence[Key], request: str = "") -> list[bool]:
        """Which of the chunks of a request are there."""
        found = [False] * len(keys)
        for batch in self._batches(keys):
            there = self._store.exists(self._space(tenant), batch.hashes, batch.group, Asked(request))
            for i, one in zip(batch.indexes, there, strict=True):
                found[i] = one
        return found

    def load(self, tenant: str, keys: Sequence[Key], rows: Sequence[int], request: str = "") -> list[bool]:
        """Bring the chunks into the rows of these numbers; which of them are there now."""
        return self._move(self._store.load, tenant, keys, rows, request)

    def store(self, tenant: str, keys: Sequence[Key], rows: Sequence[int], request: str = "") -> list[bool]:
        """Keep the rows of these numbers as the chunks; which are kept."""
        return self._move(self._store.store, tenant, keys, rows, request)

    def renew(self) -> None:
        """Leave behind all that was kept so far: use names that nothing was stored under."""
        with self._lock:
            self._spec = dataclasses.replace(self._spec, extra={**self._spec.extra, "reset": secrets.token_hex(8)})
            self._spaces.clear()

    def release(self) -> None:
        """Let go of vLLM's memory, unless a call still has it."""
        with suppress(BufferError):
            self._bytes.release()

    def _move(
        self, move: Callable[..., list[bool]], tenant: str, keys: Sequence[Key], rows: Sequence[int], request: str
    ) -> list[bool]:
        moved = [False] * len(keys)
        for batch in self._batches(keys):
            buffers = [[self._row(rows[i])] for i in batch.indexes]
            done = move(self._space(tenant), batch.hashes, buffers, batch.group, request)
            for i, one in zip(batch.indexes, done, strict=True):
                moved[i] = one
            for (view,) in buffers:
                with suppress(BufferError):  # a storage that hangs in a store still reads it
                    view.release()
        return moved

    def _row(self, number: int) -> memoryview:
        return self._bytes[number * self._stride : number * self._stride + self._used]

    def _batches(self, keys: Sequence[Key]) -> Iterator[Batch]:
        batches: dict[int, Batch] = {}
        for i, key in enumerate(keys):
            group = self._groups[int.from_bytes(key[-4:], "big")]
            batch = batches.setdefault(group, Batch(group, [], []))
            batch.hashes.append(key[:-4])
            batch.indexes.append(i)
        return iter(batches.values())

    def _space(self, tenant: str) -> StoreSpace:
        with self._lock:
            space = self._spaces.pop(tenant, None)
            if space is None:
                space = self._store.register(self._spec, TIER_KEYS, tenant)
            self._spaces[tenant] = space  # the last is the most recently used
            if len(self._spaces) > MAX_SPACES:
                del self._spaces[next(iter(self._spaces))]
            return space
