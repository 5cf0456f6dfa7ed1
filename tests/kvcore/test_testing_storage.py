"""The storage suite passes correct storages of every kind, and names the fault of broken ones."""

from pathlib import Path

from storage_samples import AsyncStorage, FileStorage

from kvcore.api import ObjectKey
from kvcore.testing import StorageConformance
from kvcore.testing.driver import AnyStorage


class TestFiles(StorageConformance):
    several_instances = True

    def make_storage(self, tmp_path: Path) -> FileStorage:
        return FileStorage(tmp_path / "objects")

    def raw_read(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> bytes:
        return (tmp_path / "objects" / key.name).read_bytes()

    def raw_write(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey, data: bytes) -> None:
        (tmp_path / "objects" / key.name).write_bytes(data)

    def raw_corrupt(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> None:
        path = tmp_path / "objects" / key.name
        path.write_bytes(path.read_bytes()[:1000])


class TestAsync(StorageConformance):
    def make_storage(self, tmp_path: Path) -> AsyncStorage:
        return AsyncStorage(str(tmp_path))
