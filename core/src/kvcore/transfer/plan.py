"""The plan that the control plane hands to the data plane. Import-light: it is made where no torch is."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Copy(NamedTuple):
    """One object to copy between its slot in the arena and the engine's blocks.

    Args:
        group: the KV cache group.
        slot: offset in bytes of the object's payload in the arena.
        generation: the slot's generation when the plan was made; a load whose slot has another one afterwards failed.
        first: index within the object of the first block to copy.
        blocks: the engine's block ids for the object's blocks from `first` on; a negative one is skipped.
    """

    group: int
    slot: int
    generation: int
    first: int
    blocks: tuple[int, ...]


class Run(NamedTuple):
    """Blocks of one copy that lie together in the object.

    Args:
        at: index of the first among the copied blocks.
        ids: the engine's block ids, as a numpy array of intp.
        first_id: the first of them. length: how many.
        consecutive: they follow each other, so that one copy serves them all.
    """

    at: int
    ids: Any
    first_id: int
    length: int
    consecutive: bool


def runs(blocks: Sequence[int]) -> list[Run]:
    """The runs of block ids that are not negative."""
    if min(blocks) >= 0:
        return [_run(0, blocks)]
    found: list[Run] = []
    begin = None
    for i, block in enumerate([*blocks, -1]):
        if block >= 0 and begin is None:
            begin = i
        elif block < 0 and begin is not None:
            found.append(_run(begin, blocks[begin:i]))
            begin = None
    return found


def _run(at: int, ids: Sequence[int]) -> Run:
    import numpy as np

    first, count = ids[0], len(ids)
    consecutive = count == 1 or (ids[-1] - first == count - 1 and list(ids) == list(range(first, first + count)))
    return Run(at, np.array(ids, dtype=np.intp), first, count, consecutive)
