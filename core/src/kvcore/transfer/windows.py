"""Layers in host memory as rows of one window, so that one call copies the blocks of many layers and objects.

A window is a range of addresses that holds several layers, seen as an array of pieces of a void dtype: a piece is the
largest size that divides all distances between their blocks, so each block is a few whole pieces. A gather is then
`ndarray.take` and a scatter an indexed assignment: one memcpy per piece in C, and few points at which a copying thread
waits for the GIL.

Three facts about numpy, measured, stand behind this:

* `take` copies its source when that is not contiguous, so a window has no gaps; any mode but `clip` buffers `out`.
* An indexed assignment frees the GIL only above 500 rows, so scatters use pieces of about 4 KiB: those of 2 MiB or more
  run without it. Gathers always do, and use the largest pieces, which is faster with memory aligned to pages. Pieces of
  1 or 2 KiB are half as fast. An assignment from rows that do not lie together takes 1.5 times as long.
* Both copy everything twice when the bounds of source and target overlap, so no window may enclose the arena.
"""

import ctypes
from collections.abc import Iterator, Sequence
from math import gcd
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvcore.transfer.geometry import Geometry, geometry
from kvcore.transfer.plan import Run

if TYPE_CHECKING:
    import torch

SMALLEST = 128
"""Pieces below this many bytes are not worth an index each."""
_PAGE = 4096


class Window:
    """Adjacent layers of one group, with blocks of one size.

    Args:
        layers: where their blocks are. The caller keeps the memory alive.
        at: offset in bytes of the first of them in a rank's range of an object.
        blocks: engine blocks per object.
        memory: the arena.
    """

    def __init__(self, layers: Sequence[Geometry], at: int, blocks: int, memory: memoryview) -> None:
        self._at, self._blocks, self._memory = at, blocks, memory
        self._block_bytes = layers[0].block_bytes
        self.depth = len(layers)
        piece = _piece(layers)
        self._large = _Pieces(layers, piece)
        self._small = _Pieces(layers, _small(piece))

    def gather(self, wanted: Sequence[Run], layers: range | None = None) -> None:
        """Copy the runs' blocks into the arena."""
        for index, start in self._moves(self._large, wanted, layers):
            self._large.rows.take(index, None, self._large.of(self._memory, start, len(index)), "clip")

    def scatter(self, wanted: Sequence[Run], layers: range | None = None) -> None:
        """Copy from the arena into the runs' blocks."""
        for index, start in self._moves(self._small, wanted, layers):
            self._small.rows[index] = self._small.of(self._memory, start, len(index))

    def _moves(self, pieces: "_Pieces", wanted: Sequence[Run], layers: range | None) -> Iterator[tuple[Any, int]]:
        """Rows of the window that lie one after the other in the arena, and where; as few such as there are."""
        whole = []
        layers = range(self.depth) if layers is None else layers
        layer_bytes = self._blocks * self._block_bytes
        at = self._at + layers.start * layer_bytes
        for run in wanted:
            if len(run.ids) == self._blocks:
                whole.append(run)
                continue
            start = run.base + at + run.first * self._block_bytes
            for layer, rows in enumerate(pieces.index([run], layers)[0]):
                yield rows.reshape(-1), start + layer * layer_bytes
        if not whole:
            return
        whole.sort(key=attrgetter("base"))
        index, begin = pieces.index(whole, layers), 0
        for end in range(1, len(whole) + 1):
            if end == len(whole) or whole[end].base - whole[end - 1].base != len(layers) * layer_bytes:
                yield index[begin:end].reshape(-1), whole[begin].base + at
                begin = end


class _Pieces:
    """A window seen as pieces of one size: its `rows`."""

    def __init__(self, layers: Sequence[Geometry], piece: int) -> None:
        start, end = min(g.address for g in layers), max(g.end for g in layers)
        memory = (ctypes.c_char * (end - start)).from_address(start)
        self._dtype: Any = np.dtype(f"V{piece}")
        self.rows: Any = np.frombuffer(memory, self._dtype)
        self._step = layers[0].stride // piece
        within: Any = np.arange(layers[0].segment_bytes // piece, dtype=np.intp)
        self._offsets: Any = np.stack(
            [np.concatenate([(g.address + o - start) // piece + within for o in g.offsets]) for g in layers]
        )[None, :, None, :]

    def index(self, runs: Sequence[Run], layers: range) -> Any:
        """The rows of [run, layer, block, piece]; every run has as many blocks."""
        ids = np.array([run.ids for run in runs], dtype=np.intp)
        return self._offsets[:, layers.start : layers.stop] + (ids * self._step)[:, None, :, None]

    def of(self, memory: memoryview, start: int, count: int) -> Any:
        """`count` rows of the arena."""
        return np.ndarray((count,), self._dtype, memory, start)


def windows(
    tensors: "Sequence[torch.Tensor]", blocks: int, memory: memoryview, *, smallest: int = SMALLEST
) -> list[Window] | None:
    """As few windows as hold all layers of a group; None when one of them cannot be seen so."""
    arena = np.frombuffer(memory, np.uint8)
    bounds = arena.ctypes.data, arena.ctypes.data + len(arena)
    found: list[Window] = []
    group: list[Geometry] = []
    at, span = 0, _Span(0, 0, 0)
    for tensor in tensors:
        layer = geometry(tensor, smallest) if tensor.device.type == "cpu" and tensor.stride(0) > 0 else None
        if layer is None or (own := _Span.of(layer)).piece < min(smallest, layer.block_bytes):
            return None
        joint = span.joined(own)
        if group and not _together(group[0], layer, joint, bounds):
            found.append(Window(group, at, blocks, memory))
            at += blocks * sum(g.block_bytes for g in group)
            group = []
        span = joint if group else own
        group.append(layer)
    found.append(Window(group, at, blocks, memory))
    return found


class _Span(NamedTuple):
    """The addresses of some layers, and the largest piece that their blocks and the distances between them are made
    of."""

    start: int
    end: int
    piece: int

    @classmethod
    def of(cls, layer: Geometry) -> "_Span":
        return cls(layer.address, layer.end, _piece([layer]))

    def joined(self, other: "_Span") -> "_Span":
        piece = gcd(self.piece, other.piece, other.start - self.start)
        return _Span(min(self.start, other.start), max(self.end, other.end), piece)


def _together(first: Geometry, layer: Geometry, joint: _Span, arena: tuple[int, int]) -> bool:
    """May this layer share a window with those from `first` on, which takes `joint` then? `arena` is its range of
    addresses."""
    if (first.block_bytes, first.segment_bytes, first.stride) != (layer.block_bytes, layer.segment_bytes, layer.stride):
        return False
    if joint.start < arena[1] and joint.end > arena[0]:
        return False
    return joint.piece >= min(_PAGE, _piece([first]), _piece([layer]))


def _piece(layers: Sequence[Geometry]) -> int:
    """The largest size in bytes that divides every block's segments and every distance between two of them."""
    start = layers[0].address
    return gcd(*(gcd(g.address - start, g.segment_bytes, g.stride, *g.offsets) for g in layers))


def _small(piece: int) -> int:
    """The smallest divisor of `piece` of at least a page, or `piece`."""
    return next(piece // n for n in range(max(1, piece // _PAGE), 0, -1) if piece % n == 0)
