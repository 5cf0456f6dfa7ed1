"""From observers' events to events on the wire."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

from kvcore.api import ObjectEvent
from kvcore_events.wire import BlockRemoved, BlockStored, Hash, medium_of, short

REMEMBERED = 32_768
"""Chunks whose place in their request is remembered, because a tier is told of objects without it."""

What = Literal["stored", "evicted"]


class Translator:
    """Turns objects into as few events as say the same. Not thread-safe.

    Args:
        whole: write hashes whole, not their last 64 bits.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._hash: Callable[[bytes], Hash] = bytes if whole else short
        self._places: OrderedDict[tuple[bytes, bytes], tuple[bytes | None, int]] = OrderedDict()

    def events(self, what: What, objects: Sequence[ObjectEvent]) -> list[BlockStored | BlockRemoved]:
        """The events that tell of `objects`, in order."""
        return [*self._stored(objects)] if what == "stored" else [*self._removed(objects)]

    def _stored(self, objects: Sequence[ObjectEvent]) -> list[BlockStored]:
        made: list[BlockStored] = []
        for obj in objects:
            before, tokens = self._place(obj)
            parent = self._hash(before) if before else None
            last = made[-1] if made else None
            if last is not None and last.block_hashes[-1] == parent and _alike(last, obj, tokens):
                last.block_hashes.append(self._hash(obj.key.chunk_hash))
                continue
            made.append(
                BlockStored(
                    block_hashes=[self._hash(obj.key.chunk_hash)],
                    parent_block_hash=parent,
                    token_ids=[],
                    block_size=tokens,
                    lora_id=None,
                    medium=medium_of(obj.tier),
                    lora_name=None,
                    group_idx=obj.key.group,
                    tier=obj.tier,
                    nbytes=obj.nbytes,
                    namespace=obj.key.namespace.hex(),
                )
            )
        return made

    def _removed(self, objects: Sequence[ObjectEvent]) -> list[BlockRemoved]:
        made: dict[tuple[bytes, int, str, str], BlockRemoved] = {}
        for obj in objects:
            namespace, chunk_hash, group = obj.key
            kind = (namespace, group, obj.tier, obj.reason)
            if kind not in made:
                made[kind] = BlockRemoved(
                    block_hashes=[],
                    medium=medium_of(obj.tier),
                    group_idx=group,
                    tier=obj.tier,
                    reason=obj.reason,
                    namespace=namespace.hex(),
                )
            made[kind].block_hashes.append(self._hash(chunk_hash))
        return list(made.values())

    def _place(self, obj: ObjectEvent) -> tuple[bytes | None, int]:
        chunk = obj.key.namespace, obj.key.chunk_hash  # one hash ends chunks of any length, of all with a tokenizer
        if obj.parent is None:
            return self._places.get(chunk, (None, obj.tokens))
        place = self._places[chunk] = (obj.parent, obj.tokens)
        self._places.move_to_end(chunk)
        if len(self._places) > REMEMBERED:
            self._places.popitem(last=False)
        return place


def _alike(event: BlockStored, obj: ObjectEvent, tokens: int) -> bool:
    return (event.tier, event.group_idx, event.block_size, event.nbytes, event.namespace) == (
        obj.tier,
        obj.key.group,
        tokens,
        obj.nbytes,
        obj.key.namespace.hex(),
    )
