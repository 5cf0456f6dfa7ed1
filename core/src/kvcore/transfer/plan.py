"""The plan that the control plane hands to the data plane. Import-light: it is made where no torch is."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

Blocks = tuple[int, ...]


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
    blocks: Blocks


def copies_of(
    group: int,
    slots: Iterable[int],
    generations: Iterable[int],
    firsts: Iterable[int],
    blocks: Iterable[tuple[int, ...]],
) -> list[Copy]:
    """A copy for each of `slots`, made in C: calling `Copy` takes longer than all else of a plan."""
    return list(map(tuple.__new__, repeat(Copy), zip(repeat(group), slots, generations, firsts, blocks)))


class Run(NamedTuple):
    """Blocks of one copy that lie together in the object.

    Args:
        base: offset in bytes in the arena of this rank's range of the object.
        first: index within the object of the first of them.
        ids: the engine's block ids, none negative.
    """

    base: int
    first: int
    ids: Sequence[int]


def runs(base: int, first: int, blocks: Sequence[int]) -> list[Run]:
    """The runs of block ids that are not negative."""
    if min(blocks) >= 0:
        return [Run(base, first, blocks)]
    found: list[Run] = []
    begin = None
    for i, block in enumerate([*blocks, -1]):
        if block >= 0 and begin is None:
            begin = i
        elif block < 0 and begin is not None:
            found.append(Run(base, first + begin, blocks[begin:i]))
            begin = None
    return found
