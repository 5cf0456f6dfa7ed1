"""kvcore's objects in vLLM's own KV-event stream: block by block, with the tokens, as routers read them.

The cache tells what comes and goes by chunk hash; which blocks and tokens a chunk stands for is known here, from the
requests. Only what is known is told, so whatever was told as stored is told as removed when it leaves, too.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored

from kvcore.api import ObjectEvent, ObjectKey
from kvcore_vllm import _compat
from kvcore_vllm.requests import RequestState

MAX_TOKENS = 4 << 20
"""Tokens whose chunks are known at most, which takes some 50 MiB; of more, the longest unused are told as removed."""
MAX_WAITING = 65_536
"""Objects that wait for vLLM to ask, which it does once a step; when there are more, all that was told is told as
removed, and what comes then is heard anew."""


class _Chunk:
    """What routers are told of a chunk, and where they have been told it is: (tier, KV group)."""

    __slots__ = ("extra_keys", "hashes", "lora_id", "lora_name", "parent", "places", "tokens")

    def __init__(self, state: RequestState, first_block: int, last_block: int, block: int, ratio: int) -> None:
        request = state.request
        hashes = request.block_hashes
        own = hashes[(first_block + 1) * ratio - 1 : last_block * ratio : ratio]
        self.hashes = [_compat.event_hash(h) for h in own]
        self.parent = _compat.event_hash(hashes[first_block * ratio - 1]) if first_block else None
        self.tokens = array("I", _compat.token_ids(request)[first_block * block : last_block * block])
        adapter = request.lora_request
        self.lora_id = adapter.adapter_id if adapter is not None else None
        self.lora_name = adapter.name if adapter is not None else None
        self.extra_keys = _compat.event_extras(request, block, first_block, last_block)
        self.places: set[tuple[str, int]] = set()


class _Group(NamedTuple):
    kind: str | None
    window: int | None


class KVEvents:
    """An observer of the cache, and the source of `take`. `describe`, `found`, `take` and `clear` are the scheduler's;
    the observer's methods may come from any thread.

    Args:
        kv_cache_config: vLLM's.
        block_tokens: tokens per block; hash_tokens: tokens per block hash of vLLM.
    """

    def __init__(self, kv_cache_config: Any, block_tokens: int, hash_tokens: int) -> None:
        self._block = block_tokens
        self._ratio = block_tokens // hash_tokens
        self._groups = [_Group(*_compat.event_group(g)) for g in kv_cache_config.kv_cache_groups]
        self._chunks: OrderedDict[tuple[bytes, bytes], _Chunk] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()
        self._heard: list[tuple[bool, Sequence[ObjectEvent]]] = []
        self._waiting = 0
        self._lost = False
        self._made: list[Any] = []

    # -- the cache tells ---------------------------------------------------------------------------------------------

    def stored(self, events: Sequence[ObjectEvent]) -> None:
        """See `kvcore_stored`."""
        self._hear(True, events)

    def evicted(self, events: Sequence[ObjectEvent]) -> None:
        """See `kvcore_evicted`."""
        self._hear(False, events)

    def lost(self) -> None:
        """Nothing that was told so far may be true any more."""
        with self._lock:
            self._drop()

    def _hear(self, here: bool, events: Sequence[ObjectEvent]) -> None:
        with self._lock:
            if self._waiting > MAX_WAITING:
                self._drop()
            self._waiting += len(events)
            self._heard.append((here, events))

    def _drop(self) -> None:
        self._heard = []
        self._waiting = 0
        self._lost = True

    # -- the scheduler tells -----------------------------------------------------------------------------------------

    def describe(self, state: RequestState, first: int, last: int) -> None:
        """The chunks `[first, last)` of a request may be stored or fetched."""
        space, blocks = state.space, state.space.chunk_blocks
        for i in range(first, last):
            key = (space.namespace, state.hashes[i])
            if key in self._chunks:
                self._chunks.move_to_end(key)
                continue
            self._chunks[key] = _Chunk(state, i * blocks, (i + 1) * blocks, self._block, self._ratio)
            self._tokens += space.chunk_tokens
        while self._tokens > MAX_TOKENS:
            self._forget(next(iter(self._chunks)))

    def found(self, state: RequestState, first: int, last: int) -> None:
        """The chunks `[first, last)` of a request were found, and are in L1 now: of an earlier process, perhaps."""
        space = state.space
        self.describe(state, first, last)
        for g, window in enumerate(space.windows):
            if window is None:
                keys = [ObjectKey(space.namespace, h, g) for h in state.hashes[first:last]]
                self._hear(True, [ObjectEvent(key, "l1", 0) for key in keys])

    def take(self) -> list[Any]:
        """vLLM's events of what was heard since the last call."""
        with self._lock:
            heard, self._heard = self._heard, []
            lost, self._lost = self._lost, False
            self._waiting = 0
        if lost:
            self._take_back()
        for here, events in heard:
            (self._store if here else self._remove)(events)
        made, self._made = self._made, []
        return made

    def clear(self) -> None:
        """Nothing that was told is to be used again."""
        self._take_back()
        self._chunks.clear()
        self._tokens = 0

    # -- from objects to events --------------------------------------------------------------------------------------

    def _store(self, events: Iterable[ObjectEvent]) -> None:
        for event in events:
            chunk = self._chunks.get((event.key.namespace, event.key.chunk_hash))
            place = (event.tier, event.key.group)
            if chunk is not None and place not in chunk.places:
                chunk.places.add(place)
                self._tell_stored(chunk, *place)

    def _remove(self, events: Iterable[ObjectEvent]) -> None:
        for event in events:
            chunk = self._chunks.get((event.key.namespace, event.key.chunk_hash))
            place = (event.tier, event.key.group)
            if chunk is not None and place in chunk.places:
                chunk.places.remove(place)
                self._tell_removed(chunk, *place)

    def _forget(self, key: tuple[bytes, bytes]) -> None:
        chunk = self._chunks.pop(key)
        self._tokens -= len(chunk.tokens)
        self._leave(chunk)

    def _take_back(self) -> None:
        for chunk in self._chunks.values():
            self._leave(chunk)

    def _leave(self, chunk: _Chunk) -> None:
        for place in sorted(chunk.places):
            self._tell_removed(chunk, *place)
        chunk.places.clear()

    def _tell_stored(self, chunk: _Chunk, tier: str, group: int) -> None:
        medium = _medium(tier)
        last = self._made[-1] if self._made else None
        if (
            isinstance(last, BlockStored)
            and (last.medium, last.group_idx, last.lora_name) == (medium, group, chunk.lora_name)
            and last.block_hashes[-1] == chunk.parent
            and (last.extra_keys is None) == (chunk.extra_keys is None)
        ):
            last.block_hashes += chunk.hashes
            last.token_ids += chunk.tokens
            if chunk.extra_keys is not None:
                last.extra_keys += chunk.extra_keys
            return
        self._made.append(
            BlockStored(
                block_hashes=list(chunk.hashes),
                parent_block_hash=chunk.parent,
                token_ids=list(chunk.tokens),
                block_size=self._block,
                lora_id=chunk.lora_id,
                medium=medium,
                lora_name=chunk.lora_name,
                extra_keys=None if chunk.extra_keys is None else list(chunk.extra_keys),
                group_idx=group,
                kv_cache_spec_kind=self._groups[group].kind,
                kv_cache_spec_sliding_window=self._groups[group].window,
            )
        )

    def _tell_removed(self, chunk: _Chunk, tier: str, group: int) -> None:
        medium = _medium(tier)
        last = self._made[-1] if self._made else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, group):
            last.block_hashes += chunk.hashes
            return
        self._made.append(BlockRemoved(block_hashes=list(chunk.hashes), medium=medium, group_idx=group))


def _medium(tier: str) -> str:
    """vLLM's words: routers take no others."""
    return str(MEDIUM_CPU if tier == "l1" else MEDIUM_STORAGE)
