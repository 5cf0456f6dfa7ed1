"""Layers on any torch device, or with blocks in very small pieces: plain torch operations.

A block stands in an object in the order of `tensor[block].contiguous()`. On a device, the layers of an object are
gathered or scattered there, and cross to the arena in one copy. NVIDIA GPUs have kernels of their own (`cuda/`) where
CuPy is installed. Runs on CPU tensors in the tests; on other devices it has not been run by this project.
"""

from collections.abc import Sequence

import torch

from kvcore.transfer.plan import Run

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Tensors:
    """The layers of one group.

    Args:
        tensors: `tensor[block]` is one block, of any shape, stride and dtype.
        blocks: engine blocks per object.
        memory: the arena.
        staged: whole objects cross in one copy; None says so for all but host memory.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], blocks: int, memory: memoryview, *, staged: bool | None = None
    ) -> None:
        # Bytes are all that counts, and not every operation knows every dtype (fp8).
        self._layers = [t.detach().view(_INTEGERS[t.element_size()]) for t in tensors]
        self._sizes = [t[0].numel() * t.element_size() for t in tensors]
        self.depth = len(tensors)
        self._blocks, self._memory = blocks, memory
        self._device = tensors[0].device
        self._staged = self._device.type != "cpu" if staged is None else staged

    def gather(self, wanted: Sequence[Run], layers: range | None = None) -> None:
        """Copy the runs' blocks into the arena."""
        some = _slice(layers)
        for run in wanted:
            index = torch.tensor(run.ids, device=self._device)
            blocks = [t.index_select(0, index).reshape(-1).view(torch.uint8) for t in self._layers[some]]
            if self._staged and len(run.ids) == self._blocks:
                blocks = [torch.cat(blocks)]
            for part, values in zip(self._parts(run)[some], blocks, strict=False):
                _bytes(self._memory, part, values.numel()).copy_(values)

    def scatter(self, wanted: Sequence[Run], layers: range | None = None) -> None:
        """Copy from the arena into the runs' blocks."""
        some = _slice(layers)
        sizes = self._sizes[some]
        for run in wanted:
            index = torch.tensor(run.ids, device=self._device)
            count, parts = len(run.ids), self._parts(run)[some]
            whole = None
            if self._staged and count == self._blocks:
                whole = _bytes(self._memory, parts[0], count * sum(sizes)).to(self._device)
            for layer, size, part in zip(self._layers[some], sizes, parts, strict=True):
                if whole is None:
                    values = _bytes(self._memory, part, count * size).to(self._device)
                else:
                    values = whole[part - parts[0] :][: count * size]
                if values.data_ptr() % layer.element_size():
                    values = values.clone()
                layer[index] = values.view(layer.dtype).view(count, *layer.shape[1:])  # faster than `index_copy_`

    def _parts(self, run: Run) -> list[int]:
        """Per layer, where the run's first block stands in the arena."""
        parts, at = [], run.base
        for size in self._sizes:
            parts.append(at + run.first * size)
            at += self._blocks * size
        return parts


def _slice(layers: range | None) -> slice:
    return slice(None) if layers is None else slice(layers.start, layers.stop)


def _bytes(memory: memoryview, offset: int, count: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=offset)
