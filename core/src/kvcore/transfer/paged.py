"""One rank's paged KV and the mapped arena, and the copies between them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvcore.api import LayoutError, ObjectLayout
from kvcore.transfer.plan import Copy, Run, runs
from kvcore.transfer.rows import Rows, rows_of
from kvcore.transfer.tensors import Tensors

if TYPE_CHECKING:
    import torch


class Arena(Protocol):
    """What a mapped arena offers (`kvcore.engine.attach_arena` gives one)."""

    buffer: memoryview

    def generation(self, slot: int) -> int: ...


class PagedCache:
    """Copies whole blocks of bytes; what is inside a block is the engine's affair.

    Args:
        groups: per KV cache group, the layers' tensors in the order of `layouts[group].layer_block_bytes`;
            `tensor[block_id]` is one block. Layers of different groups may overlay the same memory.
        layouts: per group, the layout of its objects.
        rank: which rank's range of each object is this one's.
        arena: the mapped arena.
        rows: None chooses the fastest way for each layer; False forces the general one.

    Raises `LayoutError` when a tensor's blocks have another size than the layout says.
    """

    def __init__(
        self,
        groups: "Sequence[Sequence[torch.Tensor]]",
        layouts: Sequence[ObjectLayout],
        rank: int,
        arena: Arena,
        *,
        rows: bool | None = None,
    ) -> None:
        self._arena = arena
        self._layouts = tuple(layouts)
        self._rank = rank
        self._layers: list[list[Rows | Tensors]] = []
        self._blocks: list[int] = []
        for g, (tensors, layout) in enumerate(zip(groups, layouts, strict=True)):
            if len(tensors) != len(layout.layer_block_bytes) or not 0 <= rank < layout.ranks:
                raise LayoutError(
                    f"KV group {g}: {len(tensors)} layers for rank {rank}, the layout has "
                    f"{len(layout.layer_block_bytes)} layers and {layout.ranks} ranks"
                )
            for i, (tensor, expected) in enumerate(zip(tensors, layout.layer_block_bytes, strict=True)):
                found = tensor[0].numel() * tensor.element_size()
                if found != expected:
                    raise LayoutError(f"KV group {g}, layer {i}: a block has {found} bytes, the layout says {expected}")
            self._layers.append(
                [
                    Rows(t, n) if rows is not False and Rows.fits(t) else Tensors(t)
                    for t, n in zip(tensors, layout.layer_block_bytes, strict=True)
                ]
            )
            self._blocks.append(min(t.shape[0] for t in tensors))

    def store(self, copies: Sequence[Copy]) -> None:
        """Copy the engine's blocks into the slots. Raises `LayoutError` for a plan that is out of bounds, before
        anything is written; whatever else is raised, the plan's objects must not be published."""
        for copy, wanted in self._checked(copies):
            for offset, layer, nbytes in self._ranges(copy):
                for run in wanted:
                    layer.gather(run, rows_of(self._arena.buffer, offset + run.at * nbytes, run.length, nbytes))

    def load(self, copies: Sequence[Copy]) -> set[int]:
        """Copy the slots into the engine's blocks. The block ids of copies whose slot was freed meanwhile: what is in
        those blocks must be computed. Raises `LayoutError` for a plan out of bounds, before anything is written."""
        failed: set[int] = set()
        for copy, wanted in self._checked(copies):
            for offset, layer, nbytes in self._ranges(copy):
                for run in wanted:
                    layer.scatter(run, rows_of(self._arena.buffer, offset + run.at * nbytes, run.length, nbytes))
            if self._arena.generation(copy.slot) != copy.generation:
                failed.update(b for b in copy.blocks if b >= 0)
        return failed

    def _ranges(self, copy: Copy) -> "list[tuple[int, Rows | Tensors, int]]":
        """Per layer: where the first copied block lies in the arena, the layer, the size of its blocks."""
        layout = self._layouts[copy.group]
        offset = copy.slot + self._rank * layout.rank_bytes
        ranges = []
        for layer, nbytes in zip(self._layers[copy.group], layout.layer_block_bytes, strict=True):
            ranges.append((offset + copy.first * nbytes, layer, nbytes))
            offset += layout.blocks * nbytes
        return ranges

    def _checked(self, copies: Sequence[Copy]) -> list[tuple[Copy, list[Run]]]:
        """Each copy with its runs of wanted blocks."""
        size = len(self._arena.buffer)
        checked = []
        for copy in copies:
            if not 0 <= copy.group < len(self._layouts):
                raise LayoutError(f"a plan for KV group {copy.group}, there are {len(self._layouts)}")
            layout, blocks = self._layouts[copy.group], copy.blocks
            if not blocks or copy.first < 0 or copy.first + len(blocks) > layout.blocks:
                raise LayoutError(f"{len(blocks)} blocks from {copy.first} on, an object has {layout.blocks}")
            if max(blocks) >= self._blocks[copy.group]:
                raise LayoutError(f"block {max(blocks)}, the engine has {self._blocks[copy.group]}")
            if not 0 <= copy.slot <= size - layout.nbytes:
                raise LayoutError(f"a slot of {layout.nbytes} bytes at {copy.slot}, the arena has {size}")
            checked.append((copy, runs(blocks)))
        return checked
