"""Cells to codes and back, on the CPU. A cell is one region of one layer, over all blocks of the object.

A group is a column of `[group, groups of the cell]`: whatever its elements' stride in memory, all arithmetic runs along
rows, and only the copies in and out follow the stride.
"""

from typing import Any

import numpy as np

from kvcore_quant.cuts import Cut, grouped
from kvcore_quant.floats import E4M3, Kind, bf16_down, bf16_up, from_e4m3, narrow, of_bf16, to_e4m3, widen

FP8_LIMIT = 28672.0
"""448 * 2**6: up to here the scale's inverse, divided by `E4M3.bias`, is no subnormal."""


class Fp8:
    """e4m3 times a bfloat16 scale: `scales[cell, groups]`, then `codes[cell, group, groups]`."""

    name, code, tag = "fp8", 1, "quant-fp8/1"
    sizes = (64, 128)
    """Least and most elements of a group. Its steps are parts of the element itself, so a scale serves many."""
    parameters = 1
    """bfloat16 numbers of a group."""
    group_multiple = 1

    @staticmethod
    def code_rows(group: int) -> int:
        """Bytes that hold the codes of a group."""
        return group

    @staticmethod
    def encode(values: Any, kind: Kind, parameters: Any, codes: Any) -> Any:
        """Encode `values[cell, group, groups]`, overwriting them, into `parameters[0, cell, groups]` and `codes`. Which
        cells could not be: they hold numbers that are too large, infinite or none."""
        most = np.maximum(values.max(axis=1), -values.min(axis=1))
        good = (most < min(kind.limit, FP8_LIMIT)).all(axis=-1)
        parameters[0] = bf16_up(most / np.float32(448))
        inverse = np.float32(1 / E4M3.bias) / of_bf16(parameters[0])
        np.multiply(values, inverse[:, None], out=values)
        to_e4m3(values, codes)
        return ~good

    @staticmethod
    def decode(parameters: Any, codes: Any, values: Any) -> None:
        """The opposite."""
        from_e4m3(codes, values)
        scales = of_bf16(parameters[0]) * np.float32(E4M3.bias)
        np.multiply(values, scales[:, None], out=values)


class Int4:
    """Steps of a bfloat16 scale above a bfloat16 minimum: `scales[cell, groups]`, `minima[cell, groups]`, then
    `codes[cell, group / 2, groups]`: an element of the group's first half in the low four bits, one of the other half
    in the high."""

    name, code, tag = "int4", 2, "quant-int4/1"
    sizes = (8, 32)
    parameters = 2
    group_multiple = 2

    @staticmethod
    def code_rows(group: int) -> int:
        """See `Fp8.code_rows`."""
        return group // 2

    @staticmethod
    def encode(values: Any, kind: Kind, parameters: Any, codes: Any) -> Any:
        """See `Fp8.encode`."""
        most, least = values.max(axis=1), values.min(axis=1)
        good = ((most < kind.limit) & (least > -kind.limit)).all(axis=-1)
        parameters[1] = bf16_down(least + np.float32(0))  # which of two zeros is the lesser must not matter
        least = of_bf16(parameters[1])
        parameters[0] = bf16_up((most - least) / np.float32(15))
        inverse = np.float32(1) / of_bf16(parameters[0])
        np.subtract(values, least[:, None], out=values)
        np.multiply(values, inverse[:, None], out=values)
        np.rint(values, out=values)
        half = values.shape[1] // 2
        high = values[:, half:].astype(np.uint8)
        np.copyto(codes, values[:, :half], casting="unsafe")
        np.left_shift(high, 4, out=high)
        np.bitwise_or(codes, high, out=codes)
        return ~good

    @staticmethod
    def decode(parameters: Any, codes: Any, values: Any) -> None:
        """See `Fp8.decode`."""
        half = values.shape[1] // 2
        np.copyto(values[:, :half], codes & 15)
        np.copyto(values[:, half:], codes >> 4)
        np.multiply(values, of_bf16(parameters[0])[:, None], out=values)
        np.add(values, of_bf16(parameters[1])[:, None], out=values)


Format = type[Fp8] | type[Int4]
FORMATS: dict[str, Format] = {each.name: each for each in (Fp8, Int4)}


def encode_cells(form: Format, kind: Kind, cells: Any, cut: Cut, parameters: Any, codes: Any, scratch: Any) -> Any:
    """Encode `cells[cell, block, element]`. Which of them could not be."""
    view = grouped(cells, cut)
    values = scratch[: cells.size].reshape(view.shape)
    widen(view, kind, values)
    with np.errstate(all="ignore"):
        return form.encode(values.reshape(len(cells), cut.group, -1), kind, parameters, codes)


def decode_cells(form: Format, kind: Kind, cells: Any, cut: Cut, parameters: Any, codes: Any, scratch: Any) -> None:
    """Decode into `cells[cell, block, element]`."""
    view = grouped(cells, cut)
    values = scratch[: cells.size].reshape(view.shape)
    with np.errstate(all="ignore"):
        form.decode(parameters, codes, values.reshape(len(cells), cut.group, -1))
        narrow(values, kind, view)
