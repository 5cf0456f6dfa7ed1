"""The fingerprint of weights: other weights, another fingerprint; the same weights elsewhere, the same."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.engine import weights_fingerprint

SIZES = {"embed": 5000, "layers.0.w": 1024, "layers.1.w": 10, "norm": 3000}


def safetensors(sizes: dict[str, int] = SIZES, metadata: Any = None, dtype: str = "U8") -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, size in sizes.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(i * 7 % 251 for i in range(at))


def model(root: Path, data: bytes | None = None, name: str = "model.safetensors") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text('{"hidden_size": 64}')
    (root / name).write_bytes(safetensors() if data is None else data)
    return root


def regions(data: bytes) -> list[tuple[int, int]]:
    """What is promised to be seen: the first and last KiB of each tensor, and its middle."""
    base = 8 + struct.unpack("<Q", data[:8])[0]
    found = []
    at = base
    for size in SIZES.values():
        last = max(at, at + size - 1024)
        found += [(begin, min(begin + 1024, at + size)) for begin in (at, (at + last) // 2, last)]
        at += size
    return found


def test_any_changed_byte_of_a_sampled_region_changes_it(tmp_path: Path) -> None:
    data = safetensors()
    whole = weights_fingerprint(str(model(tmp_path, data)))
    for begin, end in regions(data):
        for at in (begin, (begin + end) // 2, end - 1):
            changed = bytearray(data)
            changed[at] ^= 1
            assert weights_fingerprint(str(model(tmp_path, bytes(changed)))) != whole, at
    assert weights_fingerprint(str(model(tmp_path, data))) == whole


def test_names_types_and_shapes_count(tmp_path: Path) -> None:
    swapped = dict(zip(reversed(SIZES), SIZES.values(), strict=True))
    prints = [
        weights_fingerprint(str(model(tmp_path, data)))
        for data in (safetensors(), safetensors(swapped), safetensors(dtype="I8"), safetensors(metadata={"a": "b"}))
    ]
    assert len(set(prints)) == 4


def test_how_an_adapter_is_scaled_counts(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors())
    prints = [weights_fingerprint(str(tmp_path))]
    for alpha in (8, 16):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": alpha}))
        prints.append(weights_fingerprint(str(tmp_path)))
    assert len(set(prints)) == 3


def test_other_files_of_the_model_count(tmp_path: Path) -> None:
    root = model(tmp_path)
    prints = [weights_fingerprint(str(root))]
    (root / "config.json").write_text('{"hidden_size": 65}')
    prints.append(weights_fingerprint(str(root)))
    (root / "model-2.safetensors").write_bytes(safetensors())
    prints.append(weights_fingerprint(str(root)))
    (root / "model-2.safetensors").rename(root / "model-3.safetensors")
    prints.append(weights_fingerprint(str(root)))
    assert len(set(prints)) == 4
    (root / "README.md").write_text("says nothing about weights")
    assert weights_fingerprint(str(root)) == prints[-1]


def test_the_same_model_elsewhere(tmp_path: Path) -> None:
    root = model(tmp_path / "one")
    copy = tmp_path / "two" / "deep"
    shutil.copytree(root, copy)
    blob = tmp_path / "blobs"
    blob.mkdir()
    shutil.move(copy / "model.safetensors", blob / "abc")
    (copy / "model.safetensors").symlink_to(blob / "abc")  # as in a hub's cache
    assert weights_fingerprint(str(copy)) == weights_fingerprint(str(root))
    assert weights_fingerprint(str(copy), "any revision") == weights_fingerprint(str(root))
    assert weights_fingerprint(f"{copy}/") == weights_fingerprint(str(root))


def test_a_name_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prints = [
        weights_fingerprint("org/model"),
        weights_fingerprint("org/model", "main"),
        weights_fingerprint("org/model", "v2"),
        weights_fingerprint("org/model2"),
    ]
    assert len(set(prints)) == 4
    assert weights_fingerprint("org/model", "main") == prints[1]
    (tmp_path / "empty").mkdir()
    assert weights_fingerprint("empty") == weights_fingerprint("empty", None)
    assert all(len(p) == 32 and int(p, 16) >= 0 for p in prints)


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "model.pt"])
def test_files_of_other_formats(tmp_path: Path, name: str) -> None:
    data = bytearray(i % 253 for i in range(100_000))
    prints = [weights_fingerprint(str(model(tmp_path, bytes(data), name)))]
    for at in (0, 50_000, 99_999):
        data[at] ^= 1
        prints.append(weights_fingerprint(str(model(tmp_path, bytes(data), name))))
    assert len(set(prints)) == 4
    assert weights_fingerprint(str(tmp_path / name)) == prints[-1]  # a single file


def header(value: Any, tail: bytes = b"\1" * 4000) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + tail


CORRUPT = {
    "empty": b"",
    "short": b"\1\2\3",
    "length beyond the file": struct.pack("<Q", 1 << 62) + b"{}",
    "not JSON": header(b"\xff\xfe{{{"),
    "deep": header(b"[" * 100_000),
    "a list": header([1, 2]),
    "a number": header(3),
    "no tensors": header({}),
    "no offsets": header({"w": {"dtype": "U8"}}),
    "offsets of text": header({"w": {"data_offsets": ["a", "b"]}}),
    "fractions": header({"w": {"data_offsets": [0.5, 9.5]}}),
    "negative": header({"w": {"data_offsets": [-900, 5]}}),
    "huge": header({"w": {"data_offsets": [0, 1 << 80]}}),
    "backwards": header({"w": {"data_offsets": [50, 10]}}),
    "three": header({"w": {"data_offsets": [1, 2, 3]}}),
    "null": header({"w": None}),
    "booleans": header({"w": {"data_offsets": [False, True]}}),
    "not a number": header(b'{"w": {"data_offsets": [NaN, Infinity]}}'),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_an_unreadable_header_is_sampled_as_any_file(tmp_path: Path, case: str) -> None:
    data = CORRUPT[case]
    first = weights_fingerprint(str(model(tmp_path, data)))
    assert first == weights_fingerprint(str(model(tmp_path, data)))
    assert first != weights_fingerprint(str(model(tmp_path, data[:-1] + b"\7" if data else b"\7")))


@given(data=st.binary(max_size=200), length=st.integers(0, 300))
@settings(max_examples=150)
def test_no_file_makes_it_raise(tmp_path_factory: pytest.TempPathFactory, data: bytes, length: int) -> None:
    root = tmp_path_factory.getbasetemp() / "fuzz"
    for content in (data, struct.pack("<Q", length) + data, header({"w": {"data_offsets": list(data[:2])}}, data)):
        assert len(weights_fingerprint(str(model(root, content)))) == 32


def test_tensors_of_no_bytes(tmp_path: Path) -> None:
    data = safetensors({"a": 0, "b": 10, "c": 0})
    changed = bytearray(data)
    changed[-1] ^= 1
    assert weights_fingerprint(str(model(tmp_path, data))) != weights_fingerprint(str(model(tmp_path, bytes(changed))))
