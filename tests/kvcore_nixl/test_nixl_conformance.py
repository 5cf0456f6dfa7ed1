"""kvcore-nixl passes the conformance suite over NIXL's POSIX backend, with each way to do I/O."""

import os
from pathlib import Path
from typing import Any, ClassVar

from nixl_place import make_nixl

from kvcore.api import ObjectKey
from kvcore.testing import StorageConformance
from kvcore.testing.driver import AnyStorage
from kvcore_nixl.paths import object_path
from kvcore_nixl.storage import NixlStorage


class TestFiles(StorageConformance):
    """Linux AIO with O_DIRECT, NIXL's default."""

    several_instances = True
    options: ClassVar[dict[str, Any]] = {"direct": "on"}
    model_examples = 10

    def make_storage(self, tmp_path: Path) -> NixlStorage:
        return make_nixl(path=str(tmp_path / "objects"), **self.options)

    def raw_read(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> bytes:
        return Path(object_path(str(tmp_path / "objects"), key)).read_bytes()

    def raw_write(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey, data: bytes) -> None:
        path = Path(object_path(str(tmp_path / "objects"), key))
        path.parent.mkdir(parents=True)
        path.write_bytes(data)

    def raw_corrupt(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> None:
        os.truncate(object_path(str(tmp_path / "objects"), key), 1000)


class TestFilesByUring(TestFiles):
    """io_uring."""

    options = {"direct": "on", "params": {"use_uring": True}}
    model_examples = 5


class TestFilesBuffered(TestFiles):
    """Through the page cache."""

    options = {"direct": "off"}
    model_examples = 5
