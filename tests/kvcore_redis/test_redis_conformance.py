"""kvcore-redis passes the conformance suite against real servers: by TCP, by Unix socket, and in a cluster.

The suite makes storages in child processes too, which find the server by what stands in the environment.
"""

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
from redis_place import make_redis

from kvcore.api import ObjectKey
from kvcore.testing import StorageConformance
from kvcore.testing.driver import AnyStorage
from kvcore.testing.servers.redis import RedisCluster, RedisServer
from kvcore_redis.storage import RedisStorage

URL = "KVCORE_TEST_REDIS_URL"


class TestRedisConformance(StorageConformance):
    """By TCP."""

    options: ClassVar[dict[str, Any]] = {}
    model_examples = 10

    @pytest.fixture(autouse=True)
    def _place(self, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(URL, server.url)

    def make_storage(self, tmp_path: Path) -> RedisStorage:
        return make_redis(os.environ[URL], prefix(tmp_path), **self.options)

    def raw_read(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> bytes:
        with self.client() as client:
            data = client.get(prefix(tmp_path) + key.name)
            assert isinstance(data, bytes)
            return data

    def raw_write(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey, data: bytes) -> None:
        with self.client() as client:
            client.set(prefix(tmp_path) + key.name, data)

    def raw_corrupt(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> None:
        with self.client() as client:
            data = client.get(prefix(tmp_path) + key.name)
            assert isinstance(data, bytes)
            client.set(prefix(tmp_path) + key.name, data[:1000])

    def client(self) -> Any:
        """Past the storage."""
        return redis.Redis.from_url(os.environ[URL])


class TestUnixSocket(TestRedisConformance):
    """By Unix socket, with a time to live."""

    options = {"ttl": "1h"}
    model_examples = 5

    @pytest.fixture(autouse=True)
    def _place(self, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(URL, f"unix://{server.unix_socket}")


class TestCluster(TestRedisConformance):
    """In a cluster."""

    options = {"cluster": True}
    model_examples = 5

    @pytest.fixture(autouse=True)
    def _place(self, cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(URL, cluster.url)

    def client(self) -> Any:
        return redis.RedisCluster.from_url(os.environ[URL].partition(",")[0])


def prefix(tmp_path: Path) -> str:
    """A part of the server for one test."""
    return f"kvcore:{tmp_path}:"
