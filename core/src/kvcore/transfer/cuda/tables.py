"""The table of layers that the kernels read: `struct Layer` of blocks.cu, and the offsets it points to."""

import ctypes
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from kvcore.transfer.cuda.device import CudaDevice
from kvcore.transfer.geometry import Geometry

LAYER_BYTES = 56


def layer_table(layers: Sequence[Geometry], at: Sequence[int], device: CudaDevice) -> Any:
    """The table on the device. `at`: per layer, where its blocks begin in a rank's range of an object."""
    places: dict[tuple[int, ...], int] = {}  # of offsets, in words: layers alike share them
    words = len(layers) * LAYER_BYTES // 8
    for layer in layers:
        if layer.offsets not in places:
            places[layer.offsets] = words
            words += len(layer.offsets)
    memory, pinned = device.allocate(words * 8), device.allocate_pinned(words * 8)
    table: Any = np.frombuffer((ctypes.c_int64 * words).from_address(pinned.ptr), np.int64)
    for i, (layer, begin) in enumerate(zip(layers, at, strict=True)):
        table[i * LAYER_BYTES // 8 :][: LAYER_BYTES // 8] = (
            layer.address,
            layer.stride,
            begin,
            layer.block_bytes,
            layer.segment_bytes,
            memory.ptr + places[layer.offsets] * 8,
            reduce(or_, layer.offsets, layer.address | layer.stride | layer.segment_bytes),
        )
    for offsets, place in places.items():
        table[place : place + len(offsets)] = offsets
    stream, uploaded = device.stream(), device.event()
    device.copy(memory.ptr, pinned.ptr, words * 8, stream)
    device.record(uploaded, stream)
    device.synchronize(uploaded)
    return memory
