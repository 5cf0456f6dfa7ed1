"""Fixtures of the service's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import CONFIG

from kvcore.testing.servers.kvcore import KVCoreServer


@pytest.fixture
def server(folder: Path) -> Iterator[KVCoreServer]:
    """A server that runs."""
    with KVCoreServer(folder, CONFIG) as made:
        yield made
