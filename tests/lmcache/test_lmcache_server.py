"""kvcore behind LMCache's own server, with an engine's two ranks before it."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from lmcache_server import Engine, LMCacheServer

from kvcore.service.inspect.client import ask, caches
from kvcore.testing.servers.kvcore import KVCoreServer
from kvcore.testing.servers.redis import RedisServer

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(900)]  # it takes long to start on a busy machine

CHUNKS = 8
RANKS = 2
SEQUENCES = (1, 2)
"""Two prompts of 512 tokens, in chunks of 64."""


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where LMCache's server can be asked, and nobody else."""
    with tempfile.TemporaryDirectory(prefix="kv") as short:  # a socket's path has at most 107 bytes
        monkeypatch.setenv("KVCORE_RUN_DIR", short)
        yield short


def test_disk(lmcache_python: Path, environment: Mapping[str, str], tmp_path: Path, sockets: str) -> None:
    """Stored, dropped from LMCache's memory, loaded back; again after a restart; corrupted on disk: misses. Its prompts
    are explained by the hashes that it has made."""
    environment = {**environment, "KVCORE_RUN_DIR": sockets}
    cache = tmp_path / "cache"
    config = tmp_path / "kvcore.yaml"
    config.write_text(f"lookup_timeout: 20s\nl2:\n- storage: {{plugin: disk, path: {cache}}}\n  timeout: 60s\n")
    server = LMCacheServer(lmcache_python, environment, tmp_path, "lmcache", config=str(config))
    with server:
        with Engine(lmcache_python, environment, server) as engine:
            assert engine.ask("lookup", 1) == 0
            stored = {s: engine.ask("store", s) for s in SEQUENCES}
            assert len(set(stored.values())) == len(SEQUENCES)
            settled(server, cache, len(SEQUENCES))
            server.clear_l1()
            assert {s: engine.ask("retrieve", s) for s in SEQUENCES} == stored
            assert engine.ask("lookup", 3) == 0  # what was never stored
            assert [explained(engine, s) for s in (1, 2, 3)] == [(8, 8), (8, 8), (0, 8)]
            assert explained(engine, 1, salt="s") == (0, 8)
            assert last_explained() == (CHUNKS, 64, "never_stored")
        server.stop()
        server.start()
        with Engine(lmcache_python, environment, server) as engine:
            assert {s: engine.ask("retrieve", s) for s in SEQUENCES} == stored
            server.clear_l1()
            corrupt(cache)
            assert [engine.ask("lookup", s) for s in SEQUENCES] == [0, 0]
            assert engine.ask("store", 1) == stored[1]
            settled(server, cache, 1)
            server.clear_l1()
            assert engine.ask("retrieve", 1) == stored[1]
            assert server.status()["healthy"]


def test_redis_that_comes_and_goes(lmcache_python: Path, environment: Mapping[str, str], tmp_path: Path) -> None:
    """Down at the start, up, down again: LMCache's server lives, and there are misses meanwhile."""
    redis = RedisServer(tmp_path)
    config = tmp_path / "kvcore.yaml"
    url = f"redis://127.0.0.1:{redis.port}"
    storage = f"{{plugin: redis, url: '{url}', connect_timeout: 300ms, timeout: 2s}}"
    config.write_text(f"lookup_timeout: 20s\nl2:\n- storage: {storage}\n  timeout: 5s\n")
    server = LMCacheServer(lmcache_python, environment, tmp_path, "lmcache", config=str(config))
    with server, Engine(lmcache_python, environment, server) as engine:
        assert engine.ask("lookup", 1) == 0
        engine.ask("store", 1)
        server.until("idle", idle)
        server.clear_l1()
        assert engine.ask("lookup", 1) == 0
        with redis:
            stored = comes_back(server, engine)
            assert engine.ask("retrieve", 2) == stored
            server.clear_l1()
            redis.kill()
            assert engine.ask("lookup", 2) == 0
        assert server.status()["healthy"]


def test_over_a_server_of_kvcore(lmcache_python: Path, environment: Mapping[str, str], tmp_path: Path) -> None:
    """`server:` in the file: another process owns the tiers. It is killed, and comes back with what is on its disk."""
    cache = tmp_path / "cache"
    tiers = [{"storage": {"plugin": "disk", "path": str(cache)}, "timeout": "60s"}]
    with tempfile.TemporaryDirectory(prefix="kvcore") as short:  # a socket's path has at most 107 bytes
        owner = KVCoreServer(Path(short), {"l1": {"size": "64MiB"}, "l2": tiers, "lookup_timeout": "20s"})
        config = tmp_path / "kvcore.yaml"
        config.write_text(f"lookup_timeout: 20s\nserver: {{url: '{owner.url}', timeout: 10s}}\n")
        server = LMCacheServer(lmcache_python, environment, tmp_path, "lmcache", config=str(config))
        with owner, server, Engine(lmcache_python, environment, server) as engine:
            stored = engine.ask("store", 1)
            settled(server, cache, 1)
            server.clear_l1()
            assert engine.ask("retrieve", 1) == stored
            server.clear_l1()
            owner.kill()
            assert engine.ask("lookup", 1) == 0
            assert server.status()["healthy"]
            owner.start()
            until_found(engine, 1)
            assert engine.ask("retrieve", 1) == stored


def explained(engine: Engine, sequence: int, **more: str) -> tuple[int, int]:
    """How many chunks of a prompt `kvcore explain --prompt` finds, and of how many."""
    (said,) = ask(caches()[0], "/explain", {"tokens": engine.ask("tokens", sequence), **more})["explanations"]
    return said["found"]["chunks"], said["chunks"]


def last_explained() -> tuple[int, int, str]:
    """Of the last lookup: its chunks, their tokens, and why none was found."""
    (row,) = ask(caches()[0], "/requests?limit=1")["requests"]
    (said,) = ask(caches()[0], f"/explain?request=no.{row['seq']}")["explanations"]
    return said["chunks"], said["chunk_tokens"], said["broke"]["reason"]


def until_found(engine: Engine, sequence: int) -> None:
    for _ in range(400):
        if engine.ask("lookup", sequence) == CHUNKS:
            return
        time.sleep(0.05)
    raise AssertionError("the server is there again, and nothing is found")


def comes_back(server: LMCacheServer, engine: Engine) -> str:
    """Store until it is found again: the breaker tries the server now and then."""
    for _ in range(200):
        stored: str = engine.ask("store", 2)
        server.until("idle", idle)
        server.clear_l1()
        if engine.ask("lookup", 2) == CHUNKS:
            return stored
    raise AssertionError("Redis is there again, and not used")


def idle(status: Mapping[str, int]) -> bool:
    return status["waiting_store_bytes"] == 0


def settled(server: LMCacheServer, cache: Path, sequences: int) -> None:
    """All chunks of both ranks are on the disk."""
    expected = sequences * CHUNKS * RANKS
    server.until(f"{expected} objects stored", lambda status: idle(status) and len(objects(cache)) >= expected)


def objects(cache: Path) -> list[Path]:
    return [p for p in cache.rglob("*") if p.is_file() and p.stat().st_size > 4096]


def corrupt(cache: Path) -> None:
    """One byte of each object, in its payload."""
    for path in objects(cache):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
