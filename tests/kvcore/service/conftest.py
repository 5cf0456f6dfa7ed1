"""Fixtures of the service's tests: a short folder, because a socket's path is short, and a server in it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import CONFIG

from kvcore.testing.servers.kvcore import KVCoreServer


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        yield Path(path)


@pytest.fixture
def server(folder: Path) -> Iterator[KVCoreServer]:
    """A server that runs."""
    with KVCoreServer(folder, CONFIG) as made:
        yield made
