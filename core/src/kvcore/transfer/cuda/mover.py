"""The layers of one KV group on an NVIDIA GPU: what is copied in which piece, and which way."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kvcore.transfer.cuda.lanes import Gpu, Lane, Piece, Span, Way
from kvcore.transfer.cuda.pins import pinned
from kvcore.transfer.cuda.tables import layer_table
from kvcore.transfer.geometry import Geometry, geometry
from kvcore.transfer.plan import Run

if TYPE_CHECKING:
    import torch


class _Unit(NamedTuple):
    """Blocks of one run and some of its layers that fit into a buffer; in the object they begin at `start`."""

    run: Run
    layers: range
    start: int
    nbytes: int


class CudaMover:
    """See `Mover`. Thread-safe.

    Args:
        layers: where their blocks are on the device. The caller keeps that memory alive.
        blocks: engine blocks per object.
        memory: the arena.
        gpu: whose memory it is.
    """

    def __init__(self, layers: Sequence[Geometry], blocks: int, memory: memoryview, gpu: Gpu) -> None:
        self.depth = len(layers)
        self._blocks, self._gpu = blocks, gpu
        self._sizes = [g.block_bytes for g in layers]
        self._at = [0, *accumulate(blocks * size for size in self._sizes)]
        with gpu.device.use():
            self._table = layer_table(layers, self._at[:-1], gpu.device)
        self.arena = pinned(gpu.device, memory)

    def gather(self, wanted: Sequence[Run], layers: range | None = None) -> None:
        """Copy the runs' blocks into the arena."""
        self._move(self._gpu.save, wanted, layers)

    def scatter(self, wanted: Sequence[Run], layers: range | None = None) -> None:
        """Copy from the arena into the runs' blocks."""
        self._move(self._gpu.load, wanted, layers)

    def _move(self, lane: Lane, wanted: Sequence[Run], layers: range | None) -> None:
        layers = range(self.depth) if layers is None else layers
        if wanted and layers:
            way = self._way(lane, wanted, layers)
            lane.run(way, self._pieces(wanted, layers, way), self.arena.address, self._table.ptr)

    def _way(self, lane: Lane, wanted: Sequence[Run], layers: range) -> Way:
        if not self.arena.ready:
            return "bounced"
        if not self._gpu.device.shared_addresses:
            return "staged"
        nbytes = sum(len(run.ids) for run in wanted) * sum(self._sizes[layers.start : layers.stop])
        return lane.speeds.way(nbytes, sum(1 if len(run.ids) == self._blocks else len(layers) for run in wanted))

    def _pieces(self, wanted: Sequence[Run], layers: range, way: Way) -> Iterator[Piece]:
        """The runs, cut and joined into launches. In a buffer, an object's bytes lie as in the arena, holes and all."""
        room = None if way == "direct" else self._gpu.buffer_bytes
        piece, used = Piece(layers), 0
        for run in wanted:
            for unit in self._units(run, layers, room):
                place = -(-used // 16) * 16 + unit.start % 16  # aligned as in the arena
                full = room is not None and place + unit.nbytes > room
                if piece.count and (
                    full or unit.layers != piece.layers or piece.count + len(unit.run.ids) > self._gpu.rows
                ):
                    yield piece
                    piece, place = Piece(unit.layers), unit.start % 16
                piece.layers = unit.layers
                piece.count += len(unit.run.ids)
                if room is None:
                    piece.rows.append((run.base, unit.run.first, unit.run.ids))
                    continue
                piece.rows.append((place - unit.start, unit.run.first, unit.run.ids))
                piece.spans += self._spans(unit, place)
                used = place + unit.nbytes
        yield piece

    def _units(self, run: Run, layers: range, room: int | None) -> Iterator[_Unit]:
        """The run, halved until each part fits: first its layers, then its blocks."""
        start, nbytes = self._at[layers.start], self._at[layers.stop] - self._at[layers.start]
        if len(layers) == 1:
            size = self._sizes[layers.start]
            start, nbytes = start + run.first * size, len(run.ids) * size
        fits = room is None or nbytes <= room
        if fits and len(run.ids) <= self._gpu.rows:
            yield _Unit(run, layers, start, nbytes)
        elif not fits and len(layers) > 1:
            half = len(layers) // 2
            yield from self._units(run, layers[:half], room)
            yield from self._units(run, layers[half:], room)
        else:
            half = len(run.ids) // 2
            yield from self._units(Run(run.base, run.first, run.ids[:half]), layers, room)
            yield from self._units(Run(run.base, run.first + half, run.ids[half:]), layers, room)

    def _spans(self, unit: _Unit, place: int) -> Iterator[Span]:
        """What of the unit lies together: all of it, or each layer's part."""
        run = unit.run
        if len(unit.layers) == 1 or len(run.ids) == self._blocks:
            yield Span(run.base + unit.start, place, unit.nbytes)
            return
        for layer in unit.layers:
            size = self._sizes[layer]
            at = self._at[layer] + run.first * size
            yield Span(run.base + at, place + at - unit.start, len(run.ids) * size)


def cuda_mover(tensors: "Sequence[torch.Tensor]", blocks: int, memory: memoryview, gpu: Gpu) -> CudaMover | None:
    """The mover of these layers, or None where a block is too large for it."""
    layers = [found for t in tensors if (found := geometry(t, 1)) is not None and found.block_bytes <= gpu.buffer_bytes]
    return CudaMover(layers, blocks, memory, gpu) if len(layers) == len(tensors) else None
