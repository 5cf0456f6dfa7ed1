"""Which objects are there, in few round trips.

A HEAD costs the client a millisecond of its interpreter and the user a tenth of what a listing costs; one listing
answers for a thousand objects. The names of a namespace cannot be narrowed down, because hashes lie all over it. So
many keys of a namespace that fits on one page cost one listing; for a larger namespace, which is remembered for a
while, and for few keys, there is a HEAD for each, several at once.
"""

import time
from collections.abc import Sequence
from typing import Any

from kvcore.api import ObjectKey
from kvcore_s3.call import Call
from kvcore_s3.faults import Fault
from kvcore_s3.names import Names
from kvcore_s3.wire import Wire
from kvcore_s3.workers import Workers

PAGE = 1000
"""S3's limit of names per page."""
LIST_FROM = 32
"""So many keys are worth a listing: that is what a page costs in time of the client's interpreter."""
LARGE_S = 600.0
"""How long a namespace is taken to be larger than a page once it was."""


class Presence:
    """Asks one bucket."""

    def __init__(self, client: Any, wire: Wire, bucket: str, names: Names, workers: Workers) -> None:
        self._client = client
        self._wire = wire
        self._bucket = bucket
        self._names = names
        self._workers = workers
        self._large_until: dict[bytes, float] = {}

    def exists(self, call: Call, keys: Sequence[ObjectKey]) -> list[bool]:
        """Whether each object is there. Raises `Fault`."""
        found: dict[ObjectKey, bool] = {}
        by_namespace: dict[bytes, list[ObjectKey]] = {}
        for key in keys:
            by_namespace.setdefault(key.namespace, []).append(key)
        for namespace, group in by_namespace.items():
            if len(group) >= LIST_FROM and self._large_until.get(namespace, 0.0) < time.monotonic():
                found.update(self._listed(call, namespace, group))
        rest = [key for key in keys if key not in found]
        found.update(zip(rest, self._workers.run(lambda key: self._head(call, key), rest), strict=True))
        return [found[key] for key in keys]

    def _listed(self, call: Call, namespace: bytes, keys: Sequence[ObjectKey]) -> dict[ObjectKey, bool]:
        """What one page says: all that is there, and, when it is the only one, what is not."""
        folder = self._names.folder(namespace)
        page = call.ask(self._client.list_objects_v2, Bucket=self._bucket, Prefix=folder, MaxKeys=PAGE)
        there = {entry["Key"] for entry in page.get("Contents", ())}
        if page.get("IsTruncated"):
            self._large_until[namespace] = time.monotonic() + LARGE_S
            return {key: True for key in keys if self._names.name(key) in there}
        return {key: self._names.name(key) in there for key in keys}

    def _head(self, call: Call, key: ObjectKey) -> bool:
        name = self._names.name(key)
        try:
            call.attempt(lambda: self._wire.send(call, "HEAD", name), name)
        except Fault as fault:
            if fault.missing:
                return False
            raise
        return True
