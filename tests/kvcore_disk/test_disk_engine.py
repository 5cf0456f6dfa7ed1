"""Through the core: what is wrong on disk is a miss, never wrong bytes; what is right comes back after a restart."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore.api import KVCoreError, ObjectKey
from kvcore.engine import CacheEngine, Space
from kvcore.testing.chunks import CHUNKS, contents, hashes, put, spec
from kvcore_disk.paths import object_path

HEADER_BYTES = 4096


def opened(tmp_path: Path, serde: str = "") -> CacheEngine:
    config = tmp_path / "kvcore.yaml"
    config.write_text(
        "l1: {size: 8MiB}\nmin_object_size: 128KiB\n"
        f"l2: [{{storage: {{plugin: disk, path: '{tmp_path / 'disk'}', capacity: 64MiB}}{serde}}}]\n"
    )
    return CacheEngine.open(str(config))


def path_of(tmp_path: Path, space: Space, chunk_hash: bytes) -> Path:
    return Path(object_path(str(tmp_path / "disk"), ObjectKey(space.namespace, chunk_hash, 0)))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("serde", ["", ", serde: [zstd]"], ids=["raw", "zstd"])
def test_everything_comes_back_after_a_restart(tmp_path: Path, serde: str) -> None:
    engine = opened(tmp_path, serde)
    put(engine, engine.register(spec()), hashes())
    engine.close()
    engine = opened(tmp_path, serde)
    space = engine.register(spec())
    assert contents(engine, space, hashes()) == list(range(1, CHUNKS + 1))
    assert engine.stats()['kvcore_hit_chunks_total{source="disk"}'] == CHUNKS
    engine.close()


DAMAGE: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "bit of the payload": (lambda path: flip(path, HEADER_BYTES + 70_001), "corrupt", True),
    "last bit": (lambda path: flip(path, path.stat().st_size - 1), "corrupt", True),
    "bit of the header": (lambda path: flip(path, 60), "corrupt", True),
    "magic": (lambda path: flip(path, 0), "corrupt", True),
    "cut in the payload": (lambda path: os.truncate(path, 50_001), "corrupt", True),
    "cut in the header": (lambda path: os.truncate(path, 100), "corrupt", True),
    "one byte too long": (lambda path: os.truncate(path, path.stat().st_size + 1), "corrupt", True),
    "far too long": (lambda path: os.truncate(path, 3 * path.stat().st_size), "corrupt", True),
    "zero length": (lambda path: os.truncate(path, 0), "", False),
    "foreign bytes": (lambda path: path.write_bytes(b"#!/bin/sh\n" * 5000), "corrupt", True),
    "other version": (lambda path: flip(path, 8), "version", False),
    "deleted": (lambda path: path.unlink(), "", False),
}


@pytest.mark.parametrize(("damage", "reason", "goes"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_a_miss(tmp_path: Path, damage: Callable[[Path], object], reason: str, goes: bool) -> None:
    engine = opened(tmp_path)
    space = engine.register(spec())
    put(engine, space, hashes())
    path = path_of(tmp_path, space, hashes()[3])
    good = path.read_bytes()
    engine.close()
    damage(path)
    engine = opened(tmp_path)
    space = engine.register(spec())
    assert contents(engine, space, hashes()) == [1, 2, 3]
    if reason:
        assert engine.stats()[f'kvcore_miss_chunks_total{{reason="{reason}"}}'] >= 1
        assert path.exists() is not goes
    put(engine, space, hashes())  # computed again, and kept
    assert path.read_bytes() == good
    engine.clear(space)
    assert contents(engine, space, hashes()) == list(range(1, CHUNKS + 1))
    engine.close()


def test_a_file_of_another_model_or_chunk_under_this_name_is_a_miss(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    space, other = engine.register(spec()), engine.register(spec("other weights"))
    assert space.namespace != other.namespace
    put(engine, space, hashes())
    put(engine, other, hashes())
    engine.close()
    shutil.copy(path_of(tmp_path, other, hashes()[2]), path_of(tmp_path, space, hashes()[2]))
    shutil.copy(path_of(tmp_path, space, hashes()[5]), path_of(tmp_path, space, hashes()[6]))
    engine = opened(tmp_path)
    space, other = engine.register(spec()), engine.register(spec("other weights"))
    assert contents(engine, space, hashes()) == [1, 2]
    assert contents(engine, other, hashes()) == list(range(1, CHUNKS + 1))
    assert not path_of(tmp_path, space, hashes()[2]).exists()
    put(engine, space, hashes()[:3])
    engine.clear(space)
    assert contents(engine, space, hashes()) == [1, 2, 3, 4, 5, 6]
    engine.close()


def test_a_directory_that_cannot_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("in the way")
    with pytest.raises(KVCoreError, match=r"cannot be used.*`path`"):
        opened(tmp_path)
