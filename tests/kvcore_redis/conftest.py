"""One server for all tests that neither stop nor fill it, and one cluster, which is repaired after those that do."""

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
def own_cluster(cluster: RedisCluster) -> Iterator[RedisCluster]:
    """The cluster for a test that stops or changes nodes. They serve what they have when one of them is down."""
    yield cluster
    cluster.repair()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """A server for this test alone, which may stop it."""
    with RedisServer(tmp_path / "own") as server:
        yield server
