"""The frame around every stored object: a header page and the payload. Written down in `docs/format.md`.

Little-endian throughout. The header takes a whole page, so that the payload of a frame stays page-aligned on disk and
in memory. Nothing in it is executable, and every field is bounded before it is used.
"""

import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvcore.api import FrameError, ObjectKey
from kvcore.api.keys import MAX_HASH_BYTES, MIN_HASH_BYTES, NAMESPACE_BYTES
from kvcore.api.serde import MAX_STAGES

HEADER_BYTES = 4096
VERSION = 1
MAX_TAG_BYTES = 32
MAX_PAYLOAD_BYTES = 1 << 40
_MAGIC = b"KVCFRAME"
# magic, version, header bytes, payload bytes, group, hash length, stages, namespace, payload checksum
_FIXED = struct.Struct("<8sHHxxxxQIHH16s16s")
_STAGE = struct.Struct("<QB")  # input bytes, length of the tag; the tag follows
_CHECK = struct.Struct("<Q")
_TAG = re.compile(rb"[a-z0-9._/-]{1,%d}" % MAX_TAG_BYTES)


class Stage(NamedTuple):
    """One serde of the chain: its tag, and the length in bytes of what it was given to encode."""

    tag: str
    input_bytes: int


class Frame(NamedTuple):
    """What a valid header says."""

    payload_bytes: int
    stages: tuple[Stage, ...]
    checksum: bytes


def checksum(payload: "Sequence[memoryview] | memoryview") -> bytes:
    """XXH3-128 of the payload, 16 bytes."""
    digest = xxhash.xxh3_128()
    for part in (payload,) if isinstance(payload, memoryview) else payload:
        digest.update(part)
    return digest.digest()


def pack(
    key: ObjectKey, payload_bytes: int, stages: Sequence[Stage], payload_checksum: bytes, into: memoryview
) -> None:
    """Write the header of a frame into `into`, which is `HEADER_BYTES` long."""
    if len(key.namespace) != NAMESPACE_BYTES or not MIN_HASH_BYTES <= len(key.chunk_hash) <= MAX_HASH_BYTES:
        raise FrameError("key", f"a namespace has {NAMESPACE_BYTES} bytes, a hash {MIN_HASH_BYTES} to {MAX_HASH_BYTES}")
    if len(stages) > MAX_STAGES:
        raise FrameError("serde", f"a chain has at most {MAX_STAGES} serdes, not {len(stages)}")
    fields = [
        _FIXED.pack(
            _MAGIC, VERSION, HEADER_BYTES, payload_bytes, key.group, len(key.chunk_hash), len(stages),
            key.namespace, payload_checksum,
        ),
        key.chunk_hash,
    ]  # fmt: skip
    header = b"".join([*fields, *map(_packed, stages)])
    into[:] = header.ljust(HEADER_BYTES - _CHECK.size, b"\0") + _CHECK.pack(xxhash.xxh3_64_intdigest(header))


def binding(key: ObjectKey, stages: Sequence[Stage]) -> bytes:
    """What a sealing serde, the last of `stages`, binds its encoding to."""
    lengths = struct.pack("<IHH", key.group, len(key.chunk_hash), len(stages))
    return b"".join([b"kvcore/1", lengths, key.namespace, key.chunk_hash, *map(_packed, stages)])


def _packed(stage: Stage) -> bytes:
    tag = stage.tag.encode()
    if not _TAG.fullmatch(tag):
        raise FrameError(
            "serde", f"a serde's tag is 1 to {MAX_TAG_BYTES} characters of [a-z0-9._/-], not {stage.tag!r}"
        )
    return _STAGE.pack(stage.input_bytes, len(tag)) + tag


def unpack(key: ObjectKey, header: memoryview, stored_bytes: int) -> Frame:
    """Read the header of a stored object of `stored_bytes` that should be `key`'s. Raises `FrameError`."""
    if stored_bytes < HEADER_BYTES or len(header) < HEADER_BYTES:
        raise FrameError("short", f"{stored_bytes} bytes, less than a header")
    magic, version, header_bytes, payload_bytes, group, hash_bytes, stage_count, namespace, payload_checksum = (
        _FIXED.unpack_from(header)
    )
    if magic != _MAGIC:
        raise FrameError("magic", f"begins with {magic!r}, not {_MAGIC!r}")
    if version != VERSION:
        raise FrameError("version", f"format version {version}, this release reads {VERSION}")
    at = _FIXED.size + hash_bytes
    stages = []
    if (
        header_bytes != HEADER_BYTES
        or stage_count > MAX_STAGES
        or hash_bytes > MAX_HASH_BYTES
        or payload_bytes > MAX_PAYLOAD_BYTES
    ):
        raise FrameError("header", "a field of the header is out of bounds")
    for _ in range(stage_count):
        input_bytes, tag_bytes = _STAGE.unpack_from(header, at)
        at += _STAGE.size
        tag = bytes(header[at : at + tag_bytes])
        at += tag_bytes
        if input_bytes > MAX_PAYLOAD_BYTES or not _TAG.fullmatch(tag):
            raise FrameError("header", "a serde stage of the header is out of bounds")
        stages.append(Stage(tag.decode("ascii"), input_bytes))
    if _CHECK.unpack_from(header, HEADER_BYTES - _CHECK.size)[0] != xxhash.xxh3_64_intdigest(header[:at]):
        raise FrameError("header", "the header's own checksum does not match")
    if (namespace, bytes(header[_FIXED.size : _FIXED.size + hash_bytes]), group) != key:
        raise FrameError("key", "the frame belongs to another object")
    if stored_bytes != HEADER_BYTES + payload_bytes:
        raise FrameError("length", f"{stored_bytes} bytes stored, {HEADER_BYTES + payload_bytes} expected")
    return Frame(payload_bytes, tuple(stages), payload_checksum)
