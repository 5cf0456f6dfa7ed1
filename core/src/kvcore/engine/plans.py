"""Plans: which slot of the arena goes to which of an engine's blocks, and back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, repeat

from kvcore.l1 import L1Object
from kvcore.transfer.plan import Blocks, Copy, copies_of

Generations = Callable[[Iterable[int]], list[int]]
"""The generations that slots have now."""


def chunk_blocks(block_ids: Sequence[int], begin: int, end: int, blocks: int) -> list[Blocks]:
    """The engine's block ids for each of the chunks `[begin, end)` of a request, which have `blocks` each. Where it has
    given fewer ids, the last chunks have fewer."""
    ids = tuple(block_ids[begin * blocks : end * blocks])
    return [ids[at : at + blocks] for at in range(0, (end - begin) * blocks, blocks)]


def load_plan(
    groups: Sequence[Mapping[int, L1Object]],
    chunks: range,
    blocks: int,
    first_block: int,
    block_ids: Sequence[Sequence[int]],
    generations: Generations,
) -> tuple[list[Copy], int]:
    """What brings the objects of these `chunks` into the engine's blocks from `first_block` on, and how many blocks of
    a request that are.

    Args:
        groups: chunk -> object, per group. blocks: of each chunk.
    """
    begin, end, copies, loaded = max(chunks.start, first_block // blocks), chunks.stop, list[Copy](), 0
    for group, objects in enumerate(groups):
        spans, firsts = chunk_blocks(block_ids[group], begin, end, blocks), [0] * (end - begin)
        if spans and first_block > begin * blocks:
            firsts[0] = first_block - begin * blocks
            spans[0] = spans[0][firsts[0] :]
        found = list(map(objects.get, range(begin, end)))
        used = [o and s and (s[0] >= 0 or max(s) >= 0) for o, s in zip(found, spans, strict=True)]
        if not all(used):  # outside this group's window, or not wanted
            found, firsts, spans = (
                list(compress(found, used)),
                list(compress(firsts, used)),
                list(compress(spans, used)),
            )
        slots = [o.slot for o in found if o is not None]
        copies += copies_of(group, slots, generations(slots), firsts, spans)
        loaded = max(loaded, sum(map(len, spans)))  # a window holds only the last of them
    return copies, loaded


def storable(
    hashes: Sequence[bytes], first: int, last: int, block_ids: Sequence[int], blocks: int
) -> dict[bytes, Blocks]:
    """Those of the chunks `[first, last)` whose blocks the engine still has, all of them, with their block ids."""
    spans = chunk_blocks(block_ids, first, last, blocks)
    chosen = dict(zip(hashes[first:last], spans, strict=True))
    if sum(map(len, spans)) < (last - first) * blocks or min(map(min, spans)) < 0:
        return {h: span for h, span in chosen.items() if len(span) == blocks and min(span) >= 0}
    return chosen


def store_plan(
    claimed: Sequence[Sequence[L1Object]], wanted: Sequence[dict[bytes, Blocks]], generations: Generations
) -> list[Copy]:
    """What fills claimed slots. Their generations cannot change while they are leased."""
    copies = []
    for group, objects in enumerate(claimed):
        slots, spans = [o.slot for o in objects], [wanted[group][o.chunk_hash] for o in objects]
        copies += copies_of(group, slots, generations(slots), repeat(0), spans)
    return copies
