"""Where the bytes of a layer's blocks stand in memory."""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Geometry:
    """A layer as addresses: block `b` is the segments at `address + b * stride + offset`, in the order of `offsets`.

    Args:
        address: of block 0, in bytes.
        count: blocks.
        stride: bytes from one block to the next.
        segment_bytes: size of one contiguous piece of a block; a block in one piece has one.
        offsets: of the segments within a block, in the order of `tensor[block].contiguous()`.
    """

    address: int
    count: int
    stride: int
    segment_bytes: int
    offsets: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.segment_bytes * len(self.offsets)

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + (self.count - 1) * self.stride + max(self.offsets) + self.segment_bytes


def geometry(tensor: "torch.Tensor", smallest: int) -> Geometry | None:
    """The geometry of a layer; None when its segments have less than `smallest` bytes."""
    size = tensor.element_size()
    dims = [(n, s * size) for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True) if n > 1]
    segment = size
    while dims and dims[-1][1] == segment:
        segment *= dims.pop()[0]
    count = prod(n for n, _ in dims)
    if segment < min(smallest, segment * count):
        return None
    offsets = tuple(sum(steps) for steps in product(*(range(0, n * s, s) for n, s in dims)))
    return Geometry(tensor.data_ptr(), tensor.shape[0], tensor.stride(0) * size, segment, offsets)
