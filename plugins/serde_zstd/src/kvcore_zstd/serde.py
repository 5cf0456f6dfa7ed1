"""The serde `zstd`: each byte plane of the elements is Zstandard, or raw where that gains nothing.

In a floating-point KV the exponents compress well and the mantissas not at all. So elements are cut into planes (all
first bytes, all second bytes, ...) and every plane goes its own way: exponents through the entropy coder alone,
mantissas straight through memory. Working in segments keeps what is being worked on in the CPU's cache.

The encoded bytes, all integers little-endian:

    offset  size
    0       2       b"KZ"
    2       1       width: bytes per element, 1, 2 or 4
    3       1       s: a segment is 2**s elements, the last one what is left
    4       8       length of the payload in bytes
    12      4 * n   stored size of each plane: by segment, then from the lowest byte of the element to the highest
    ...             the planes in that order. A plane whose stored size is its number of elements is raw, any other is
                    one Zstandard frame that states its content size
    ...             the last (length mod width) bytes of the payload, raw
"""

import struct
import threading
from typing import Any

import numpy as np
import zstandard

from kvcore.api import ObjectLayout, Serde, SerdeError
from kvcore_zstd.config import ZstdConfig

HEADER = struct.Struct("<2sBBQ")
MAGIC = b"KZ"
WORDS = {1: "<u1", 2: "<u2", 4: "<u4"}
"""Width of an element in bytes -> its type as an unsigned integer. Elements of another width are taken byte by byte."""
SEGMENT_BITS = 18
"""Segments written: planes of 256 KiB. Larger ones would leave the L2 cache, smaller ones spend more time in Python."""
MAX_SEGMENT_BITS = 24
PROBE_BYTES = 4096
"""A plane is compressed only when this much of its middle gains."""


class ZstdSerde(Serde):
    """Byte planes and Zstandard. Several threads may use one instance; the heavy calls release the GIL."""

    tag = "zstd/1"
    lossy = False

    def __init__(self, config: ZstdConfig, context: Any) -> None:
        self._coders = _Coders(config.level)

    def encode(self, source: memoryview, layout: ObjectLayout) -> memoryview:
        """See `Serde.encode`."""
        width = layout.element_bytes if layout.element_bytes in WORDS else 1
        elements = len(source) // width
        shape = _Shape(width, elements, SEGMENT_BITS)
        compress = self._coders.compressor.compress
        encoded: Any = np.empty(self.max_encoded_bytes(len(source)), np.uint8)
        HEADER.pack_into(encoded, 0, MAGIC, width, SEGMENT_BITS, len(source))
        payload = _bytes_of(source)
        words = payload[: elements * width].view(WORDS[width])
        shifted = np.empty(min(elements, shape.segment), words.dtype) if width > 1 else words
        sizes = []
        at = shape.data_offset
        for first in range(0, elements, shape.segment):
            segment = words[first : first + shape.segment]
            n = len(segment)
            for index in range(width):
                plane = encoded[at : at + n]
                if index:
                    np.right_shift(segment, 8 * index, out=shifted[:n])
                np.copyto(plane, shifted[:n] if index else segment, casting="unsafe")
                sizes.append(_shrink(plane, compress))
                at += sizes[-1]
        encoded[HEADER.size : shape.data_offset].view("<u4")[:] = sizes
        tail = payload[elements * width :]
        encoded[at : at + len(tail)] = tail
        return memoryview(encoded)[: at + len(tail)]

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        """See `Serde.decode`."""
        shape, sizes = _read_header(source, len(into))
        decompressor = self._coders.decompressor
        data = _bytes_of(source)
        payload = _bytes_of(into)
        words = payload[: shape.elements * shape.width].view(WORDS[shape.width])
        at = shape.data_offset
        planes = []
        for index, size in enumerate(sizes):
            segment = words[index // shape.width * shape.segment :][: shape.segment]
            planes.append(_unpack(data[at : at + size], len(segment), decompressor))
            at += size
            if len(planes) == shape.width:
                _join(planes, segment)
                planes.clear()
        payload[shape.elements * shape.width :] = data[at:]

    def max_encoded_bytes(self, nbytes: int) -> int:
        """See `Serde.max_encoded_bytes`."""
        planes = (nbytes >> SEGMENT_BITS) + max(WORDS)
        return HEADER.size + 4 * planes + nbytes


class _Shape:
    """How a payload is cut: `elements` of `width` bytes, `segment` elements at a time."""

    __slots__ = ("data_offset", "elements", "segment", "width")

    def __init__(self, width: int, elements: int, segment_bits: int) -> None:
        self.width = width
        self.elements = elements
        self.segment = 1 << segment_bits
        self.data_offset = HEADER.size + 4 * width * -(-elements >> segment_bits)


class _Coders(threading.local):
    """One compressor and decompressor per thread: a context serves one thread at a time and is worth keeping."""

    def __init__(self, level: int) -> None:
        # Nearly no table to find repeats in, and only long ones count: what is left is the entropy coder, which is
        # where the gain is. Zstandard's own level 1 is slower both ways and finds less.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1,
            strategy=zstandard.STRATEGY_FAST,
            window_log=SEGMENT_BITS,
            hash_log=6 if level == 1 else 10,
            min_match=7,
            write_content_size=True,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


def _shrink(plane: Any, compress: Any) -> int:
    """Compress `plane` in its place if that gains; the size it then has."""
    start = max(0, len(plane) - PROBE_BYTES) // 2
    probe = plane[start : start + PROBE_BYTES]
    if len(compress(probe)) > len(probe) - len(probe) // 16:  # for less than 1/16, decoding costs more than it is worth
        return len(plane)
    packed = np.frombuffer(compress(plane), np.uint8)
    if len(packed) >= len(plane):
        return len(plane)
    plane[: len(packed)] = packed
    return len(packed)


def _read_header(source: memoryview, nbytes: int) -> tuple[_Shape, list[int]]:
    """The shape and plane sizes in `source`, all checked, for a payload of `nbytes`. Raises `SerdeError`."""
    if len(source) < HEADER.size:
        raise SerdeError(f"zstd: {len(source)} bytes are too few")
    magic, width, segment_bits, length = HEADER.unpack_from(source)
    if magic != MAGIC or width not in WORDS or segment_bits > MAX_SEGMENT_BITS:
        raise SerdeError("zstd: not the header of this encoding")
    if length != nbytes:
        raise SerdeError(f"zstd: holds {length} bytes, expected {nbytes}")
    shape = _Shape(width, length // width, segment_bits)
    if shape.data_offset > len(source):
        raise SerdeError("zstd: cut off within the table of planes")
    sizes: list[int] = _bytes_of(source[HEADER.size : shape.data_offset]).view("<u4").tolist()
    if shape.data_offset + sum(sizes) + length % width != len(source):
        raise SerdeError("zstd: the planes do not add up to the length")
    return shape, sizes


def _unpack(stored: Any, elements: int, decompressor: zstandard.ZstdDecompressor) -> Any:
    """The plane of `elements` bytes that `stored` holds. Raises `SerdeError`."""
    if len(stored) == elements:
        return stored
    try:
        # The frame's own claim is compared first: the decompressor would allocate whatever it says.
        if zstandard.frame_content_size(stored) != elements:
            raise SerdeError("zstd: a plane is not of its size")
        plane = np.frombuffer(decompressor.decompress(stored, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise SerdeError(f"zstd: {error}") from error
    if len(plane) != elements:
        raise SerdeError("zstd: a plane is not of its size")
    return plane


def _join(planes: list[Any], words: Any) -> None:
    """Put the planes of `words` together, the lowest byte first."""
    if len(planes) == 1:
        words[:] = planes[0]
        return
    np.multiply(planes[-1], words.dtype.type(256), out=words, dtype=words.dtype)
    for plane in planes[-2:0:-1]:
        np.bitwise_or(words, plane, out=words)
        np.left_shift(words, 8, out=words)
    np.bitwise_or(words, planes[0], out=words)


def _bytes_of(view: memoryview) -> Any:
    """`view` as an array of bytes, without a copy."""
    return np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)
