"""The memory storage keeps the storage contract."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvcore.api import Duration, ObjectKey, PluginConfig
from kvcore.builtin.memory import MemoryStorage
from kvcore.builtin.memory_config import MemoryConfig
from kvcore.testing import StorageConformance, context
from kvcore.testing.driver import AnyStorage
from kvcore.testing.memory import Room, make_key, source


def make(capacity_bytes: int | None = None) -> MemoryStorage:
    return MemoryStorage(MemoryConfig(capacity=capacity_bytes), context())


class Waits(PluginConfig):
    pause: Duration


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


def test_head_of_a_prefix_outlives_its_tail() -> None:
    """A batch stands in the order of the prefix; what does not fit is its tail."""
    storage = make(1000)
    keys = [make_key(i) for i in range(15)]
    storage.store([source(key, bytes(100)) for key in keys])
    assert storage.exists(keys) == [True] * 10 + [False] * 5
    storage.load([Room(100).item(key) for key in keys[:10]])
    storage.store([source(make_key("new"), bytes(200))])
    assert storage.exists(keys) == [True] * 8 + [False] * 7


def test_what_finds_no_room_leaves_what_is_there_of_its_name() -> None:
    storage = make(100)
    keys = [make_key(i) for i in range(2)]
    storage.store([source(keys[0], bytes(40))])
    outcomes = storage.store([source(keys[1], bytes(60)), source(keys[0], bytes(60))])
    assert [getattr(o, "kind", "stored") for o in outcomes] == ["stored", "full"]
    assert storage.exists(keys) == [True, True]
    assert storage.usage().nbytes == 100
    assert [getattr(o, "kind", "stored") for o in storage.store([source(keys[0], bytes(100))])] == ["stored"]
    assert storage.exists(keys) == [True, False]
    assert storage.usage().nbytes == 100


def test_options_have_units() -> None:
    assert MemoryConfig.model_validate({"capacity": "2GiB"}).capacity == 2 << 30
    with pytest.raises(ValidationError, match="unit"):
        MemoryConfig.model_validate({"capacity": "2"})


def test_in_code_a_size_is_a_number_in_files_it_has_a_unit() -> None:
    assert MemoryConfig(capacity=4096).capacity == 4096
    assert MemoryConfig.model_validate({"capacity": "4KiB"}) == MemoryConfig(capacity=4096)
    for wrong in (-1, 1 << 63, True, 1.5):
        with pytest.raises(ValidationError, match="is not a size: write a number and a unit"):
            MemoryConfig.model_validate({"capacity": wrong})
    with pytest.raises(ValidationError, match="4096 is not a size: write a number and a unit"):
        MemoryConfig.model_validate_json('{"capacity": 4096}')


def test_in_code_a_duration_is_a_number_in_files_it_has_a_unit() -> None:
    assert Waits(pause=2).pause == 2.0
    assert Waits(pause=0.25) == Waits.model_validate_json('{"pause": "250ms"}')
    for wrong in (-1, 1e12, float("nan"), float("inf"), True):
        with pytest.raises(ValidationError, match="is not a duration: write a number and a unit"):
            Waits.model_validate({"pause": wrong})
    with pytest.raises(ValidationError, match="2 is not a duration: write a number and a unit"):
        Waits.model_validate_json('{"pause": 2}')
