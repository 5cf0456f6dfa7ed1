"""The S3 storage: one object of the bucket per object of the cache."""

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kvcore.api import (
    STORED,
    BlockingStorage,
    Context,
    Entry,
    Item,
    LoadOutcome,
    ObjectKey,
    StorageError,
    StoreOutcome,
)
from kvcore_s3.call import Call, Limits
from kvcore_s3.client import DEFAULT_REGION, connect
from kvcore_s3.config import MAX_PARTS, S3Config
from kvcore_s3.faults import Fault
from kvcore_s3.names import Names
from kvcore_s3.objects import Objects
from kvcore_s3.presence import PAGE, Presence
from kvcore_s3.uploads import Uploads
from kvcore_s3.workers import Workers

_MAX_OBJECT_BYTES = 5 << 40  # S3's own limit


class _Connection:
    """What is there between `open` and `close`."""

    def __init__(self, config: S3Config, names: Names, log: logging.Logger) -> None:
        self.client, self._wire = connect(config)
        self.workers = Workers("kvcore-s3", config.concurrency)
        self.uploads = Uploads(self.client, config.bucket, names, log)
        self.presence = Presence(self.client, self._wire, config.bucket, names, self.workers)
        self.objects = Objects(
            self.client,
            self._wire,
            config.bucket,
            self.workers,
            self.uploads,
            part_bytes=config.part_size,
            encryption=_encryption(config),
        )
        self._limits = Limits(
            f"s3://{config.bucket}/{{}} at {self.client.meta.endpoint_url}",
            config.deadline,
            config.connect_timeout,
            config.read_timeout,
            threading.Semaphore(config.concurrency),
        )
        self.seen = False
        """The bucket has answered."""

    def call(self) -> Call:
        """A call that begins now."""
        return Call(self._limits)

    def place(self, name: str) -> str:
        """An object of this name, for people."""
        return self._limits.place.format(name)

    def close(self) -> None:
        """Let threads and connections end, each after what it is doing."""
        self.workers.close()
        self.uploads.abort()
        self._wire.close()
        self.client.close()


class S3Storage(BlockingStorage):
    """Objects in a bucket, below a prefix. Any number of processes and machines may use one."""

    persistent = True
    shared = True
    preferred_concurrency = 16

    def __init__(self, config: S3Config, context: Context) -> None:
        self._config = config
        self._log = context.log
        self._passive = context.passive
        self._names = Names(config.prefix)
        self._connection: _Connection | None = None
        self.preferred_concurrency = config.concurrency
        self.max_object_bytes = min(MAX_PARTS * config.part_size, _MAX_OBJECT_BYTES)

    # -- the storage interface ---------------------------------------------------------------------------------------

    def open(self) -> None:
        self._connection = connection = _Connection(self._config, self._names, self._log)
        try:
            self._see(connection)
        except Fault as fault:
            if not fault.passing:
                raise StorageError(fault.reason) from None
            self._log.warning("%s; it is used as soon as it answers", fault.reason)
            return
        if not self._passive:
            connection.uploads.abort_leftovers()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        connection = self._connected()
        try:
            return connection.presence.exists(connection.call(), keys)
        except Fault as fault:
            raise StorageError(fault.reason) from None

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        connection = self._connected()
        call, objects, names = connection.call(), connection.objects, self._names
        return connection.workers.run(lambda item: objects.get(call, names.name(item.key), item.buffers), items)

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        connection = self._connected()
        if not connection.seen:
            self._see_or_fail(connection)
        call = connection.call()

        def put(item: Item) -> StoreOutcome:
            try:
                connection.objects.put(call, self._names.name(item.key), item.buffers)
            except Fault as fault:
                return fault.outcome
            return STORED

        outcomes = connection.workers.run(put, items)
        if connection.uploads.pending and STORED in outcomes:
            connection.workers.begin(connection.uploads.abort)
        return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        connection = self._connected()
        call, names = connection.call(), [self._names.name(key) for key in keys]
        refused: list[dict[str, str]] = []
        try:
            for at in range(0, len(names), PAGE):
                refused += self._delete(connection, call, names[at : at + PAGE])
        except Fault as fault:
            raise StorageError(fault.reason) from None
        if refused:
            first = refused[0]
            raise StorageError(
                f"{connection.place(first.get('Key', ''))}: DeleteObjects: {first.get('Code')} "
                f"({first.get('Message')}); {len(refused)} of {len(names)} objects were not deleted: these credentials "
                "need s3:DeleteObject"
            )

    def ping(self) -> None:
        self._see_or_fail(self._connected())

    # -- requests ----------------------------------------------------------------------------------------------------

    def _connected(self) -> _Connection:
        if self._connection is None:
            raise StorageError(f"s3://{self._config.bucket} is closed")
        return self._connection

    def _see(self, connection: _Connection) -> None:
        """Ask the bucket for a name, which proves the endpoint, the keys, the bucket and the right to list it."""
        bucket, client = self._config.bucket, connection.client
        try:
            page = connection.call().ask(client.list_objects_v2, Bucket=bucket, Prefix=self._names.root, MaxKeys=1)
            region = page["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
            if self._config.endpoint is None and region not in (None, client.meta.region_name):
                text = f"{connection.place('')}: the bucket is in another region than {client.meta.region_name}"
                raise Fault(f"{text}: set `region: {region}`", code="PermanentRedirect")
        except Fault as fault:
            if fault.code != "NoSuchBucket" or not self._config.create_bucket or self._passive:
                raise
            self._create_bucket(connection)
        connection.seen = True

    def _see_or_fail(self, connection: _Connection) -> None:
        try:
            self._see(connection)
        except Fault as fault:
            raise StorageError(fault.reason) from None

    def _create_bucket(self, connection: _Connection) -> None:
        where: dict[str, Any] = {"Bucket": self._config.bucket}
        region = connection.client.meta.region_name
        if self._config.endpoint is None and region != DEFAULT_REGION:
            where["CreateBucketConfiguration"] = {"LocationConstraint": region}
        try:
            connection.call().ask(connection.client.create_bucket, **where)
        except Fault as fault:
            if fault.code != "BucketAlreadyOwnedByYou":  # by another process, at the same time
                raise
        else:
            self._log.info("made the bucket %s", self._config.bucket)

    def _delete(self, connection: _Connection, call: Call, names: Sequence[str]) -> Sequence[dict[str, str]]:
        """Delete up to a page of objects; what the server says of those that it did not delete."""
        what = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        answer = call.ask(connection.client.delete_objects, Bucket=self._config.bucket, Delete=what)
        errors: Sequence[dict[str, str]] = answer.get("Errors", ())
        return errors

    def _page(self, connection: _Connection, more: dict[str, str]) -> Any:
        """A page of names. Each has a deadline of its own."""
        where = {"Bucket": self._config.bucket, "Prefix": self._names.root, **more}
        try:
            return connection.call().ask(connection.client.list_objects_v2, **where, MaxKeys=PAGE)
        except Fault as fault:
            raise StorageError(fault.reason) from None

    def list(self) -> Iterator[Entry]:  # the last method, because it hides the builtin from those below
        connection = self._connected()
        more: dict[str, str] = {}
        while True:
            page = self._page(connection, more)
            for entry in page.get("Contents", ()):
                key = self._names.key(entry["Key"])
                if key is not None:
                    yield Entry(key, int(entry["Size"]))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}


def _encryption(config: S3Config) -> dict[str, str]:
    """What goes with each upload."""
    if config.encryption == "none":
        return {}
    if config.encryption == "sse-s3":
        return {"ServerSideEncryption": "AES256"}
    key = {"SSEKMSKeyId": config.kms_key_id} if config.kms_key_id else {}
    return {"ServerSideEncryption": "aws:kms", **key}
