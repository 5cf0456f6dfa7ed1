"""What a client makes of the server's answers: which slot goes to which of the engine's blocks, and back."""

import itertools
from collections.abc import Sequence

from kvcore.service import wire
from kvcore.service.lookup import RemoteLookup
from kvcore.transfer.plan import Blocks, Copy


def load_copies(
    lookup: RemoteLookup, groups: Sequence[wire.Slots], first_block: int, block_ids: Sequence[Sequence[int]]
) -> tuple[list[Copy], int]:
    """What brings the objects in these slots into the engine's blocks from `first_block` on, and how many blocks of a
    request that are."""
    blocks, first = lookup.space.chunk_blocks, lookup.first
    make = Copy._make
    copies = []
    loaded = []
    for g, (ids, found) in enumerate(zip(block_ids, groups, strict=True)):
        slots, generations = wire.unpack_slots(found.slots), wire.unpack_slots(found.generations)
        indexes = wire.unpack_indexes(found.indexes) if found.indexes else range(len(slots))
        total = 0
        for i, slot, generation in zip(indexes, slots, generations, strict=True):
            at = (first + i) * blocks
            skip = max(0, first_block - at)
            chosen = tuple(ids[at + skip : at + blocks]) if skip < blocks else ()
            if chosen and (chosen[0] >= 0 or max(chosen) >= 0):
                copies.append(make((g, slot, generation, skip, chosen)))
                total += len(chosen)
        loaded.append(total)
    return copies, max(loaded)  # a window holds only the last of them


def spans_of(ids: Sequence[int], blocks: int, count: int) -> list[Blocks | None]:
    """The block ids of each chunk, or None for one that has not all of them."""
    spans: list[Blocks | None] = [tuple(ids[at : at + blocks]) for at in range(0, count * blocks, blocks)]
    if count and (len(ids) < count * blocks or min(ids) < 0):
        return [span if span and len(span) == blocks and min(span) >= 0 else None for span in spans]
    return spans


def store_copies(groups: Sequence[wire.Slots], spans: Sequence[Sequence[Blocks | None]]) -> list[Copy]:
    """What brings the engine's blocks into the slots that were reserved. `spans`: of each group, see `spans_of`."""
    return [
        Copy(g, slot, generation, 0, span)
        for g, found in enumerate(groups)
        for i, slot, generation in zip(
            wire.unpack_indexes(found.indexes) if found.indexes else itertools.count(),
            wire.unpack_slots(found.slots),
            wire.unpack_slots(found.generations),
            strict=False,
        )
        if (span := spans[g][i]) is not None
    ]
