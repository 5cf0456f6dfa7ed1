"""Through the core: what is wrong is a miss, never wrong bytes; what is right comes back after a restart."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore.api import KVCoreError, ObjectKey
from kvcore.cli import main
from kvcore.engine import CacheEngine, Space
from kvcore.testing.chunks import CHUNKS, contents, hashes, put, spec
from kvcore.testing.servers.s3 import JuiceFS
from kvcore_nixl.files import Files
from kvcore_nixl.paths import object_path
from kvcore_nixl.storage import NixlStorage

HEADER_BYTES = 4096


def opened(tmp_path: Path, serde: str = "", endpoint: str = "", tier: str = "") -> CacheEngine:
    where = f"path: '{tmp_path / 'nixl'}'"
    if endpoint:
        where = f"backend: obj, bucket: kvcore-test, prefix: engine-{tmp_path.name}/, endpoint: '{endpoint}'"
    config = tmp_path / "kvcore.yaml"
    config.write_text(
        f"l1: {{size: 8MiB}}\nmin_object_size: 128KiB\nl2: [{{storage: {{plugin: nixl, {where}}}{serde}{tier}}}]\n"
    )
    return CacheEngine.open(str(config))


def path_of(tmp_path: Path, space: Space, chunk_hash: bytes) -> Path:
    return Path(object_path(str(tmp_path / "nixl"), ObjectKey(space.namespace, chunk_hash, 0)))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("serde", ["", ", serde: [zstd]"], ids=["raw", "zstd"])
@pytest.mark.parametrize("kind", ["files", "bucket"])
def test_everything_comes_back_after_a_restart(tmp_path: Path, gateway: JuiceFS, kind: str, serde: str) -> None:
    endpoint = gateway.endpoint if kind == "bucket" else ""
    engine = opened(tmp_path, serde, endpoint)
    put(engine, engine.register(spec()), hashes())
    engine.close()
    engine = opened(tmp_path, serde, endpoint)
    space = engine.register(spec())
    assert contents(engine, space, hashes()) == list(range(1, CHUNKS + 1))
    assert engine.stats()['kvcore_hit_chunks_total{source="nixl"}'] == CHUNKS
    engine.close()


def test_files_are_moved_from_and_to_the_arena(tmp_path: Path) -> None:
    """Nothing is copied: the memory that copies go through stays as small as the first page needed it."""
    engine = opened(tmp_path)
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.clear(space)
    assert contents(engine, space, hashes()) == list(range(1, CHUNKS + 1))
    storage = engine.manager.tiers[0].storage
    assert isinstance(storage, NixlStorage)
    assert isinstance(storage._place, Files)
    lanes = storage._place._lanes._free
    assert lanes
    assert all(len(lane._memory) <= 1 << 20 for lane in lanes)
    assert all(lane._arena[1] >= 8 << 20 for lane in lanes)
    engine.close()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit of the payload": (lambda path: flip(path, HEADER_BYTES + 70_001), "corrupt"),
    "bit of the header": (lambda path: flip(path, 60), "corrupt"),
    "cut in the payload": (lambda path: os.truncate(path, 50_001), "corrupt"),
    "cut in the header": (lambda path: os.truncate(path, 100), "corrupt"),
    "one byte too long": (lambda path: os.truncate(path, path.stat().st_size + 1), "corrupt"),
    "zero length": (lambda path: os.truncate(path, 0), ""),
    "foreign bytes": (lambda path: path.write_bytes(b"#!/bin/sh\n" * 5000), "corrupt"),
    "deleted": (lambda path: path.unlink(), ""),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_a_miss(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
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
        assert not path.exists()
    put(engine, space, hashes())  # computed again, and kept
    assert path.read_bytes() == good
    engine.clear(space)
    assert contents(engine, space, hashes()) == list(range(1, CHUNKS + 1))
    engine.close()


def test_a_gateway_that_dies_freezes_and_comes_back(tmp_path: Path, own: JuiceFS) -> None:
    """No lookup waits for it; what it holds is served when it is back; closing does not wait for what hangs."""
    engine = opened(tmp_path, endpoint=own.endpoint, tier=", timeout: 1s")
    space = engine.register(spec())
    put(engine, space, hashes())
    for harm, heal in ((own.kill, own.start), (own.freeze, own.thaw)):
        engine.clear(space)
        harm()
        begun = time.monotonic()
        assert contents(engine, space, hashes()) == []
        assert time.monotonic() - begun < 10  # 2 s at most
        heal()
        give_up = time.monotonic() + 60
        while contents(engine, space, hashes()) != list(range(1, CHUNKS + 1)):
            assert time.monotonic() < give_up, engine.stats()
            time.sleep(0.2)
    own.freeze()
    engine.clear(space)
    contents(engine, space, hashes())
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < 60
    own.thaw()


@pytest.mark.parametrize("kind", ["files", "bucket"])
def test_a_capacity_of_the_tier_holds(tmp_path: Path, gateway: JuiceFS, kind: str) -> None:
    """NIXL has none: the core deletes what is used least, through this storage."""
    engine = opened(tmp_path, "", gateway.endpoint if kind == "bucket" else "", ", capacity: 700KiB")
    space = engine.register(spec())
    for i in range(0, 2 * CHUNKS, 2):
        put(engine, space, hashes(2 * CHUNKS)[i : i + 2], i)
    engine.close()
    storage = opened(tmp_path, "", gateway.endpoint if kind == "bucket" else "")
    held = list(storage.manager.tiers[0].storage.list())
    storage.close()
    assert 0 < sum(entry.nbytes for entry in held) <= 700 << 10
    assert ObjectKey(space.namespace, hashes(2 * CHUNKS)[-1], 0) in {entry.key for entry in held}


def test_what_does_not_open_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "nixl").write_text("in the way")
    with pytest.raises(KVCoreError, match=r"'nixl' did not open: the directory .* cannot be used.*`path`"):
        opened(tmp_path)


def test_doctor_and_store_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = opened(tmp_path)
    put(engine, engine.register(spec()), hashes())
    engine.close()
    config = str(tmp_path / "kvcore.yaml")
    assert main(["store", "verify", "--config", config]) == 0
    assert main(["doctor", config, "--json"]) in (0, 1)
    out = capsys.readouterr().out
    assert "tier nixl" in out
    assert "answers; stores" in out
    assert main(["store", "rm", "--config", config, "--all", "--yes"]) == 0
    assert list((tmp_path / "nixl").glob("??/*")) == []
