"""How the bytes of an object are arranged."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """The arrangement of one object's payload: rank by rank, layer by layer, block by block.

    An engine block is opaque: what is inside depends on the attention backend and its instruction set, so nothing
    ever slices tokens out of it. `payload[rank][layer][block]` is `layer_block_bytes[layer]` bytes, all contiguous.

    Args:
        blocks: engine blocks per object.
        ranks: tensor-parallel ranks of this node, each owning an equal range of the object.
        layer_block_bytes: size in bytes of one block of each layer, on one rank.
        dtype: the KV element type as the engine names it, such as `bfloat16`, `float32` or `fp8_e4m3`.
        element_bytes: size of one element in bytes.
    """

    blocks: int
    ranks: int
    layer_block_bytes: tuple[int, ...]
    dtype: str
    element_bytes: int

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank's range."""
        return self.blocks * sum(self.layer_block_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole payload."""
        return self.ranks * self.rank_bytes
