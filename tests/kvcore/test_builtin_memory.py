"""The memory storage keeps the storage contract."""

from pathlib import Path

from kvcore.api import Context, ObjectKey
from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.builtin.memory import MemoryStorage
from kvcore.builtin.memory_config import MemoryConfig
from kvcore.testing import StorageConformance
from kvcore.testing.driver import AnyStorage


def make(capacity_bytes: int | None = None) -> MemoryStorage:
    context = Context(make_eviction=lambda spec: {"lru": LruPolicy}[spec](None, None))
    return MemoryStorage(MemoryConfig(capacity=f"{capacity_bytes}B" if capacity_bytes else None), context)


class TestMemoryStorage(StorageConformance):
    def make_storage(self, tmp_path: Path) -> MemoryStorage:
        return make()

    def make_bounded(self, tmp_path: Path, capacity_bytes: int) -> MemoryStorage:
        return make(capacity_bytes)

    def raw_read(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> bytes:
        assert isinstance(storage, MemoryStorage)
        return storage._objects[key]

    def raw_write(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey, data: bytes) -> None:
        assert isinstance(storage, MemoryStorage)
        storage._objects[key] = data

    def raw_corrupt(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> None:
        assert isinstance(storage, MemoryStorage)
        storage._objects[key] = storage._objects[key][:100]

    def raw_bytes(self, storage: AnyStorage, tmp_path: Path) -> int:
        assert isinstance(storage, MemoryStorage)
        with storage._lock:
            return sum(map(len, storage._objects.values()))
