"""One server, and one cluster, for all tests that neither stop nor fill it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcore.testing.servers.redis import RedisCluster, RedisServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server without a password, by TCP and by Unix socket."""
    with RedisServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three masters."""
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """A server for this test alone, which may stop it."""
    with RedisServer(tmp_path / "own") as server:
        yield server
