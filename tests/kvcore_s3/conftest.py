"""One JuiceFS gateway with a bucket, for all tests that neither stop nor fill it; one of its own for those that do."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_place import BUCKET, raw_client

from kvcore.testing.servers.s3 import JuiceFS


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JuiceFS]:
    """The shared one."""
    with JuiceFS(tmp_path_factory.mktemp("s3")) as server:
        raw_client(server.endpoint).create_bucket(Bucket=BUCKET)
        yield server


@pytest.fixture
def own(tmp_path: Path) -> Iterator[JuiceFS]:
    """A server for this test alone, which may stop it."""
    with JuiceFS(tmp_path / "own") as server:
        raw_client(server.endpoint).create_bucket(Bucket=BUCKET)
        yield server
