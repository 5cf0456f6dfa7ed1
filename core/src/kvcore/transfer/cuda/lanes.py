"""The streams, events and buffers of one GPU, and the order in which work is queued on them.

Everything is allocated at the start: a call allocates nothing on the device and pins nothing. It ends when its bytes
have arrived, because the slot's generation is compared then; the calling thread waits for that without the GIL, and
neither the device nor the model's streams wait for anything.

Three ways lead from paged KV (left) to the arena (right), and back:

    direct    kernel ───────────────────────────────▶ pinned arena
    staged    kernel ─▶ device buffer ─ copy engine ─▶ pinned arena
    bounced   kernel ─▶ pinned buffer ─ memcpy ──────▶ arena that is not pinned, or not yet

`direct` takes no copy engine and one pass, and serves pieces of any size alike; `staged` leaves the multiprocessors to
the model and wants large pieces. Which is faster depends on the machine: it is measured at the start, for each
direction, and chosen for each call by the number and size of its pieces.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np

from kvcore.transfer.cuda.device import CudaDevice, Kernel
from kvcore.transfer.cuda.tables import LAYER_BYTES, layer_table
from kvcore.transfer.geometry import Geometry

BUFFER_BYTES = 16 << 20
"""Of each of the four buffers on the device and the four pinned ones: two of both for each direction."""
ROWS = 4096
"""Blocks per launch: those of 65,536 tokens."""
GROUPS = 1024
"""Thread blocks that fill any GPU."""
_ROW_BYTES = 24  # struct Row of blocks.cu
_PARTS = 256  # of a buffer, where copies are measured
_GROUPS = (8, 16, 32, 64, 128)
_NEARLY = 0.95

Way = Literal["direct", "staged", "bounced"]


class Span(NamedTuple):
    """Adjacent bytes: where they stand in the arena and in a buffer."""

    arena: int
    buffer: int
    nbytes: int


@dataclass(slots=True)
class Piece:
    """What one launch moves.

    Args:
        layers: of the group.
        rows: (base, index of the first, ids) of blocks. A base is where their object would begin, relative to the
            arena, or to the buffer where there are spans.
        spans: what the piece is in the arena and in a buffer; none for the direct way.
        count: blocks in `rows`.
    """

    layers: range
    rows: list[tuple[int, int, Sequence[int]]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    count: int = 0


@dataclass(frozen=True)
class Speeds:
    """Of one direction, as measured.

    Args:
        direct: bytes a second of the kernel from or to pinned memory.
        staged: bytes a second of the copy engine.
        span_s: what the copy engine takes for each piece, however small.
        groups: the fewest thread blocks with which the kernel is as fast, so that the model keeps the others.
    """

    direct: float
    staged: float
    span_s: float
    groups: int = 32

    def way(self, nbytes: int, spans: int) -> Way:
        """The faster one. Where they are close, the one that leaves the multiprocessors alone."""
        staged = nbytes / self.staged + spans * self.span_s
        return "direct" if nbytes / self.direct < 0.9 * staged else "staged"


class _Buffer:
    """One of the two that a lane fills and empties in turn."""

    def __init__(self, device: CudaDevice, nbytes: int, rows: int) -> None:
        self.staging = device.allocate(nbytes)
        self.bounce = device.allocate_pinned(nbytes)
        self.rows = device.allocate(rows * _ROW_BYTES)
        self.pinned_rows = device.allocate_pinned(rows * _ROW_BYTES)
        memory = (ctypes.c_int64 * (rows * 3)).from_address(self.pinned_rows.ptr)
        self.table: Any = np.frombuffer(memory, np.int64).reshape(rows, 3)
        self.moved = device.event()  # the kernel has run: its rows are read, and its end of the buffer
        self.carried = device.event()  # the copy engine has done its part


class Lane:
    """One direction. Calls take turns; the two directions of a GPU run side by side.

    Args:
        kernel: `kvcore_gather` or `kvcore_scatter`.
    """

    def __init__(self, device: CudaDevice, kernel: Kernel, nbytes: int, rows: int) -> None:
        self._device, self._kernel = device, kernel
        self._lock = threading.Lock()
        self._kernels, self._copies = device.stream(), device.stream()
        self._called = device.event()
        self._buffers = (_Buffer(device, nbytes, rows), _Buffer(device, nbytes, rows))
        self._steps = self._gather if kernel == "kvcore_gather" else self._scatter
        self.speeds = self._measured(nbytes, min(_PARTS, rows, nbytes))

    def run(self, way: Way, pieces: Iterable[Piece], arena: int, layers: int) -> None:
        """Move the pieces, behind what the caller's stream holds now. `arena` and `layers` are addresses."""
        device = self._device
        with self._lock, device.use():
            try:
                device.record(self._called, device.callers_stream())
                device.wait(self._kernels, self._called)
                self._steps(way, pieces, arena, layers)
            except BaseException:
                self._drain()  # nothing may be written once the caller knows that it has failed
                raise

    def _gather(self, way: Way, pieces: Iterable[Piece], arena: int, layers: int) -> None:
        device, last = self._device, None
        for piece, buffer in zip(pieces, cycle(self._buffers), strict=False):
            if way == "staged":
                device.synchronize(buffer.moved)
                device.wait(self._kernels, buffer.carried)
            self._launch(way, piece, buffer, arena, layers)
            if way == "staged":
                device.wait(self._copies, buffer.moved)
                for at, start, nbytes in piece.spans:
                    device.copy(arena + at, buffer.staging.ptr + start, nbytes, self._copies)
                device.record(buffer.carried, self._copies)
            elif last is not None:
                self._empty(*last, arena)
            last = piece, buffer
        if last is not None and way != "staged":
            self._empty(*last, arena)
        elif last is not None:
            device.synchronize(last[1].carried)

    def _empty(self, piece: Piece, buffer: _Buffer, arena: int) -> None:
        """Wait for the kernel, and carry what it wrote to the pinned buffer."""
        self._device.synchronize(buffer.moved)
        for at, start, nbytes in piece.spans:
            ctypes.memmove(arena + at, buffer.bounce.ptr + start, nbytes)

    def _scatter(self, way: Way, pieces: Iterable[Piece], arena: int, layers: int) -> None:
        device = self._device
        for piece, buffer in zip(pieces, cycle(self._buffers), strict=False):
            device.synchronize(buffer.moved)
            for at, start, nbytes in piece.spans:
                if way == "staged":
                    device.copy(buffer.staging.ptr + start, arena + at, nbytes, self._copies)
                else:
                    ctypes.memmove(buffer.bounce.ptr + start, arena + at, nbytes)
            if way == "staged":
                device.record(buffer.carried, self._copies)
                device.wait(self._kernels, buffer.carried)
            self._launch(way, piece, buffer, arena, layers)
            last = buffer
        device.synchronize(last.moved)

    def _launch(self, way: Way, piece: Piece, buffer: _Buffer, arena: int, layers: int) -> None:
        """Queue the kernel over the piece's blocks; the buffer's table must be free."""
        base = {"direct": arena, "staged": buffer.staging.ptr, "bounced": buffer.bounce.ptr}[way]
        at = 0
        for begin, first, ids in piece.rows:
            rows = buffer.table[at : at + len(ids)]
            rows[:, 0] = base + begin
            rows[:, 1] = np.arange(first, first + len(ids))
            rows[:, 2] = ids
            at += len(ids)
        device, depth = self._device, len(piece.layers)
        device.copy(buffer.rows.ptr, buffer.pinned_rows.ptr, at * _ROW_BYTES, self._kernels)
        first_layer = layers + piece.layers.start * LAYER_BYTES
        groups = min(GROUPS if way == "staged" else self.speeds.groups, at * depth)
        device.launch(self._kernel, groups, buffer.rows.ptr, at, first_layer, depth, self._kernels)
        device.record(buffer.moved, self._kernels)

    def _drain(self) -> None:
        with suppress(Exception):  # after a fault of the device nothing runs on it any more
            for stream in (self._kernels, self._copies):
                self._device.record(self._called, stream)
                self._device.synchronize(self._called)

    def _measured(self, nbytes: int, parts: int) -> Speeds:
        """Copies between two of the lane's own buffers, whole and in parts. Raises `RuntimeError` when what the kernel
        copies differs from what the copy engine does."""
        one, two = self._buffers
        gather, part = self._kernel == "kvcore_gather", nbytes // parts
        nbytes = part * parts
        layer = layer_table([Geometry(one.staging.ptr, parts, part, part, (0,))], [0], self._device)
        piece = Piece(range(1), [(0, 0, range(parts - 1, -1, -1))], count=parts)
        sent, found = (_parts(buffer, parts, part) for buffer in ((one, two) if gather else (two, one)))
        sent[:] = np.random.default_rng(1).integers(0, 256, sent.shape, np.uint8)

        def copies(number: int, out: bool) -> None:
            size, ends = nbytes // number, (one.bounce.ptr, one.staging.ptr)
            target, source = ends if out else ends[::-1]
            for at in range(0, nbytes, size):
                self._device.copy(target + at, source + at, size, self._copies)

        def kernel(groups: int) -> None:
            self.speeds = Speeds(1.0, 1.0, 0.0, groups)
            self._launch("bounced", piece, two, 0, layer.ptr)

        if gather:
            self._seconds(partial(copies, 1, False), self._copies, 1)
        kernels = [self._seconds(partial(kernel, n), self._kernels) for n in _GROUPS]
        if not gather:
            self._seconds(partial(copies, 1, True), self._copies, 1)
        if not np.array_equal(found, sent[::-1]):
            raise RuntimeError(f"{self._kernel} does not copy right on this device")
        groups, took = next((n, s) for n, s in zip(_GROUPS, kernels, strict=True) if s * _NEARLY <= min(kernels))
        whole, cut = (self._seconds(partial(copies, n, gather), self._copies) for n in (1, parts))
        return Speeds(nbytes / took, nbytes / whole, max(0.0, cut - whole) / parts, groups)

    def _seconds(self, queue: Callable[[], object], stream: Any, rounds: int = 4) -> float:
        """The shortest of some rounds."""
        best = float("inf")
        for _ in range(rounds):
            began = perf_counter()
            queue()
            self._device.record(self._called, stream)
            self._device.synchronize(self._called)
            best = min(best, perf_counter() - began)
        return best


def _parts(buffer: _Buffer, parts: int, size: int) -> Any:
    """The buffer in host memory, in parts."""
    return np.frombuffer((ctypes.c_uint8 * (parts * size)).from_address(buffer.bounce.ptr), np.uint8).reshape(parts, -1)


class Gpu:
    """One GPU: a lane for each direction.

    Args:
        buffer_bytes: of each buffer; no block of a layer may be larger.
        rows: blocks per launch.
    """

    def __init__(self, device: CudaDevice, buffer_bytes: int = BUFFER_BYTES, rows: int = ROWS) -> None:
        self.device, self.buffer_bytes, self.rows = device, buffer_bytes, rows
        with device.use():
            self.save = Lane(device, "kvcore_gather", buffer_bytes + 16, rows)  # 16: an object's place is odd there
            self.load = Lane(device, "kvcore_scatter", buffer_bytes + 16, rows)
