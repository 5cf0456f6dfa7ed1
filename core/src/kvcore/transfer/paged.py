"""One rank's paged KV and the mapped arena, and the copies between them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from kvcore.api import LayoutError, ObjectLayout
from kvcore.transfer.plan import Copy, Run, runs

if TYPE_CHECKING:
    import torch


class MappedArena(Protocol):
    """What a mapped arena offers (`kvcore.engine.attach_arena` gives one)."""

    buffer: memoryview

    def generation(self, slot: int) -> int: ...


class Mover(Protocol):
    """Copies the blocks of some adjacent layers of one group; `layers` counts from the first of them, None is all.

    On a device a copy comes after what the calling thread's current stream was told before, and what that is told later
    finds it done. When the call returns, the arena was read or written: the slots' generations are compared then.
    """

    @property
    def depth(self) -> int:
        """How many layers it has."""

    def gather(self, wanted: Sequence[Run], layers: range | None = None) -> None: ...

    def scatter(self, wanted: Sequence[Run], layers: range | None = None) -> None: ...


class PagedCache:
    """Copies whole blocks of bytes; what is inside a block is the engine's affair.

    Args:
        groups: per KV cache group, the layers' tensors in the order of `layouts[group].layer_block_bytes`;
            `tensor[block_id]` is one block. Layers of different groups may overlay the same memory.
        layouts: per group, the layout of its objects.
        rank: which rank's range of each object is this one's.
        arena: the mapped arena.
        rows: None chooses the fastest way for each group; True and False force that of host memory and that of torch.

    Raises `LayoutError` when a tensor's blocks have another size than the layout says.
    """

    def __init__(
        self,
        groups: "Sequence[Sequence[torch.Tensor]]",
        layouts: Sequence[ObjectLayout],
        rank: int,
        arena: MappedArena,
        *,
        rows: bool | None = None,
    ) -> None:
        if len(groups) != len(layouts):
            raise LayoutError(f"{len(groups)} KV groups, but the layouts of {len(layouts)}")
        self._arena = arena
        self._layouts = tuple(layouts)
        self._rank = rank
        self._tensors = [list(tensors) for tensors in groups]  # movers know addresses only: this keeps them alive
        self._blocks = []
        for g, (tensors, layout) in enumerate(zip(self._tensors, layouts, strict=True)):
            _validate(g, tensors, layout, rank)
            self._blocks.append(min(t.shape[0] for t in tensors))
        self._movers = [
            _movers(tensors, layout.blocks, arena.buffer, rows)
            for tensors, layout in zip(self._tensors, layouts, strict=True)
        ]

    def store(self, copies: Sequence[Copy], layers: range | None = None) -> None:
        """Copy the engine's blocks into the slots. Raises `LayoutError` for a plan that is out of bounds, before
        anything is written; whatever else is raised, the plan's objects must not be published.

        `layers`: which layers of each group, in steps of one; None is all. The objects are whole once every layer was
        stored."""
        for group, wanted in self._checked(copies).items():
            for mover, part in self._parts(group, layers):
                mover.gather(wanted, part)

    def load(self, copies: Sequence[Copy], layers: range | None = None) -> set[int]:
        """Copy the slots into the engine's blocks, all `layers` of a group or some. The block ids of copies whose slot
        was freed meanwhile: what is in those blocks must be computed. Raises `LayoutError` for a plan out of bounds,
        before anything is written."""
        for group, wanted in self._checked(copies).items():
            for mover, part in self._parts(group, layers):
                mover.scatter(wanted, part)
        generation = self._arena.generation
        return {b for c in copies if generation(c.slot) != c.generation for b in c.blocks if b >= 0}

    def _parts(self, group: int, layers: range | None) -> Iterator[tuple[Mover, range | None]]:
        """The movers of a group's layers, each with its own part of them."""
        begin = 0
        for mover in self._movers[group]:
            end = begin + mover.depth
            part = range(begin, end) if layers is None else range(max(layers.start, begin), min(layers.stop, end))
            if len(part) == mover.depth:
                yield mover, None
            elif part:
                yield mover, range(part.start - begin, part.stop - begin)
            begin = end

    def _checked(self, copies: Sequence[Copy]) -> dict[int, list[Run]]:
        """Per group, the runs of wanted blocks."""
        size = len(self._arena.buffer)
        checked: dict[int, list[Run]] = {}
        for group, slot, _, first, blocks in copies:
            if not 0 <= group < len(self._layouts):
                raise LayoutError(f"a plan for KV group {group}, there are {len(self._layouts)}")
            layout = self._layouts[group]
            if not blocks or first < 0 or first + len(blocks) > layout.blocks:
                raise LayoutError(f"{len(blocks)} blocks from {first} on, an object has {layout.blocks}")
            if max(blocks) >= self._blocks[group]:
                raise LayoutError(f"block {max(blocks)}, the engine has {self._blocks[group]}")
            if not 0 <= slot <= size - layout.nbytes:
                raise LayoutError(f"a slot of {layout.nbytes} bytes at {slot}, the arena has {size}")
            checked.setdefault(group, []).extend(runs(slot + self._rank * layout.rank_bytes, first, blocks))
        return checked


def _validate(group: int, tensors: "Sequence[torch.Tensor]", layout: ObjectLayout, rank: int) -> None:
    if not tensors or len(tensors) != len(layout.layer_block_bytes) or not 0 <= rank < layout.ranks:
        raise LayoutError(
            f"KV group {group}: {len(tensors)} layers for rank {rank}, the layout has "
            f"{len(layout.layer_block_bytes)} layers and {layout.ranks} ranks"
        )
    for i, (tensor, expected) in enumerate(zip(tensors, layout.layer_block_bytes, strict=True)):
        found = tensor[0].numel() * tensor.element_size()
        if found != expected:
            raise LayoutError(f"KV group {group}, layer {i}: a block has {found} bytes, the layout says {expected}")
        if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
            raise LayoutError(f"KV group {group}, layer {i}: its elements share memory, so it cannot be written")


def _movers(tensors: "Sequence[torch.Tensor]", blocks: int, memory: memoryview, rows: bool | None) -> "Sequence[Mover]":
    if rows is not False:
        try:
            from kvcore.transfer.windows import SMALLEST, windows
        except ImportError:  # without numpy, which torch does not insist on
            pass
        else:
            found = windows(tensors, blocks, memory, smallest=1 if rows else SMALLEST)
            if found is not None:
                return found
    if rows is None and tensors[0].device.type != "cpu":
        from kvcore.transfer.cuda import cuda_movers

        kernels = cuda_movers(tensors, blocks, memory)
        if kernels is not None:
            return kernels
    from kvcore.transfer.tensors import Tensors

    return [Tensors(tensors, blocks, memory)]
