"""One layer on a CPU whose blocks are contiguous: rows of opaque bytes.

numpy sees each block as one item of a void dtype, so that a gather or a scatter of blocks is one memcpy per block in C,
without the GIL. That reaches 0.9 of the speed of one large copy in both directions, where torch's `index_select` and
`index_copy_` and a ctypes call per block stay at 0.1 to 0.8.
"""

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.transfer.plan import Run

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
        self._dense = stride == block_bytes

    @staticmethod
    def fits(tensor: "torch.Tensor") -> bool:
        """Can this layer be seen as rows of bytes?"""
        return bool(tensor.device.type == "cpu" and len(tensor) and tensor[0].is_contiguous() and tensor.stride(0) > 0)

    def gather(self, run: Run, out: Any) -> None:
        """Copy the run's blocks into the rows `out`."""
        if run.consecutive:
            out[:] = self._rows[run.first_id : run.first_id + run.length]
        elif self._dense:
            self._rows.take(run.ids, out=out, mode="clip")  # any other mode makes numpy buffer `out`
        else:
            out[:] = self._rows[run.ids]  # `take` would first copy all of a layer with gaps between its blocks

    def scatter(self, run: Run, rows: Any) -> None:
        """Copy `rows` into the run's blocks."""
        if run.consecutive:
            self._rows[run.first_id : run.first_id + run.length] = rows
        else:
            self._rows[run.ids] = rows


def rows_of(memory: memoryview, offset: int, count: int, block_bytes: int) -> Any:
    """`count` rows of `block_bytes` in the arena, from `offset` on."""
    return np.ndarray((count,), dtype=f"V{block_bytes}", buffer=memory, offset=offset)
