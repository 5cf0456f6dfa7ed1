"""The encoding `zstd/1`: what was written once decodes for ever, and nothing else passes."""

import contextlib
import random
import struct
import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from zstd_golden import ENCODED, layout_of, payload_of

from kvcore.api import Context, SerdeError
from kvcore_zstd.config import ZstdConfig
from kvcore_zstd.serde import MAX_SEGMENT_BITS, ZstdSerde

MIB = 1024 * 1024
SERDE = ZstdSerde(ZstdConfig(), Context())


def decode(source: bytes, nbytes: int, element_bytes: int = 2) -> bytes:
    into = bytearray(nbytes)
    SERDE.decode(memoryview(source), memoryview(into), layout_of(nbytes, element_bytes))
    return bytes(into)


def write(data: bytes, width: int, segment_bits: int, level: int | None) -> bytes:
    """Encode by the written format alone, with other choices than the serde makes. `level` None: every plane raw."""
    elements, table, planes = len(data) // width, [], []
    for first in range(0, elements, 1 << segment_bits):
        last = min(elements, first + (1 << segment_bits))
        for index in range(width):
            plane = data[first * width : last * width][index::width]
            packed = plane if level is None else zstandard.ZstdCompressor(level=level).compress(plane)
            planes.append(packed if len(packed) < len(plane) else plane)
            table.append(len(planes[-1]))
    header = struct.pack("<2sBBQ", b"KZ", width, segment_bits, len(data))
    return header + struct.pack(f"<{len(table)}I", *table) + b"".join(planes) + data[elements * width :]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_golden_bytes_decode(width):
    data = payload_of(width)
    assert decode(ENCODED[width], len(data), width) == data
    assert len(ENCODED[width]) < len(data)
    assert ENCODED[width][:4] == b"KZ" + bytes([width, 18])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("level", [None, -5, 3, 19])
@pytest.mark.parametrize("segment_bits", [0, 5, 8, 20, MAX_SEGMENT_BITS])
def test_any_writer_of_the_format_is_read(width, level, segment_bits):
    data = payload_of(width)
    assert decode(write(data, width, segment_bits, level), len(data), width) == data


def test_width_is_the_written_one_not_the_layouts():
    data = payload_of(4)
    assert decode(ENCODED[4], len(data), element_bytes=1) == data


@pytest.mark.parametrize(
    "source",
    [
        b"",
        b"KZ",
        b"KY" + write(bytes(64), 2, 8, 3)[2:],
        struct.pack("<2sBBQ", b"KZ", 3, 18, 64) + bytes(80),
        struct.pack("<2sBBQ", b"KZ", 0, 18, 64) + bytes(80),
        struct.pack("<2sBBQ", b"KZ", 2, MAX_SEGMENT_BITS + 1, 64) + bytes(80),
        struct.pack("<2sBBQ", b"KZ", 2, 255, 64) + bytes(80),
        struct.pack("<2sBBQ", b"KZ", 1, 0, 64),
        struct.pack("<2sBBQII", b"KZ", 2, 18, 64, 0, 32) + bytes(32),
        struct.pack("<2sBBQII", b"KZ", 2, 18, 64, 2**32 - 1, 1),
        write(bytes(63), 2, 8, 3),
        write(bytes(65), 2, 8, 3),
        write(bytes(64), 2, 8, None) + b"\0",
        write(bytes(64), 2, 8, None)[:-1],
    ],
)
def test_not_this_encoding(source):
    with pytest.raises(SerdeError, match="zstd"):
        decode(source, 64)


def plane_frame(packed: bytes, elements: int) -> bytes:
    """One plane of bytes that claims to be `packed`."""
    return struct.pack("<2sBBQI", b"KZ", 1, 20, elements, len(packed)) + packed


@pytest.mark.parametrize(
    "packed",
    [
        zstandard.ZstdCompressor().compress(bytes(4097)),
        zstandard.ZstdCompressor().compress(bytes(4095)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4096)),
        zstandard.ZstdCompressor().compress(bytes(4096)) + b"\0",
        zstandard.ZstdCompressor().compress(bytes(2048)) * 2,
        struct.pack("<II", 0x184D2A50, 4) + bytes(4),  # a skippable frame
        struct.pack("<IBQ", 0xFD2FB528, 0xE0, 2**40) + bytes(64),  # claims a tebibyte
        zstandard.ZstdCompressor().compress(random.Random(0).randbytes(64) * 64)[:-3],
    ],
)
def test_a_plane_that_is_not_one_frame_of_its_size(packed):
    tracemalloc.start()
    try:
        with pytest.raises(SerdeError, match="zstd"):
            decode(plane_frame(packed, 4096), 4096)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


VALID = [write(payload_of(width), width, bits, 3) for width in (1, 2, 4) for bits in (6, 18)] + list(ENCODED.values())


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(VALID), st.data())
def test_damaged_bytes_raise_or_fill(source, data):
    damaged = bytearray(source)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(damaged), 64) if data.draw(st.booleans()) else len(damaged)))
        drop = data.draw(st.integers(0, 8))
        damaged[at : at + drop] = data.draw(st.binary(max_size=8))
    length = struct.unpack_from("<Q", source, 4)[0]
    with contextlib.suppress(SerdeError):
        assert len(decode(bytes(damaged), length)) == length


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=256), st.integers(0, 300))
def test_garbage_raises_or_fills(body, nbytes):
    for source in (body, struct.pack("<2sBBQ", b"KZ", 2, 4, nbytes) + body):
        with contextlib.suppress(SerdeError):
            assert len(decode(source, nbytes)) == nbytes
