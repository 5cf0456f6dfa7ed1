"""Cells to codes and back, on a GPU: an object goes there, one kernel does all of its cells, the result comes back."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import numpy as np

from kvcore.api import ObjectLayout, PluginError
from kvcore_quant.coder import FP8_LIMIT, Format
from kvcore_quant.floats import Kind
from kvcore_quant.frame import Section

THREADS = 256
"""Of a thread block."""
MAX_GROUPS = 1 << 16
"""Thread blocks of a launch."""
FIELDS = ("source", "block", "scales", "minima", "codes", "groups", "run", "across", "stride", "outer")
"""Of `Cell` in kernels.cu, 8 bytes each."""


class CudaDevice:
    """What `CudaCoder` asks of a GPU, by CuPy, which compiles the kernels at first use and keeps them in its cache.

    Tests without a GPU have another class with these methods. Addresses are integers.
    """

    def __init__(self, name: str) -> None:
        try:
            import cupy

            self._device = cupy.cuda.Device(int(name.partition(":")[2] or 0))
            self._memory, self._runtime = cupy.cuda.Memory, cupy.cuda.runtime
            with self._device:
                source = files(__package__).joinpath("kernels.cu").read_text(encoding="utf-8")
                module = cupy.RawModule(code=source, options=("-std=c++17",))
                self._kernels = {
                    name: module.get_function(name) for name in ("kvcore_quant_encode", "kvcore_quant_decode")
                }
                self._new_stream = cupy.cuda.Stream
        except Exception as error:  # a build or driver that does not fit raises more than ImportError
            raise PluginError(
                f"serde quant: device is {name}, and CuPy does not work there ({error}); "
                "install kvcore-quant[cuda], or leave out `device`"
            ) from error

    @contextmanager
    def use(self) -> Iterator[None]:
        """Make it the calling thread's device."""
        with self._device:
            yield

    def stream(self) -> Any:
        """A new stream."""
        return self._new_stream(non_blocking=True)

    def allocate(self, nbytes: int) -> Any:
        """Memory of the device; its address is `ptr`."""
        return self._memory(nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Queue a copy between host and device."""
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, stream.ptr)

    def launch(self, kernel: str, groups: int, arguments: tuple[Any, ...], stream: Any) -> None:
        """Queue a kernel. Arguments are numpy scalars, addresses among them."""
        with stream:
            self._kernels[kernel]((groups,), (THREADS,), arguments)

    def synchronize(self, stream: Any) -> None:
        """Wait for all that is queued."""
        stream.synchronize()


class CudaCoder:
    """Encodes and decodes the cells of whole objects. Each thread has a stream and buffers of its own, which are kept
    and grow to its largest object."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._local = threading.local()

    def encode(self, form: Format, kind: Kind, cells: Any, payload: Any, encoded: Any) -> Any:
        """Encode the `cells` (see `cells_of`) of `payload` into `encoded`, between which all else stays as it is. Which
        cells could not be."""
        bad: Any = np.zeros(len(cells), np.int32)
        limit = min(kind.limit, FP8_LIMIT) if form.code == 1 else kind.limit
        with self._device.use():
            lane = self._lane()
            source, target, table, flags = lane.hold(payload, encoded, cells, bad)
            # All of it goes there, so that all can come back in one copy.
            self._device.copy(source, payload.ctypes.data, payload.nbytes, lane.stream)
            self._device.copy(target, encoded.ctypes.data, encoded.nbytes, lane.stream)
            self._device.copy(table, cells.ctypes.data, cells.nbytes, lane.stream)
            self._device.copy(flags, bad.ctypes.data, bad.nbytes, lane.stream)
            last = np.float32(limit), np.uint64(flags)
            self._launch("kvcore_quant_encode", lane, (source, target, table), cells, kind, form, last)
            self._device.copy(encoded.ctypes.data, target, encoded.nbytes, lane.stream)
            self._device.copy(bad.ctypes.data, flags, bad.nbytes, lane.stream)
            self._device.synchronize(lane.stream)
        return bad != 0

    def decode(self, form: Format, kind: Kind, cells: Any, payload: Any, encoded: Any) -> Any:
        """The opposite; `payload` holds what is no cell already. None of the cells could not be."""
        with self._device.use():
            lane = self._lane()
            target, source, table, _ = lane.hold(payload, encoded, cells, cells[:0])
            self._device.copy(target, payload.ctypes.data, payload.nbytes, lane.stream)
            self._device.copy(source, encoded.ctypes.data, encoded.nbytes, lane.stream)
            self._device.copy(table, cells.ctypes.data, cells.nbytes, lane.stream)
            self._launch("kvcore_quant_decode", lane, (target, source, table), cells, kind, form, ())
            self._device.copy(payload.ctypes.data, target, payload.nbytes, lane.stream)
            self._device.synchronize(lane.stream)
        return np.zeros(len(cells), bool)

    def _launch(
        self,
        name: str,
        lane: "_Lane",
        places: tuple[int, ...],
        cells: Any,
        kind: Kind,
        form: Format,
        last: tuple[Any, ...],
    ) -> None:
        tiles = -(-int(cells[:, FIELDS.index("groups")].max()) // THREADS)
        numbers = np.int64(len(cells)), np.int64(tiles), np.int32(kind.code), np.int32(form.code)
        arguments = (*map(np.uint64, places), *numbers, *last)
        self._device.launch(name, min(MAX_GROUPS, len(cells) * tiles), arguments, lane.stream)

    def _lane(self) -> "_Lane":
        lane: _Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = _Lane(self._device)
        return lane


class _Lane:
    """A thread's stream and buffers."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.stream = device.stream()
        self._held: list[Any] = [None] * 4
        self._sizes = [0] * 4

    def hold(self, *arrays: Any) -> list[int]:
        """Addresses of buffers at least as large as the arrays."""
        for i, array in enumerate(arrays):
            if self._held[i] is None or self._sizes[i] < array.nbytes:
                self._held[i] = None  # freed first
                self._sizes[i] = max(array.nbytes, 256)
                self._held[i] = self._device.allocate(self._sizes[i])
        return [held.ptr for held in self._held]


def cells_of(found: list[Section], form: Format, layout: ObjectLayout, width: int) -> Any:
    """The cells of all sections as kernels.cu wants them, `[cell, field]`; None when elements are not aligned."""
    tables = []
    for section in found:
        if section.cut is None:
            continue
        ranks, layers, regions = section.where
        cut, count, block = section.cut, len(ranks), section.span.block * width
        table: Any = np.empty((count, len(FIELDS)), np.int64)
        number = np.arange(count)
        table[:, 0] = ranks * layout.rank_bytes + section.span.offset + layers * layout.blocks * block
        table[:, 0] += regions * section.region * width
        table[:, 1] = block
        table[:, 2] = section.parameters + 2 * section.groups * number
        table[:, 3] = table[:, 2] + 2 * section.groups * count
        table[:, 4] = section.codes + section.groups * form.code_rows(cut.group) * number
        table[:, 5:] = section.groups, *cut, section.region // (cut.run * cut.stride)
        if (table[:, 0] % width).any():
            return None
        tables.append(table)
    return np.concatenate(tables) if tables else None
