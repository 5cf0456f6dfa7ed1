"""Elements to float32 and back, and the codes of both formats. In place, in arithmetic that a GPU repeats bit by bit.

A small float (float16, e4m3) is a float32 with a shorter exponent and mantissa. Multiplied by the power of two between
the two biases, a float32 has the small one's exponent field, subnormals included, so that shifts do the rest.
"""

import re
from typing import Any, NamedTuple

import numpy as np

MIN_SCALE = 0x0080
"""The least scale, as bfloat16: 2**-126. Its inverse is finite, so a group of equal elements is no special case."""
_ROUND_UP = 0xFFFF


class Kind(NamedTuple):
    """A type of elements: its number in the header, its width in bytes, and below what size it can be encoded."""

    code: int
    width: int
    limit: float


KINDS = {"bfloat16": Kind(1, 2, 1e38), "float16": Kind(2, 2, 60000.0), "float32": Kind(3, 4, 1e38)}
"""By the name that `ObjectLayout.dtype` gives. The limits leave room to round up."""
WORDS = {2: "<u2", 4: "<u4"}


def kind_of(dtype: str, width: int) -> Kind | None:
    """The kind that `ObjectLayout.dtype` names, of elements of `width` bytes; None for any that is not known. Engines
    may say it several times, as in `bfloat16:bfloat16`; where they say two things, such as `fp8:uint8`, it is none."""
    names = {name.removeprefix("torch.") for name in re.split("[:+]", dtype)}
    kind = KINDS.get(names.pop()) if len(names) == 1 else None
    return kind if kind is not None and kind.width == width else None


class Small(NamedTuple):
    """A small float: dropped bits of the mantissa, its sign bit, and the power of two between the biases."""

    drop: int
    sign: int
    bias: float


HALF = Small(13, 0x8000, 2.0**112)
E4M3 = Small(20, 0x80, 2.0**120)


def widen(elements: Any, kind: Kind, out: Any) -> None:
    """`elements`, as unsigned integers in any order in memory, as float32 in `out`."""
    bits = out.view(np.uint32)
    np.copyto(bits, elements)
    if kind.code == 1:
        np.left_shift(bits, 16, out=bits)
    elif kind.code == 2:
        _expand(bits, HALF)
        np.multiply(out, np.float32(HALF.bias), out=out)


def narrow(values: Any, kind: Kind, out: Any) -> None:
    """The float32 `values`, which are overwritten, as unsigned integers of that kind in `out`, rounded."""
    bits = values.view(np.uint32)
    if kind.code == 1:
        np.add(bits, 0x8000, out=bits)
        np.right_shift(bits, 16, out=bits)
    elif kind.code == 2:
        np.multiply(values, np.float32(1 / HALF.bias), out=values)
        _shrink(bits, HALF)
    np.copyto(out, bits, casting="unsafe")


def to_e4m3(values: Any, out: Any) -> None:
    """The codes of `values` (times `1 / E4M3.bias`, overwritten): half away from zero, none above 448."""
    bits = values.view(np.uint32)
    _shrink(bits, E4M3)
    np.copyto(out, bits, casting="unsafe")


def from_e4m3(codes: Any, out: Any) -> None:
    """The values of `codes`, times `1 / E4M3.bias`."""
    bits = out.view(np.uint32)
    np.copyto(bits, codes)
    _expand(bits, E4M3)


def bf16_up(values: Any) -> Any:
    """Positive float32 (or a negative zero) as bfloat16 bits, rounded up, at least `MIN_SCALE`."""
    bits = values.view(np.uint32) & 0x7FFFFFFF
    return np.maximum((bits + _ROUND_UP) >> 16, MIN_SCALE).astype("<u2")


def bf16_down(values: Any) -> Any:
    """float32 as bfloat16 bits, rounded towards minus infinity."""
    bits = values.view(np.uint32)
    return ((bits + np.where(bits >> 31, _ROUND_UP, 0).astype(np.uint32)) >> 16).astype("<u2")


def of_bf16(bits: Any) -> Any:
    """bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _shrink(bits: Any, small: Small) -> None:
    """Round away what is dropped and move the sign down."""
    np.add(bits, 1 << small.drop - 1, out=bits)
    np.right_shift(bits, small.drop, out=bits)
    sign = np.right_shift(bits, 32 - small.drop - small.sign.bit_length())
    np.bitwise_and(sign, small.sign, out=sign)
    np.bitwise_and(bits, small.sign - 1, out=bits)
    np.bitwise_or(bits, sign, out=bits)


def _expand(bits: Any, small: Small) -> None:
    """Move sign, exponent and mantissa to their places in a float32."""
    sign = np.bitwise_and(bits, small.sign)
    np.multiply(sign, (1 << 32 - small.drop - small.sign.bit_length()) - 1, out=sign)
    np.add(bits, sign, out=bits)
    np.left_shift(bits, small.drop, out=bits)
