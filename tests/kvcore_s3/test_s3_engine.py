"""Through the core: what is wrong in the bucket is a miss, what is right is shared, and a server that dies costs hits
only, comes back by itself, and is used again."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from s3_place import BUCKET, options, raw_client

from kvcore.api import PluginError
from kvcore.engine import CacheEngine
from kvcore.testing.chunks import CHUNKS, contents, hashes, put, spec
from kvcore.testing.servers import free_port
from kvcore.testing.servers.s3 import JuiceFS
from moved import eventually


@contextmanager
def opened(folder: Path, endpoint: str, serde: str = "", **changed: str) -> Iterator[CacheEngine]:
    changed = {"connect_timeout": "300ms", "read_timeout": "500ms", "deadline": "1500ms", **changed}
    given = ", ".join(f"{name}: {value}" for name, value in options(endpoint, **changed).items())
    config = folder / "kvcore.yaml"
    config.write_text(
        "l1: {size: 8MiB}\nmin_object_size: 128KiB\nlookup_timeout: 20s\n"
        f"l2: [{{storage: {{plugin: s3, {given}}}, timeout: 3s{serde}}}]\n"
    )
    engine = CacheEngine.open(str(config))
    try:
        yield engine
    finally:
        engine.close()


ALL = list(range(1, CHUNKS + 1))


@pytest.mark.parametrize("serde", ["", ", serde: [zstd]"], ids=["raw", "zstd"])
def test_what_one_engine_stored_another_finds(own: JuiceFS, tmp_path: Path, serde: str) -> None:
    with opened(tmp_path, own.endpoint, serde) as engine:
        put(engine, engine.register(spec()), hashes())
    with opened(tmp_path, own.endpoint, serde) as engine:
        space = engine.register(spec())
        assert contents(engine, space, hashes()) == ALL
        assert engine.stats()['kvcore_hit_chunks_total{source="s3"}'] == CHUNKS


def test_a_damaged_object_is_a_miss_and_is_deleted(own: JuiceFS, tmp_path: Path) -> None:
    """Cut short, of other bytes, and longer than any frame of its key."""
    raw = raw_client(own.endpoint)
    with opened(tmp_path, own.endpoint) as engine:
        put(engine, engine.register(spec()), hashes())
    names = sorted(entry["Key"] for entry in raw.list_objects_v2(Bucket=BUCKET)["Contents"])
    by_hash = {name.rpartition("-")[2]: name for name in names}
    name = by_hash[hashes()[3].hex()]
    good = raw.get_object(Bucket=BUCKET, Key=name)["Body"].read()
    for bad in (good[:-1], good[:100], b"", good + b"x", b"y" * len(good)):
        raw.put_object(Bucket=BUCKET, Key=name, Body=bad)
        with opened(tmp_path, own.endpoint) as engine:
            space = engine.register(spec())
            assert contents(engine, space, hashes()) == ALL[:3]
            assert raw.list_objects_v2(Bucket=BUCKET)["KeyCount"] == CHUNKS - 1
            put(engine, space, hashes())  # computed again, and kept
            assert raw.get_object(Bucket=BUCKET, Key=name)["Body"].read() == good


def test_a_server_that_dies_midway_and_comes_back(own: JuiceFS, tmp_path: Path) -> None:
    """No lookup fails or takes long while it is away; the breaker closes by itself when it is back."""
    with opened(tmp_path, own.endpoint) as engine:
        space = engine.register(spec())
        put(engine, space, hashes())
        engine.clear(space)
        assert contents(engine, space, hashes()) == ALL
        engine.clear(space)
        own.kill()
        for _ in range(5):
            begun = time.monotonic()
            assert contents(engine, space, hashes()) == []
            assert time.monotonic() - begun < 10
        put(engine, space, hashes(start=100))
        assert engine.stats()['kvcore_tier_open{tier="s3"}'] == 0
        own.start()
        eventually(lambda: contents(engine, space, hashes()) == ALL)
        assert engine.stats()['kvcore_tier_open{tier="s3"}'] == 1


def test_killed_and_frozen_under_load(own: JuiceFS, tmp_path: Path) -> None:
    """Whatever arrives is right; whatever does not is a miss."""
    with opened(tmp_path, own.endpoint) as engine:
        space = engine.register(spec())
        put(engine, space, hashes())
        stop, errors = threading.Event(), list[BaseException]()

        def load() -> None:
            try:
                while not stop.is_set():
                    engine.clear(space)
                    found = contents(engine, space, hashes())
                    assert found == ALL[: len(found)]
            except BaseException as error:  # raised in the test's own thread below
                errors.append(error)

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        for hurt, heal in ((own.freeze, own.thaw), (own.kill, own.start)):
            time.sleep(0.3)
            hurt()
            time.sleep(1)
            heal()
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
        if errors:
            raise errors[0]
        eventually(lambda: contents(engine, space, hashes()) == ALL)


def test_unreachable_at_the_start(tmp_path: Path) -> None:
    """The engine starts without it and finds it later."""
    port = free_port()
    with opened(tmp_path, f"http://127.0.0.1:{port}", create_bucket="true") as engine:
        space = engine.register(spec())
        assert contents(engine, space, hashes()) == []
        with JuiceFS(tmp_path, port=port):

            def works() -> bool:
                engine.clear(space)
                put(engine, space, hashes())
                engine.clear(space)
                return contents(engine, space, hashes()) == ALL

            eventually(works)


def test_a_wrong_configuration_is_one_clear_error(own: JuiceFS, tmp_path: Path) -> None:
    for changed, text in (
        ({"bucket": "nowhere"}, r"l2\[0\].*'s3' did not open.*NoSuchBucket.*create_bucket"),
        ({"secret_access_key": "wrong-one"}, r"l2\[0\].*SignatureDoesNotMatch"),
    ):
        with pytest.raises(PluginError, match=text) as caught, opened(tmp_path, own.endpoint, **changed):
            pass
        assert "wrong-one" not in str(caught.value)
