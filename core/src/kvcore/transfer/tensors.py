"""One layer on any torch device, or with strided blocks: plain torch operations.

A block stands in an object in the order of `tensor[block].contiguous()`. Runs on CPU tensors in the tests; on CUDA, XPU
and other devices it has not been run by this project.
"""

from typing import Any

import torch

from kvcore.transfer.plan import Run

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Tensors:
    """The blocks of one layer.

    Args:
        tensor: `tensor[block]` is one block, of any shape, stride and dtype.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        # Bytes are all that counts, and not every operation knows every dtype (fp8).
        self._blocks = tensor.view(_INTEGERS[tensor.element_size()])

    def gather(self, run: Run, out: Any) -> None:
        """Copy the run's blocks into `out`, a numpy view of as many rows."""
        index = torch.from_numpy(run.ids).to(self._blocks.device)
        _bytes(out).copy_(self._blocks.index_select(0, index).reshape(run.length, -1).view(torch.uint8))

    def scatter(self, run: Run, rows: Any) -> None:
        """Copy `rows` into the run's blocks."""
        blocks = self._blocks
        index = torch.from_numpy(run.ids).to(blocks.device)
        values = _bytes(rows).to(blocks.device).view(blocks.dtype).view(run.length, *blocks.shape[1:])
        blocks[index] = values  # four times faster than `index_copy_` on a CPU


def _bytes(rows: Any) -> torch.Tensor:
    return torch.from_numpy(rows.view("u1").reshape(len(rows), -1))
