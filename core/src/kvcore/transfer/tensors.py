"""One layer on any torch device, or with strided blocks: plain torch operations.

A block stands in an object in the order of `tensor[block].contiguous()`. Runs on CPU tensors in the tests; on CUDA, XPU
and other devices it has not been run by this project.
"""

from collections.abc import Sequence
from typing import Any

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Tensors:
    """The blocks of one layer.

    Args:
        tensor: `tensor[block]` is one block, of any shape, stride and dtype.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        # Bytes are all that counts, and not every operation knows every dtype (fp8).
        self._blocks = tensor.view(_INTEGERS[tensor.element_size()])

    def gather(self, ids: Sequence[int], out: Any) -> None:
        """Copy blocks `ids` into `out`, a numpy view of as many rows."""
        index = torch.tensor(ids, device=self._blocks.device)
        _bytes(out).copy_(self._blocks.index_select(0, index).reshape(len(ids), -1).view(torch.uint8))

    def scatter(self, ids: Sequence[int], rows: Any) -> None:
        """Copy `rows` into blocks `ids`."""
        blocks = self._blocks
        index = torch.tensor(ids, device=blocks.device)
        values = _bytes(rows).to(blocks.device).view(blocks.dtype).view(len(ids), *blocks.shape[1:])
        blocks.index_copy_(0, index, values)


def _bytes(rows: Any) -> torch.Tensor:
    return torch.from_numpy(rows.view("u1").reshape(len(rows), -1))
