"""Through the core: a tier that encrypts, and what somebody with access to its folder does."""

import json
from pathlib import Path

import pytest

from kvcore.api import ObjectKey, PluginError
from kvcore.cli.app import run as main
from kvcore.engine import CacheEngine, Space
from kvcore.testing.chunks import CHUNKS, contents, hashes, put, spec
from kvcore_disk.paths import object_path

SEALED = ", serde: [{plugin: aesgcm, keys: {k1: 'env:KV_AT_REST_1'}}]"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_AT_REST_1", "5e" * 32)


def config_of(tmp_path: Path, serde: str) -> str:
    config = tmp_path / "kvcore.yaml"
    config.write_text(
        "l1: {size: 8MiB}\nmin_object_size: 128KiB\n"
        f"l2: [{{storage: {{plugin: disk, path: '{tmp_path / 'disk'}', capacity: 64MiB}}{serde}}}]\n"
    )
    return str(config)


def filled(tmp_path: Path, serde: str = SEALED) -> Space:
    engine = CacheEngine.open(config_of(tmp_path, serde))
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.close()
    return space


def found(tmp_path: Path, serde: str = SEALED) -> tuple[list[int], dict[str, float]]:
    """What a new process is given, and its counts of loads by outcome."""
    engine = CacheEngine.open(config_of(tmp_path, serde))
    values = contents(engine, engine.register(spec()), hashes())
    prefix = 'kvcore_tier_operations_total{tier="disk",op="load",outcome="'
    counts = {k.removeprefix(prefix)[:-2]: v for k, v in engine.stats().items() if k.startswith(prefix)}
    engine.close()
    return values, counts


def file_of(tmp_path: Path, space: Space, chunk_hash: bytes) -> Path:
    return Path(object_path(str(tmp_path / "disk"), ObjectKey(space.namespace, chunk_hash, 0)))


def test_it_comes_back_after_a_restart_and_nothing_plain_is_on_disk(tmp_path: Path) -> None:
    space = filled(tmp_path)
    for value, chunk_hash in enumerate(hashes(), 1):  # `put` fills each object with its number
        assert bytes([value]) * 256 not in file_of(tmp_path, space, chunk_hash).read_bytes()
    assert found(tmp_path) == (list(range(1, CHUNKS + 1)), {"ok": CHUNKS})


def test_what_was_changed_is_a_miss_and_goes(tmp_path: Path) -> None:
    space = filled(tmp_path)
    path = file_of(tmp_path, space, hashes()[0])
    data = bytearray(path.read_bytes())
    data[4096 + 5000] ^= 1
    path.write_bytes(data)
    values, counts = found(tmp_path)
    assert 1 not in values
    assert counts["corrupt"] == 1
    assert not path.exists()


def test_where_it_was_left_out_of_the_configuration_objects_stay(tmp_path: Path) -> None:
    """What is sealed is longer than a plain tier makes room for. Damaged ones of that length go all the same."""
    space = filled(tmp_path)
    damaged = file_of(tmp_path, space, hashes()[-1])
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    values, counts = found(tmp_path, serde="")
    assert values == []
    assert counts == {"unknown_serde": CHUNKS - 1, "corrupt": 1}
    assert not damaged.exists()
    assert found(tmp_path) == (list(range(1, CHUNKS)), {"ok": CHUNKS - 1})


def test_plain_objects_of_before_are_misses_and_go(tmp_path: Path) -> None:
    space = filled(tmp_path, serde="")
    values, counts = found(tmp_path)
    assert values == []
    assert counts["corrupt"] >= 1
    assert not file_of(tmp_path, space, hashes()[0]).exists()


def test_without_the_key_objects_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = filled(tmp_path)
    monkeypatch.setenv("KV_AT_REST_2", "2b" * 32)
    values, counts = found(tmp_path, SEALED.replace("k1: 'env:KV_AT_REST_1'", "k2: 'env:KV_AT_REST_2'"))
    assert values == []
    assert set(counts) == {"unknown_serde"}
    assert file_of(tmp_path, space, hashes()[0]).exists()
    assert found(tmp_path)[0] == list(range(1, CHUNKS + 1))


def test_a_missing_key_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_AT_REST_1")
    with pytest.raises(PluginError, match="key 'k1': the environment variable KV_AT_REST_1 is not set"):
        CacheEngine.open(config_of(tmp_path, SEALED))


def test_plain_frames_are_not_copied_into_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path, serde="")
    config = tmp_path / "two.yaml"
    config.write_text(
        "l2:\n"
        f"  - {{name: plain, storage: {{plugin: disk, path: '{tmp_path / 'disk'}'}}}}\n"
        f"  - {{name: sealed, storage: {{plugin: disk, path: '{tmp_path / 'sealed'}'}}{SEALED}}}\n"
        f"  - {{name: other, storage: {{plugin: disk, path: '{tmp_path / 'other'}'}}{SEALED}}}\n"
    )
    assert main(["store", "cp", "--json", "--config", str(config), "plain", "sealed"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["objects"]["failed"] == CHUNKS
    assert "copied" not in told["objects"] or told["objects"]["copied"] == 0
    assert "not encoded by aesgcm/1" in json.dumps(told["named"])


def test_only_what_its_keys_read_is_copied_into_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    monkeypatch.setenv("KV_AT_REST_2", "2b" * 32)
    config = tmp_path / "two.yaml"
    tier = "  - {name: %s, storage: {plugin: disk, path: '" + str(tmp_path) + "/%s'}%s}\n"
    config.write_text(
        "l2:\n"
        + tier % ("here", "disk", SEALED)
        + tier % ("same", "same", SEALED)
        + tier % ("key", "key", SEALED.replace("AT_REST_1", "AT_REST_2"))
        + tier % ("id", "id", SEALED.replace("k1", "k2"))
        + tier % ("plain", "plain", "")
    )
    for to, copied, said in (
        ("same", CHUNKS, ""),
        ("key", 0, "changed since it was encrypted"),
        ("id", 0, "encrypted with key 'k1'"),
        ("plain", 0, "encoded by aesgcm/1, which TO has not"),
    ):
        assert main(["store", "cp", "--json", "--config", str(config), "here", to]) == (0 if copied else 1)
        told = json.loads(capsys.readouterr().out)
        assert told["objects"].get("copied", 0) == copied
        assert said in json.dumps(told["named"])


def test_a_tier_without_the_serde_is_given_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    assert found(tmp_path, serde="")[0] == []
