"""kvcore-mooncake passes the conformance suite against a real master and a real holder."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from mooncake_place import Pool, RawClient, make_storage

from kvcore.api import ObjectKey
from kvcore.testing import StorageConformance
from kvcore.testing.driver import AnyStorage, Driver
from kvcore_mooncake.storage import MooncakeStorage

pytestmark = pytest.mark.usefixtures("private")

MASTER, ADMIN = "KVCORE_TEST_MOONCAKE_MASTER", "KVCORE_TEST_MOONCAKE_ADMIN"
"""Tell child processes of the suite where the master is."""


@pytest.fixture(scope="module")
def raw(pool: Pool) -> Iterator[RawClient]:
    """Access past the storage."""
    client = RawClient(pool)
    os.environ[MASTER], os.environ[ADMIN] = pool.master.address, pool.master.admin_address
    TestMooncakeConformance.raw = client
    yield client
    del os.environ[MASTER], os.environ[ADMIN]
    client.close()


@pytest.fixture(scope="module")
def lasting(raw: RawClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """One open storage for the tests that want nothing else: a client takes a second to close."""
    with Driver(TestMooncakeConformance().make_storage(tmp_path_factory.mktemp("lasting"))) as driver:
        yield driver


@pytest.mark.usefixtures("raw")
class TestMooncakeConformance(StorageConformance):
    """A pool evicts as it likes, so `Missing` is always right (`forgets`). What it holds lies in another process."""

    forgets = True
    model_examples = 3  # each restart in it takes a second
    model_steps = 16
    model_shrinks = False
    raw: ClassVar[RawClient]

    @pytest.fixture
    def driver(self, lasting: Driver) -> Iterator[Driver]:
        yield lasting
        self.raw.empty()

    def make_storage(self, tmp_path: Path) -> MooncakeStorage:
        place = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
        return make_storage(os.environ[MASTER], admin_address=os.environ[ADMIN], key_prefix=f"{place}/")

    def raw_read(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> bytes:
        return self.raw.get(self.name(storage, key))

    def raw_write(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey, data: bytes) -> None:
        self.raw.put(self.name(storage, key), data)

    def raw_corrupt(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> None:
        self.raw.put(self.name(storage, key), self.raw.get(self.name(storage, key))[:1000])

    @staticmethod
    def name(storage: AnyStorage, key: ObjectKey) -> str:
        assert isinstance(storage, MooncakeStorage)
        return storage._names([key])[0]
