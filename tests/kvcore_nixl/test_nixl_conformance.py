"""kvcore-nixl passes the conformance suite: files by each way to do I/O, and a bucket of a real S3 gateway.

The suite makes storages in child processes too, which find the gateway by what stands in the environment.
"""

import os
from pathlib import Path
from typing import Any, ClassVar

import boto3
import pytest
from nixl_place import make_nixl

from kvcore.api import ObjectKey
from kvcore.testing import StorageConformance
from kvcore.testing.driver import AnyStorage
from kvcore.testing.servers.s3 import JuiceFS
from kvcore_nixl import agent
from kvcore_nixl.objects import HEAD, MARK_BYTES, SUFFIX
from kvcore_nixl.paths import object_path
from kvcore_nixl.storage import NixlStorage


class TestFiles(StorageConformance):
    """Linux AIO with O_DIRECT, NIXL's default."""

    several_instances = True
    options: ClassVar[dict[str, Any]] = {"direct": "on"}
    model_examples = 8

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
    model_examples = 3


class TestFilesBuffered(TestFiles):
    """Through the page cache."""

    options = {"direct": "off"}
    model_examples = 3


class TestFilesAsGdsWouldHaveThem(TestFiles):
    """What this package does for GDS, but over NIXL's POSIX backend: one agent for all calls, and only the arena is
    moved from and to in place. It shows nothing about cuFile."""

    @pytest.fixture(autouse=True)
    def _as_gds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gds = agent.BACKENDS["gds"]._replace(plugin="POSIX")
        monkeypatch.setitem(agent.BACKENDS, "posix", gds)


class TestBucket(StorageConformance):
    """NIXL's OBJ backend."""

    model_examples = 3
    model_steps = 20

    @pytest.fixture(autouse=True)
    def _place(self, gateway: JuiceFS, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVCORE_TEST_S3_ENDPOINT", gateway.endpoint)

    def make_storage(self, tmp_path: Path) -> NixlStorage:
        return make_nixl(
            backend="obj",
            bucket="kvcore-test",
            endpoint=os.environ["KVCORE_TEST_S3_ENDPOINT"],
            prefix=self.prefix(tmp_path),
        )

    def raw_read(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> bytes:
        body = self.client().get_object(Bucket="kvcore-test", Key=self.name(tmp_path, key))["Body"].read()
        assert isinstance(body, bytes)
        return body[HEAD.size : -MARK_BYTES]

    def raw_write(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey, data: bytes) -> None:
        mark = bytes(MARK_BYTES)
        body = HEAD.pack(b"KVNIXL1\n", len(data), mark) + data + mark
        self.client().put_object(Bucket="kvcore-test", Key=self.name(tmp_path, key), Body=body)

    def raw_corrupt(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> None:
        body = self.client().get_object(Bucket="kvcore-test", Key=self.name(tmp_path, key))["Body"].read()
        self.client().put_object(Bucket="kvcore-test", Key=self.name(tmp_path, key), Body=body[:1000])

    def name(self, tmp_path: Path, key: ObjectKey) -> str:
        return f"{self.prefix(tmp_path)}{key.name}{SUFFIX}"

    def prefix(self, tmp_path: Path) -> str:
        return f"{tmp_path.as_posix().strip('/').replace('[', '-').replace(']', '-')}/"

    def client(self) -> Any:
        """Past the storage."""
        return boto3.client("s3", endpoint_url=os.environ["KVCORE_TEST_S3_ENDPOINT"], region_name="us-east-1")
