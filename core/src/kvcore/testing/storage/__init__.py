"""The conformance suite of storages. Subclass `StorageConformance` and give `make_storage`."""

from kvcore.testing.storage.base import StorageSuite
from kvcore.testing.storage.limits import LimitTests
from kvcore.testing.storage.model import ModelTests
from kvcore.testing.storage.restart import RestartTests
from kvcore.testing.storage.roundtrip import RoundTripTests
from kvcore.testing.storage.traffic import TrafficTests

__all__ = ["StorageConformance", "StorageSuite"]


class StorageConformance(RoundTripTests, TrafficTests, RestartTests, LimitTests, ModelTests):
    """All tests of a storage, blocking or asyncio.

    class TestAcmeStorage(StorageConformance):
        def make_storage(self, tmp_path):
            return AcmeStorage(AcmeConfig(path=tmp_path), context())

    `StorageSuite` documents what else can be given: a bounded storage, access past the API, flags. Tests that do not
    apply to a storage are skipped with the reason (`pytest -rs` prints it).
    """
