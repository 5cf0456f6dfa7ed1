"""KV as engines lay it out: keys with some loud channels, values with some loud tokens, in any order of their axes."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.api import ObjectLayout

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}


def to_elements(values: Any, dtype: str) -> bytes:
    """float32 as elements of `dtype`."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    return np.ascontiguousarray(values, {"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()


def to_floats(payload: "bytes | bytearray | memoryview", dtype: str) -> Any:
    """Elements of `dtype` as float32."""
    if dtype == "bfloat16":
        return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(payload, {"float16": "<f2", "float32": "<f4"}[dtype]).astype(np.float32)


@dataclass(frozen=True)
class Shape:
    """How much KV there is."""

    layers: int = 3
    blocks: int = 4
    tokens: int = 16
    heads: int = 4
    size: int = 64
    ranks: int = 1


def keys_and_values(shape: Shape, seed: int = 0) -> tuple[Any, Any]:
    """`[rank, layer, block, token, head, element]` each."""
    random = np.random.default_rng(seed)
    dims = (shape.ranks, shape.layers, shape.blocks, shape.tokens, shape.heads, shape.size)
    channels = np.exp(random.normal(0, 1.5, (shape.ranks, shape.layers, 1, 1, shape.heads, shape.size)))
    offsets = random.normal(0, 2, channels.shape) * channels
    loud = np.exp(random.normal(0, 1.5, (*dims[:4], 1, 1)))
    keys = random.normal(0, 0.3, dims) * channels + offsets
    values = random.normal(0, 1, dims) * loud
    return keys.astype(np.float32), values.astype(np.float32)


def pack_pairs(x: Any) -> Any:
    """As a matrix unit wants rows: two of them interleaved, element by element."""
    *rest, rows, columns = x.shape
    return x.reshape(*rest, rows // 2, 2, columns).swapaxes(-1, -2)


def _flat(x: Any) -> Any:
    """`[rank, layer, block, element]`."""
    return x.reshape(*x.shape[:3], -1)


def _both(*parts: Any) -> Any:
    return np.concatenate([_flat(part) for part in parts], axis=-1)


def _per_head(keys: Any, values: Any) -> Any:
    """Head by head, first its keys, then its values; both `[rank, layer, block, head, ...]`."""
    shape = (*keys.shape[:4], -1)
    return np.concatenate([keys.reshape(shape), values.reshape(shape)], axis=-1)


ARRANGED = {
    # [K | V] of [token, head, element]: NHD
    "tokens first": lambda k, v: _both(k, v),
    # [K | V] of [head, token, element]: HND
    "heads first": lambda k, v: _both(k.swapaxes(3, 4), v.swapaxes(3, 4)),
    # vLLM's CPU backend: head by head, keys transposed
    "keys transposed": lambda k, v: _per_head(np.moveaxis(k, 3, 5), v.swapaxes(3, 4)),
    # the same where blocks are packed for AMX: keys by pairs of elements, values by pairs of tokens
    "packed for a matrix unit": lambda k, v: _per_head(pack_pairs(np.moveaxis(k, 3, 5)), pack_pairs(v.swapaxes(3, 4))),
    # [token, head, K | V]
    "keys beside values": lambda k, v: np.concatenate([k, v], axis=-1),
}
"""Name -> how `keys_and_values` become the elements of blocks, from rank, layer and block on."""


def payload_of(arrangement: str, shape: Shape, dtype: str = "bfloat16", seed: int = 0) -> tuple[bytes, ObjectLayout]:
    """An object and its layout."""
    values = ARRANGED[arrangement](*keys_and_values(shape, seed)).reshape(shape.ranks, shape.layers, shape.blocks, -1)
    width = WIDTHS[dtype]
    layout = ObjectLayout(shape.blocks, shape.ranks, (values.shape[-1] * width,) * shape.layers, dtype, width)
    return to_elements(values, dtype), layout


def rows_payload(shape: Shape, layers: int, dtype: str = "bfloat16") -> tuple[bytes, ObjectLayout]:
    """What an engine gives that hands over all layers as one: a single layer for kvcore, `[K | V]` `layers` times."""
    payload, layout = payload_of("tokens first", Shape(layers, 1, shape.tokens, shape.heads, shape.size), dtype)
    return payload, ObjectLayout(1, 1, (sum(layout.layer_block_bytes),), dtype, WIDTHS[dtype])


def error(payload: bytes, decoded: "bytes | bytearray", dtype: str = "bfloat16") -> float:
    """Root of the mean square of the difference, in parts of that of the payload."""
    x, y = to_floats(payload, dtype).astype(np.float64), to_floats(decoded, dtype).astype(np.float64)
    return float(np.sqrt(np.square(x - y).mean() / np.square(x).mean()))
