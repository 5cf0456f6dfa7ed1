"""kvcore-disk passes the conformance suite, with every optional access that the suite can use."""

import os
from pathlib import Path
from typing import Any, ClassVar

from disk_place import held_bytes, make_disk

from kvcore.api import ObjectKey
from kvcore.testing import StorageConformance
from kvcore.testing.driver import AnyStorage
from kvcore_disk.paths import object_path
from kvcore_disk.storage import DiskStorage


class TestDiskConformance(StorageConformance):
    several_instances = True
    options: ClassVar[dict[str, Any]] = {}

    def make_storage(self, tmp_path: Path) -> DiskStorage:
        return make_disk(tmp_path / "objects", **self.options)

    def make_bounded(self, tmp_path: Path, capacity_bytes: int) -> DiskStorage:
        return make_disk(tmp_path / "objects", f"{capacity_bytes}B", **self.options)

    def raw_read(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> bytes:
        return Path(object_path(str(tmp_path / "objects"), key)).read_bytes()

    def raw_write(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey, data: bytes) -> None:
        path = Path(object_path(str(tmp_path / "objects"), key))
        path.parent.mkdir(parents=True)
        path.write_bytes(data)

    def raw_corrupt(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> None:
        os.truncate(object_path(str(tmp_path / "objects"), key), 1000)

    def raw_bytes(self, storage: AnyStorage, tmp_path: Path) -> int:
        return held_bytes(tmp_path / "objects")


class TestBuffered(TestDiskConformance):
    """Through the page cache."""

    options = {"direct": "off"}


class TestSafest(TestDiskConformance):
    """Each object through to the device, O_DIRECT insisted on, and another policy."""

    options = {"direct": "on", "fsync": True, "eviction": "s3fifo"}
    model_examples = 5
