"""The plan that the control plane hands to the data plane. Import-light: it is made where no torch is."""

from typing import NamedTuple


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
