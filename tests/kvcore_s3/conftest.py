"""One JuiceFS gateway with a bucket, for all tests that neither stop nor fill it; one of its own for those that do."""

import os
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


@pytest.fixture(autouse=True)
def _no_keys_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials of this machine, and no question to a cloud's metadata service."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws" / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws" / "credentials"))
