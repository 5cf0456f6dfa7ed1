"""Behind Sentinels: the master that they name is used, and the next one when it dies or steps down."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from redis_place import connections, make_redis, nodes, opened, put

from kvcore.api import StorageError
from kvcore.testing.memory import source
from kvcore.testing.servers import free_port
from kvcore.testing.servers.redis import RedisServer, SentinelServer
from moved import eventually, get, keys_of, kind, takes

KEYS = keys_of(20)


class Watched(NamedTuple):
    master: RedisServer
    replica: RedisServer
    sentinel: SentinelServer

    @property
    def url(self) -> str:
        """A Sentinel that is not there, and the one that is."""
        return f"redis://127.0.0.1:{free_port()},127.0.0.1:{self.sentinel.port}"


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """A master with one replica, and one Sentinel."""
    options = {"repl-diskless-sync-delay": 0}
    with RedisServer(tmp_path, "master", options=options) as master:
        following = {**options, "replicaof": f"127.0.0.1 {master.port}"}
        with RedisServer(tmp_path, "replica", options=following) as replica:
            eventually(lambda: "master_link_status:up" in str(replica.ask("INFO", "replication")))
            with SentinelServer(tmp_path, master) as sentinel:
                eventually(lambda: f"port={replica.port}" in described(sentinel))
                yield Watched(master, replica, sentinel)


def described(sentinel: SentinelServer) -> str:
    """What the Sentinel knows of replicas."""
    replicas = sentinel.ask("SENTINEL", "REPLICAS", "mymaster")
    assert isinstance(replicas, list)
    return " ".join(f"port={replica[5]}" for replica in replicas)


def test_a_master_that_dies(watched: Watched) -> None:
    """Failures until the replica is the master, then everything that had been replicated is there."""
    with opened(watched.url, sentinel_master="mymaster") as driver:
        put(driver, KEYS)
        assert nodes(driver)[0].endpoint.port == watched.master.port
        eventually(lambda: watched.replica.ask("DBSIZE") == len(KEYS))
        watched.master.kill()
        with takes(0, 1):
            assert get(driver, KEYS) == ["io"] * 20
        eventually(lambda: get(driver, KEYS) == ["ok"] * 20)
        assert nodes(driver)[0].endpoint.port == watched.replica.port
        put(driver, KEYS)
        assert len(driver.entries()) == 20
        assert connections(driver) == 1


def test_a_master_that_steps_down(watched: Watched) -> None:
    """A store that meets what has become a replica goes to the new master, in the same call."""
    with opened(watched.url, sentinel_master="mymaster") as driver:
        put(driver, KEYS)
        eventually(lambda: watched.replica.ask("DBSIZE") == len(KEYS))
        watched.sentinel.ask("SENTINEL", "REMOVE", "mymaster")
        watched.replica.ask("REPLICAOF", "NO", "ONE")
        watched.master.ask("REPLICAOF", "127.0.0.1", str(watched.replica.port))
        watched.sentinel.ask("SENTINEL", "MONITOR", "mymaster", "127.0.0.1", str(watched.replica.port), "1")
        assert [kind(o) for o in driver.store([source(key, b"new") for key in KEYS])] == ["ok"] * 20
        assert nodes(driver)[0].endpoint.port == watched.replica.port
        assert watched.replica.ask("GET", f"kvcore:{KEYS[0].name}") == "new"
        assert connections(driver) == 1


def test_sentinels_that_do_not_answer(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """No error of `open`; and a master that is known is used without them."""
    with opened(watched.url, sentinel_master="mymaster") as driver:
        put(driver, KEYS)
        watched.sentinel.kill()
        assert get(driver, KEYS) == ["ok"] * 20
        with caplog.at_level("WARNING", "kvcore"), opened(watched.url, sentinel_master="mymaster") as late:
            assert "does not answer" in caplog.text
            assert get(late, KEYS) == ["io"] * 20
            with pytest.raises(StorageError, match="no server answers"):
                late.call("ping")
            watched.sentinel.start()
            eventually(lambda: get(late, KEYS) == ["ok"] * 20)


def test_a_sentinel_that_hangs_leaves_the_others_time(watched: Watched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # its kernel accepts, nobody answers
        url = f"redis://127.0.0.1:{mute.getsockname()[1]},127.0.0.1:{watched.sentinel.port}"
        with opened(url, sentinel_master="mymaster", timeout="2s") as driver:
            put(driver, KEYS)
            assert get(driver, KEYS) == ["ok"] * 20


def test_a_name_that_the_sentinels_do_not_know(watched: Watched) -> None:
    storage = make_redis(watched.url, sentinel_master="other")
    with pytest.raises(StorageError, match=r"knows no master 'other': correct `sentinel_master`"):
        storage.open()
    storage.close()


def test_passwords_of_the_sentinels_and_of_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("watch\n")
    monkeypatch.setenv("CACHE_PASSWORD", "serve")
    with (
        RedisServer(tmp_path, password="serve") as master,
        SentinelServer(tmp_path, master, password="watch") as sentinel,
    ):
        options = {"sentinel_master": "mymaster", "password_env": "CACHE_PASSWORD"}
        with opened(sentinel.url, **options, sentinel_password_file=str(tmp_path / "password")) as driver:
            put(driver, KEYS)
            assert get(driver, KEYS) == ["ok"] * 20
            assert len(driver.entries()) == 20
        storage = make_redis(sentinel.url, **options)
        with pytest.raises(StorageError, match="give the right `sentinel_username`"):
            storage.open()
        storage.close()
