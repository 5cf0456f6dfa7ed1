"""One layer on a CPU whose blocks are contiguous: rows of opaque bytes.

numpy sees each block as one item of a void dtype, so that a gather or a scatter of blocks is one memcpy per block in C,
without the GIL. That reaches 0.9 of the speed of one large copy in both directions, where torch's `index_select` and
`index_copy_` and a ctypes call per block stay at 0.3 to 0.8.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


class Rows:
    """The blocks of one layer.

    Args:
        tensor: `tensor[block]` is one contiguous run of `block_bytes`. It is kept alive.
    """

    def __init__(self, tensor: "torch.Tensor", block_bytes: int) -> None:
        self._tensor = tensor
        count, stride = tensor.shape[0], tensor.stride(0) * tensor.element_size()
        memory = (ctypes.c_char * ((count - 1) * stride + block_bytes)).from_address(tensor.data_ptr())
        self._rows: Any = np.ndarray((count,), dtype=f"V{block_bytes}", buffer=memory, strides=(stride,))

    @staticmethod
    def fits(tensor: "torch.Tensor") -> bool:
        """Can this layer be seen as rows of bytes?"""
        return (
            tensor.device.type == "cpu" and tensor.shape[0] > 0 and tensor[0].is_contiguous() and tensor.stride(0) > 0
        )

    def gather(self, ids: Sequence[int], out: Any) -> None:
        """Copy blocks `ids` into the rows `out`."""
        if consecutive(ids):
            out[:] = self._rows[ids[0] : ids[0] + len(ids)]
        else:
            self._rows.take(ids, out=out, mode="clip")  # any other mode makes numpy buffer `out`

    def scatter(self, ids: Sequence[int], rows: Any) -> None:
        """Copy `rows` into blocks `ids`."""
        if consecutive(ids):
            self._rows[ids[0] : ids[0] + len(ids)] = rows
        else:
            self._rows[list(ids)] = rows


def consecutive(ids: Sequence[int]) -> bool:
    """Do the ids follow each other, so that one copy serves them all?"""
    return len(ids) == 1 or (ids[-1] - ids[0] == len(ids) - 1 and list(ids) == list(range(ids[0], ids[-1] + 1)))


def rows_of(memory: memoryview, offset: int, count: int, block_bytes: int) -> Any:
    """`count` rows of `block_bytes` in the arena, from `offset` on."""
    return np.ndarray((count,), dtype=f"V{block_bytes}", buffer=memory, offset=offset)
