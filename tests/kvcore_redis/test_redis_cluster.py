"""A cluster: masters that die or freeze cost only their own objects, slots that move are followed."""

import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from redis.crc import key_slot
from redis_place import connections, make_redis, nodes, opened, put

from kvcore.api import ObjectKey, StorageError
from kvcore.testing.memory import make_key, source
from kvcore.testing.servers.redis import SLOTS, RedisCluster, RedisServer
from kvcore_redis.node import FIRST_REST_S, Rest
from moved import eventually, get, keys_of, kind, takes

KEYS = keys_of(60)
TIMEOUT_S = 0.5


def home(key: ObjectKey, prefix: str = "kvcore:") -> int:
    """Which of the three masters has the slot of a key."""
    return key_slot(prefix.encode() + key.name.encode()) // -(-SLOTS // 3)


def test_objects_are_spread(cluster: RedisCluster, tmp_path: Path) -> None:
    with opened(cluster.url, f"{tmp_path}:", cluster=True) as driver:
        put(driver, KEYS, 50_000)
        assert get(driver, KEYS, 50_000) == ["ok"] * 60
        assert {home(key, f"{tmp_path}:") for key in KEYS} == {0, 1, 2}
        assert len(nodes(driver)) == 3
        assert sorted(entry.key for entry in driver.entries()) == sorted(KEYS)
        usage = driver.usage()
        assert usage is not None
        assert usage.objects == 60
        driver.call("ping")


def test_one_node_with_a_tag_in_the_prefix(cluster: RedisCluster, tmp_path: Path) -> None:
    with opened(cluster.url, f"{tmp_path}:{{kv}}:", cluster=True) as driver:
        put(driver, KEYS, 100)
        assert get(driver, KEYS, 100) == ["ok"] * 60
        assert len({home(key, f"{tmp_path}:{{kv}}:") for key in KEYS}) == 1
        probed = home(ObjectKey(bytes(16), bytes(16)), f"{tmp_path}:{{kv}}:")
        assert [node.connections for node in nodes(driver)] == [int(i == probed) for i in range(3)]


def test_a_dead_master(own_cluster: RedisCluster) -> None:
    """The others serve, at once; it is used again once it is back."""
    expected = ["io" if home(key) == 1 else "ok" for key in KEYS]
    with opened(own_cluster.url, cluster=True, timeout=f"{TIMEOUT_S}s") as driver:
        put(driver, KEYS)
        own_cluster.servers[1].kill()
        with takes(0, 2 * TIMEOUT_S):
            assert get(driver, KEYS) == expected
            assert [kind(o) for o in driver.store([source(key, b"x") for key in KEYS])] == expected
            put(driver, [key for key in KEYS if home(key) != 1])
            assert driver.exists(KEYS) == [found == "ok" for found in expected]
            driver.delete([make_key("nothing"), *KEYS[:2]])
            driver.call("ping")
            with pytest.raises(StorageError, match="does not answer"):
                driver.entries()
        own_cluster.servers[1].start()
        eventually(lambda: "io" not in get(driver, KEYS))
        put(driver, KEYS)
        assert get(driver, KEYS) == ["ok"] * 60


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_frozen_master(own_cluster: RedisCluster, frozen: int) -> None:
    """It costs one call its time; then it is left alone, and the others serve at once."""
    with opened(own_cluster.url, cluster=True, timeout=f"{TIMEOUT_S}s") as driver:
        put(driver, KEYS)
        own_cluster.servers[frozen].freeze()
        with takes(TIMEOUT_S * 0.95, TIMEOUT_S):
            found = get(driver, KEYS)
        assert {kind for kind, key in zip(found, KEYS, strict=True) if home(key) == frozen} == {"timeout"}
        with takes(0, TIMEOUT_S / 5):
            assert get(driver, KEYS) == ["io" if home(key) == frozen else "ok" for key in KEYS]
            assert driver.exists(KEYS) == [home(key) != frozen for key in KEYS]
        own_cluster.servers[frozen].thaw()
        eventually(lambda: get(driver, KEYS) == ["ok"] * 60)


def test_all_masters_dead(own_cluster: RedisCluster, caplog: pytest.LogCaptureFixture) -> None:
    """Failures at once, and everything comes back: for who was there before, and for who came meanwhile."""
    with opened(own_cluster.url, cluster=True, timeout=f"{TIMEOUT_S}s") as driver:
        put(driver, KEYS)
        for server in own_cluster.servers:
            server.kill()
        with takes(0, 2 * TIMEOUT_S):
            assert get(driver, KEYS) == ["io"] * 60
            for method in ("exists", "delete"):
                with pytest.raises(StorageError, match="60 of 60 objects"):
                    driver.call(method, KEYS)
            with pytest.raises(StorageError):
                driver.call("ping")
        assert connections(driver) == 0
        with caplog.at_level("WARNING", "kvcore"), opened(own_cluster.url, cluster=True) as late:
            assert "does not answer" in caplog.text
            assert get(late, KEYS) == ["io"] * 60
            for server in own_cluster.servers:
                server.start()
            for each in (driver, late):
                eventually(lambda each=each: get(each, KEYS) == ["missing"] * 60)


def test_a_cluster_that_insists_on_all_its_slots(own_cluster: RedisCluster) -> None:
    """By default a cluster refuses everything once it knows that a master is down: failures, not exceptions."""
    with opened(own_cluster.url, cluster=True) as driver:
        put(driver, KEYS)
        for server in own_cluster.servers:
            server.ask("CONFIG", "SET", "cluster-require-full-coverage", "yes")
        own_cluster.servers[0].kill()
        eventually(lambda: get(driver, KEYS) == ["io"] * 60)
        own_cluster.servers[0].start()
        eventually(lambda: "io" not in get(driver, KEYS))
        for server in own_cluster.servers:
            server.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")


def test_a_slot_that_moves(own_cluster: RedisCluster) -> None:
    """While it is on its way (ASK) and when it has arrived (MOVED), each object is found and can be stored."""
    source_server, target = own_cluster.servers[0], own_cluster.servers[1]
    keys = keys_of(200)
    prefix = next(f"kvcore:{{{i}}}:" for i in range(100) if home(keys[0], f"kvcore:{{{i}}}:") == 0)
    names = [prefix + key.name for key in keys]
    slot = str(key_slot(names[0].encode()))
    ids = [str(server.ask("CLUSTER", "MYID")) for server in (source_server, target)]
    with opened(own_cluster.url, prefix, cluster=True) as driver:
        put(driver, keys[:100], 1000)
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        source_server.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        half = names[:50]
        source_server.ask("MIGRATE", "127.0.0.1", str(target.port), "", "0", "5000", "KEYS", *half)
        assert get(driver, keys[:100], 1000) == ["ok"] * 100
        assert driver.exists(keys) == [True] * 100 + [False] * 100
        put(driver, keys[100:], 1000)
        assert get(driver, keys, 1000) == ["ok"] * 200
        rest = [str(name) for name in as_list(source_server.ask("CLUSTER", "GETKEYSINSLOT", slot, "1000"))]
        source_server.ask("MIGRATE", "127.0.0.1", str(target.port), "", "0", "5000", "KEYS", *rest)
        for server in own_cluster.servers[::-1]:
            server.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
        assert get(driver, keys, 1000) == ["ok"] * 200
        put(driver, keys, 1000)
        assert len(driver.entries()) == 200
        assert source_server.ask("CLUSTER", "COUNTKEYSINSLOT", slot) == 0
        driver.delete(keys)
        assert not any(driver.exists(keys))


def test_a_ping_has_the_time_of_one_call_however_many_nodes_hang(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(cluster.url, cluster=True, timeout="6s") as driver:
        *hanging, alive = nodes(driver)
        now = time.monotonic()
        monkeypatch.setattr("kvcore_redis.storage.time", SimpleNamespace(monotonic=lambda: now))

        def hang(deadline: float) -> None:
            nonlocal now
            now = deadline
            raise TimeoutError("no answer in time")

        for node in hanging:
            monkeypatch.setattr(node, "connection", hang)
        begun, real, asked = now, alive.connection, list[float]()
        monkeypatch.setattr(alive, "connection", lambda deadline: (asked.append(deadline), real(deadline))[1])
        driver.call("ping")
        assert [round(deadline - begun, 6) for deadline in asked] == [6]


def test_a_seed_that_hangs_leaves_the_others_time(cluster: RedisCluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # its kernel accepts, nobody answers
        url = f"redis://127.0.0.1:{mute.getsockname()[1]},{cluster.url.removeprefix('redis://')}"
        with opened(url, str(tmp_path), cluster=True, timeout="4s") as driver:
            put(driver, KEYS)
            assert get(driver, KEYS) == ["ok"] * 60


def test_a_cluster_that_is_none(server: RedisServer, cluster: RedisCluster) -> None:
    for url, options, step in (
        (server.url, {"cluster": True}, "set `cluster: false`"),
        (cluster.servers[0].url, {}, "set `cluster: true`"),
    ):
        prefix = next(f"{i}:" for i in range(100) if key_slot(f"{i}:probe".encode()) // -(-SLOTS // 3) == 1)
        storage = make_redis(url, prefix, **options)
        with pytest.raises(StorageError, match=step):
            storage.open()
        storage.close()


def test_a_password_in_a_cluster(own_cluster: RedisCluster) -> None:
    for server in own_cluster.servers:
        server.ask("CONFIG", "SET", "requirepass", "secret")
    try:
        with opened(own_cluster.url, cluster=True, password="secret") as driver:
            put(driver, KEYS, 100)
            assert get(driver, KEYS, 100) == ["ok"] * 60
            assert len(driver.entries()) == 60
        wrong: list[dict[str, str]] = [{}, {"password": "wrong"}]
        for options in wrong:
            storage = make_redis(own_cluster.url, cluster=True, **options)
            with pytest.raises(StorageError, match="refuses us"):
                storage.open()
            storage.close()
    finally:
        with opened(own_cluster.url, cluster=True, password="secret") as driver:
            for node in nodes(driver):
                with redis.Redis(port=node.endpoint.port, password="secret") as client:
                    client.config_set("requirepass", "")


def test_rests_grow_and_end() -> None:
    """A node that failed is left alone for 1, 2, 4 ... 30 s; in each pause one call tries it."""
    now = 0.0
    rest = Rest(lambda: now)
    assert rest.allow()
    pause = FIRST_REST_S
    for _ in range(8):
        rest.failed()
        now += pause * 0.99
        assert not rest.allow()
        now += pause * 0.02
        assert rest.allow()
        assert not rest.allow(), "one try is under way"
        pause = min(30.0, pause * 2)
    rest.answered()
    assert rest.allow()
    assert rest.allow()


def test_redis_py_agrees_on_where_objects_are(cluster: RedisCluster, tmp_path: Path) -> None:
    with opened(cluster.url, f"{tmp_path}:", cluster=True) as driver:
        put(driver, KEYS, 100)
        with redis.RedisCluster.from_url(cluster.servers[0].url) as client:
            assert all(client.exists(f"{tmp_path}:{key.name}") for key in KEYS)


def as_list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
