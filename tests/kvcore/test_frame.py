"""The frame format: pinned by golden vectors, read again from the description, and fuzzed."""

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcore.api import FrameError, ObjectKey
from kvcore.l2 import frame
from kvcore.l2.frame import HEADER_BYTES, MAX_PAYLOAD_BYTES, MAX_STAGES, Stage

GOLDEN = json.loads((Path(__file__).parent / "golden" / "frame.json").read_text())
REASONS = {"short", "magic", "version", "header", "length", "key"}

tags = st.text("abcdefghijklmnopqrstuvwxyz0123456789._/-", min_size=1, max_size=32)
stages = st.lists(st.builds(Stage, tags, st.integers(0, MAX_PAYLOAD_BYTES)), max_size=MAX_STAGES)
keys = st.builds(
    ObjectKey,
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=64),
    st.integers(0, 2**32 - 1),
)
KEY = ObjectKey(bytes(range(16)), bytes(range(32)), 5)
STAGES = (Stage("shuffle/1", 3000), Stage("zstd/1", 3000))


def packed(
    key: ObjectKey = KEY, payload_bytes: int = 1000, chain: Any = STAGES, checksum: bytes = b"c" * 16
) -> bytearray:
    into = bytearray(HEADER_BYTES)
    frame.pack(key, payload_bytes, chain, checksum, memoryview(into))
    return into


def unpack(header: "bytes | bytearray", stored: int = HEADER_BYTES + 1000, key: ObjectKey = KEY) -> frame.Frame:
    return frame.unpack(key, memoryview(header), stored)


def unpacked_or_reason(header: bytearray, stored: int = HEADER_BYTES + 1000) -> frame.Frame | str:
    """The frame, or why not. Any other exception is a failure."""
    try:
        return unpack(header, stored)
    except FrameError as error:
        return error.reason


def resealed(header: bytearray) -> bytearray:
    """The header with its own checksum made right again, as a writer with a bug or bad intent would."""
    for at in range(64 + 16, HEADER_BYTES - 8):
        check = xxhash.xxh3_64_intdigest(bytes(header[:at]))
        header[-8:] = check.to_bytes(8, "little")
        try:
            unpack(header)
        except FrameError as error:
            if "own checksum" not in str(error):
                return header
        else:
            return header
    return header


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden(case: dict[str, Any]) -> None:
    key = ObjectKey(bytes.fromhex(case["namespace"]), bytes.fromhex(case["chunk_hash"]), case["group"])
    payload = memoryview(bytes.fromhex(case["payload"]))
    chain = tuple(Stage(tag, nbytes) for tag, nbytes in case["stages"])
    written = packed(key, len(payload), chain, frame.checksum(payload))
    pinned = bytes.fromhex(case["header"]).ljust(HEADER_BYTES - 8, b"\0") + bytes.fromhex(case["header_check"])
    assert bytes(written) == pinned
    assert unpack(pinned, HEADER_BYTES + len(payload), key) == (len(payload), chain, frame.checksum(payload))


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_as_described(case: dict[str, Any]) -> None:
    """The header, read field by field at the offsets that docs/format.md gives."""
    raw = bytes.fromhex(case["header"])
    payload = bytes.fromhex(case["payload"])

    def number(at: int, nbytes: int) -> int:
        return int.from_bytes(raw[at : at + nbytes], "little")

    assert raw[0:8] == b"KVCFRAME"
    assert number(8, 2) == 1
    assert number(10, 2) == 4096
    assert raw[12:16] == b"\0" * 4
    assert number(16, 8) == len(payload)
    assert number(24, 4) == case["group"]
    hash_bytes = number(28, 2)
    assert number(30, 2) == len(case["stages"])
    assert raw[32:48].hex() == case["namespace"]
    assert raw[48:64] == xxhash.xxh3_128_digest(payload)
    assert raw[64 : 64 + hash_bytes].hex() == case["chunk_hash"]
    at = 64 + hash_bytes
    for tag, input_bytes in case["stages"]:
        assert number(at, 8) == input_bytes
        assert raw[at + 9 : at + 9 + raw[at + 8]].decode() == tag
        at += 9 + raw[at + 8]
    assert at == len(raw)
    assert bytes.fromhex(case["header_check"]) == xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")


def test_checksum_of_parts_is_that_of_the_whole() -> None:
    data = memoryview(bytes(range(256)) * 40)
    assert frame.checksum([data[:1], data[1:5000], data[5000:]]) == frame.checksum(data)


@given(
    key=keys,
    payload_bytes=st.integers(0, MAX_PAYLOAD_BYTES),
    chain=stages,
    checksum=st.binary(min_size=16, max_size=16),
)
def test_round_trip(key: ObjectKey, payload_bytes: int, chain: list[Stage], checksum: bytes) -> None:
    header = packed(key, payload_bytes, chain, checksum)
    assert unpack(header, HEADER_BYTES + payload_bytes, key) == (payload_bytes, tuple(chain), checksum)


@given(flips=st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255)), min_size=1, max_size=8))
@example(flips=[(8, 1)])
@example(flips=[(28, 0xFF), (29, 0xFF)])
@example(flips=[(30, 0xFF)])
@settings(max_examples=400)
def test_flipped_bits(flips: list[tuple[int, int]]) -> None:
    header = packed()
    for at, mask in flips:
        header[at] ^= mask
    found = unpacked_or_reason(header)
    assert found in REASONS or found == (1000, STAGES, b"c" * 16)  # the latter when only padding was hit


@given(
    at=st.integers(0, 140),
    new=st.binary(min_size=1, max_size=12),
    stored=st.integers(-1, 2**63) | st.just(HEADER_BYTES + 1000),
)
@settings(max_examples=400)
def test_a_lying_header_claims_no_more_than_the_bounds(at: int, new: bytes, stored: int) -> None:
    """Fields of any value under a right checksum of the header: bounded, or refused."""
    header = packed()
    header[at : at + len(new)] = new
    header = resealed(header)
    found = unpacked_or_reason(header, stored)
    if isinstance(found, str):
        assert found in REASONS
    else:
        assert 0 <= found.payload_bytes == stored - HEADER_BYTES <= MAX_PAYLOAD_BYTES
        assert len(found.stages) <= MAX_STAGES
        assert all(1 <= len(s.tag) <= 32 and s.input_bytes <= MAX_PAYLOAD_BYTES for s in found.stages)


@given(data=st.binary(max_size=300), size=st.integers(0, 2 * HEADER_BYTES), stored=st.integers(-10, 3 * HEADER_BYTES))
def test_random_bytes(data: bytes, size: int, stored: int) -> None:
    for start in (data, b"KVCFRAME" + data, b"KVCFRAME\1\0\0\x10" + data, bytes(packed()[:70]) + data):
        with pytest.raises(FrameError):
            unpack(start.ljust(size, b"\xa5")[: max(size, len(start) - 1)], stored)


@given(stored=st.integers(0, 1 << 41))
@example(stored=HEADER_BYTES + 999)
@example(stored=HEADER_BYTES + 1001)
@example(stored=HEADER_BYTES)
@example(stored=0)
def test_truncated_and_extended(stored: int) -> None:
    header = packed()
    if stored == HEADER_BYTES + 1000:
        return
    with pytest.raises(FrameError) as caught:
        unpack(header, stored)
    assert caught.value.reason == ("short" if stored < HEADER_BYTES else "length")


@pytest.mark.parametrize(
    "key",
    [
        KEY._replace(namespace=b"x" * 16),
        KEY._replace(chunk_hash=b"x" * 32),
        KEY._replace(chunk_hash=KEY.chunk_hash[:-1]),
        KEY._replace(chunk_hash=KEY.chunk_hash + b"\0"),
        KEY._replace(group=6),
    ],
)
def test_the_frame_of_another_object(key: ObjectKey) -> None:
    with pytest.raises(FrameError) as caught:
        unpack(packed(), key=key)
    assert caught.value.reason == "key"


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_version(version: int) -> None:
    header = packed()
    header[8:10] = version.to_bytes(2, "little")
    with pytest.raises(FrameError, match=f"format version {version}, this release reads 1") as caught:
        unpack(header)
    assert caught.value.reason == "version"


@pytest.mark.parametrize("tag", ["", "x" * 33, "Zstd", "zstd 1", "zstd\n", "zstd\0", "zström", "a\u2028b", "@x"])
def test_tags_outside_the_alphabet(tag: str) -> None:
    with pytest.raises(FrameError) as caught:
        packed(chain=[Stage(tag, 1)])
    assert caught.value.reason == "serde"
    header = packed(chain=[Stage("a" * max(1, min(32, len(tag.encode()))), 1)])
    header[105 : 105 + len(tag.encode())] = tag.encode()
    header[104] = len(tag.encode())
    with pytest.raises(FrameError) as caught:
        unpack(resealed(header))
    assert caught.value.reason == "header"


def test_chains_and_keys_that_do_not_fit() -> None:
    with pytest.raises(FrameError, match="at most 8 serdes, not 9"):
        packed(chain=[Stage("a", 1)] * 9)
    for key in (
        KEY._replace(namespace=b"short"),
        KEY._replace(chunk_hash=b"short"),
        KEY._replace(chunk_hash=b"x" * 65),
        KEY._replace(chunk_hash=b"x" * 5000),
    ):
        with pytest.raises(FrameError, match="a namespace has 16 bytes, a hash 16 to 64"):
            packed(key)
