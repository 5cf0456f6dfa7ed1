"""Real pools run in a network of their own: Mooncake's clients listen on every address, whatever they are told."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from mooncake_place import MIB, Pool

from kvcore.testing.servers import ServerError
from kvcore.testing.servers.mooncake import mooncake_binary
from kvcore.testing.servers.network import PrivateNetwork

EXPOSED = "KVCORE_TEST_MOONCAKE_EXPOSED"


@cache
def network() -> PrivateNetwork:
    """One for the whole run: the library keeps threads that stay where they were started."""
    return PrivateNetwork()


@pytest.fixture(scope="module")
def private() -> Iterator[None]:
    """Enters the private network. Without the right to make one, the tests run only when they are told to."""
    try:
        mooncake_binary("mooncake_master")
    except ServerError as error:
        pytest.skip(f"NOT TESTED: {error}")
    if os.environ.get(EXPOSED):
        yield
        return
    try:
        here = network()
    except ServerError as error:
        pytest.skip(
            f"NOT TESTED: Mooncake's clients listen on every address, so this wants a private network, but {error}, "
            f"or set {EXPOSED}=1 to run it in the open"
        )
    with here:
        yield


@pytest.fixture(scope="module")
def pool(private: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A master and one holder of 256 MiB, for tests that harm neither."""
    with Pool(tmp_path_factory.mktemp("pool"), 256 * MIB) as running:
        yield running


@pytest.fixture
def own_pool(private: None, tmp_path: Path) -> Iterator[Pool]:
    """The same for one test, which may do to it what it wants."""
    with Pool(tmp_path / "pool", 256 * MIB) as running:
        yield running
