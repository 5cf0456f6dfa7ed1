"""Through the core: a server that dies costs hits and no request, and what is wrong in it is a miss."""

from pathlib import Path

import pytest

from kvcore.api import ObjectKey, PluginError
from kvcore.engine import CacheEngine, Space
from kvcore.l2.bounded import RELIST_S
from kvcore.testing.chunks import CHUNKS, contents, hashes, publish, put, spec
from kvcore.testing.servers.redis import RedisServer
from moved import eventually


def opened(tmp_path: Path, server: RedisServer, options: str = "", tier: str = "") -> CacheEngine:
    config = tmp_path / "kvcore.yaml"
    storage = f"{{plugin: redis, url: '{server.url}', prefix: '{tmp_path}:', timeout: 1s{options}}}"
    config.write_text(f"l1: {{size: 8MiB}}\nmin_object_size: 128KiB\nl2: [{{storage: {storage}{tier}}}]\n")
    return CacheEngine.open(str(config))


def name_of(tmp_path: Path, space: Space, chunk_hash: bytes) -> str:
    return f"{tmp_path}:{ObjectKey(space.namespace, chunk_hash, 0).name}"


@pytest.mark.parametrize("tier", ["", ", serde: [zstd]"], ids=["raw", "zstd"])
def test_another_engine_finds_it(tmp_path: Path, server: RedisServer, tier: str) -> None:
    engine = opened(tmp_path, server, tier=tier)
    put(engine, engine.register(spec()), hashes())
    engine.close()
    other = opened(tmp_path, server, tier=tier)
    space = other.register(spec())
    assert contents(other, space, hashes()) == list(range(1, CHUNKS + 1))
    assert other.stats()['kvcore_hit_chunks_total{source="redis"}'] == CHUNKS
    other.close()


def test_a_server_that_dies_and_comes_back(tmp_path: Path, own: RedisServer) -> None:
    """Requests go on: hits from L1, misses for the rest. The tier is used again by itself."""
    engine = opened(tmp_path, own)
    space = engine.register(spec())
    put(engine, space, hashes())
    own.kill()
    assert contents(engine, space, hashes()) == list(range(1, CHUNKS + 1))
    engine.clear(space)
    for round_ in range(6):
        assert contents(engine, space, hashes()) == []
        publish(engine, space, hashes(4, 100 + 4 * round_))
        assert contents(engine, space, hashes(4, 100 + 4 * round_)) == [1, 2, 3, 4]
    eventually(lambda: engine.stats()['kvcore_tier_open{tier="redis"}'] == 0)
    own.start()
    engine.clear(space)

    def stored_and_found() -> bool:
        publish(engine, space, hashes())
        engine.drain()
        engine.clear(space)
        return contents(engine, space, hashes()) == list(range(1, CHUNKS + 1))

    eventually(stored_and_found)
    assert engine.stats()['kvcore_tier_open{tier="redis"}'] == 1
    engine.close()


def test_a_server_that_freezes(tmp_path: Path, own: RedisServer) -> None:
    """A lookup is answered in time, and what it did not get is a miss."""
    engine = opened(tmp_path, own)
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.clear(space)
    own.freeze()
    assert contents(engine, space, hashes()) == []
    publish(engine, space, hashes(2, 50))
    assert contents(engine, space, hashes(2, 50)) == [1, 2]
    own.thaw()
    eventually(lambda: contents(engine, space, hashes()) == list(range(1, CHUNKS + 1)))
    engine.close()


def test_a_server_that_is_not_there_at_the_start(tmp_path: Path, own: RedisServer) -> None:
    own.kill()
    engine = opened(tmp_path, own)
    space = engine.register(spec())
    assert contents(engine, space, hashes()) == []
    publish(engine, space, hashes())
    assert contents(engine, space, hashes()) == list(range(1, CHUNKS + 1))
    own.start()

    def stored() -> bool:
        engine.clear(space)
        publish(engine, space, hashes())
        engine.drain()
        return own.ask("DBSIZE") == CHUNKS

    eventually(stored)
    engine.close()


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "idle"])
def test_what_a_server_holds_that_comes_late_is_counted_as_soon_as_it_is_there(
    tmp_path: Path, own: RedisServer, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    engine = opened(tmp_path, own)
    put(engine, engine.register(spec()), hashes())
    engine.close()
    own.ask("SAVE")
    own.kill()
    if asked:  # the breaker's probe finds out, and no clock
        monkeypatch.setattr("kvcore.l2.bounded.FIRST_PAUSE_S", RELIST_S)
    engine = opened(tmp_path, own, tier=", capacity: 64MiB")
    tier = engine.manager.tiers[0]
    if asked:
        space = engine.register(spec())
        eventually(lambda: contents(engine, space, hashes()) == [] and not tier.breaker.closed)
    own.start()
    eventually(lambda: len(tier.capacity) == CHUNKS)
    engine.close()


def test_a_wrong_password_is_one_clear_error(tmp_path: Path, server: RedisServer) -> None:
    with pytest.raises(PluginError, match=r"storage 'redis' did not open: .*refuses AUTH") as caught:
        opened(tmp_path, server, ", password: hunter2")
    assert "hunter2" not in str(caught.value)


def test_a_full_server_is_counted(tmp_path: Path) -> None:
    limits = {"maxmemory": "3mb", "maxmemory-policy": "noeviction"}
    with RedisServer(tmp_path / "full", options=limits) as server:
        engine = opened(tmp_path, server)
        space = engine.register(spec())
        for start in range(0, 80, CHUNKS):
            put(engine, space, hashes(CHUNKS, start))
        stats = engine.stats()
        assert stats['kvcore_tier_operations_total{tier="redis",op="store",outcome="full"}'] > 0
        assert stats['kvcore_tier_open{tier="redis"}'] == 1, "a full server still serves loads"
        engine.close()


DAMAGE = {
    "cut short": (("SETRANGE", "100000", ""), True),
    "a changed byte": (("SETRANGE", "70001", "\x00X"), True),
    "another magic": (("SETRANGE", "0", "XX"), True),
    "too long": (("APPEND", "more"), True),
    "something else": (("SET", "x"), True),
    "a list": (("RPUSH", "x"), True),
    "nothing": (("DEL",), False),
}


@pytest.mark.parametrize(("change", "corrupt"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_object_is_a_miss(
    tmp_path: Path, server: RedisServer, change: tuple[str, ...], corrupt: bool
) -> None:
    engine = opened(tmp_path, server)
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.clear(space)
    name = name_of(tmp_path, space, hashes()[3])
    command, *arguments = change
    if command == "RPUSH" or arguments == ["100000", ""]:
        whole = server.ask("GETRANGE", name, "0", "99")
        server.ask("DEL", name)
        command, arguments = (command, arguments) if command == "RPUSH" else ("SET", [str(whole)])
    server.ask(command, name, *arguments)
    assert contents(engine, space, hashes()) == [1, 2, 3]
    if corrupt:
        eventually(lambda: server.ask("EXISTS", name) == 0)
    put(engine, space, hashes())  # computed again, and kept
    engine.clear(space)
    assert contents(engine, space, hashes()) == list(range(1, CHUNKS + 1))
    engine.close()
