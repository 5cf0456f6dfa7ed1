"""A fingerprint of a model's weights, so that KV of one checkpoint is never used for another of the same name.

Hashing every byte of a large model would take minutes. Every tensor is sampled instead: training changes all of a
tensor, so a few samples of each tell two checkpoints apart.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SAMPLE_BYTES = 1024
_SAMPLES_PER_TENSOR = 3
_SAMPLES_PER_FILE = 1024
_MAX_HEADER_BYTES = 256 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_MAX_FOLDERS = 1024
_folders: dict[str, str] = {}
"""Fingerprint -> the folder that had it, of all that this process has read."""


def weights_fingerprint(path_or_name: str, revision: str | None = None) -> str:
    """A hex fingerprint of the weights in a local directory or file; for a name on a hub, of name and revision.

    A hub name without a revision is fingerprinted by its name alone, because nothing better is known without the files:
    pass the directory that the engine resolved it to wherever there is one.
    """
    digest = hashlib.sha256(b"kvcore.weights/1\0")
    root = Path(path_or_name)
    files = sorted(p for p in ([root] if root.is_file() else root.glob("*")) if p.suffix in _WEIGHTS and p.is_file())
    if not files:
        digest.update(f"name\0{path_or_name}\0{revision or ''}".encode(errors="surrogateescape"))
        return digest.hexdigest()[:32]
    folder = root if root.is_dir() else root.parent
    for mark, name in ((b"", "config.json"), (b"\0adapter\0", "adapter_config.json")):  # a LoRA's says how it is scaled
        if (config := folder / name).is_file():
            digest.update(mark + config.read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"\0file\0{file.name}\0{size}\0".encode(errors="surrogateescape"))
        with file.open("rb") as stream:
            for offset in _offsets(stream, size, file.suffix):
                digest.update(os.pread(stream.fileno(), _SAMPLE_BYTES, offset))
    found = digest.hexdigest()[:32]
    if len(_folders) < _MAX_FOLDERS:
        _folders[found] = os.path.abspath(folder)
    return found


def weights_folder(fingerprint: str) -> str:
    """Where this process has last seen weights of this fingerprint; empty where it has not."""
    return _folders.get(fingerprint, "")


def _offsets(stream: BinaryIO, size: int, suffix: str) -> Iterator[int]:
    if suffix == ".safetensors":
        spans = _tensors(stream, size)
        if spans:
            yield from range(0, spans[0][0], _SAMPLE_BYTES)  # names, types and shapes
            for begin, end in spans:
                yield from _spread(begin, end, _SAMPLES_PER_TENSOR)
            return
    yield from _spread(0, size, _SAMPLES_PER_FILE)


def _spread(begin: int, end: int, samples: int) -> Iterator[int]:
    last = max(begin, end - _SAMPLE_BYTES)
    for i in range(samples):
        yield begin + (last - begin) * i // max(1, samples - 1)


def _tensors(stream: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Byte ranges of the tensors of a safetensors file (format: 8-byte length, JSON header, data); [] if unreadable."""
    try:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(size, _MAX_HEADER_BYTES):
            return []
        header = json.loads(stream.read(length))
        base = 8 + length
        spans = sorted(tuple(t["data_offsets"]) for name, t in header.items() if name != "__metadata__")
        sound = all(type(b) is type(e) is int and 0 <= b <= e <= size - base for b, e in spans)
        return [(base + b, base + e) for b, e in spans] if sound else []
    except (ValueError, KeyError, TypeError, struct.error, AttributeError, RecursionError):
        return []
