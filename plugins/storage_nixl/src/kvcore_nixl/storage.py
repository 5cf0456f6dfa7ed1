"""The storage through NIXL: files or a bucket, in batches that fit the memory they are copied through."""

from collections.abc import Iterator, Sequence

from kvcore.api import BlockingStorage, Context, Entry, Item, LoadOutcome, ObjectKey, StoreOutcome, Usage
from kvcore_nixl.agent import BACKENDS
from kvcore_nixl.config import NixlConfig
from kvcore_nixl.files import Files
from kvcore_nixl.objects import ENVELOPE_BYTES, Objects

ROUND_BYTES = 64 << 20
"""The most that one call has in flight, unless a single object is larger; and so the most that it copies through."""
_MAX_PUT_BYTES = 5 << 30  # of S3, for one request


class NixlStorage(BlockingStorage):
    """Objects in files (NIXL's POSIX and GDS backends) or in a bucket (OBJ)."""

    persistent = True
    shared = False
    max_object_bytes: int | None = None
    preferred_concurrency = 4
    zero_copy = True

    def __init__(self, config: NixlConfig, context: Context) -> None:
        self._backend = BACKENDS[config.backend]
        self._name = config.backend
        self._log = context.log
        self._place: Files | Objects
        if config.backend == "obj":
            self._place = Objects(config, context)
            self.shared = True  # a bucket is; a directory may be, and nobody knows
            self.zero_copy = False  # see `objects`
            self.max_object_bytes = _MAX_PUT_BYTES - ENVELOPE_BYTES
        else:
            self._place = Files(config, context)

    def open(self) -> None:
        if not self._backend.tested:
            self._log.warning(
                "backend %s of kvcore-nixl has never been run by its tests: check it with `kvcore doctor FILE` first",
                self._name,
            )
        self._place.open()

    def close(self) -> None:
        self._place.close()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return self._place.exists(keys)

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        return [o for some in _rounds(items, self._backend.jobs) for o in self._place.load(some)]

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        return [o for some in _rounds(items, self._backend.jobs) for o in self._place.store(some)]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self._place.delete(keys)

    def list(self) -> Iterator[Entry]:
        return self._place.entries()

    def usage(self) -> Usage | None:
        return self._place.usage()

    def ping(self) -> None:
        self._place.ping()

    def register_memory(self, memory: memoryview) -> None:
        self._place.register_memory(memory)


def _rounds(items: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    """`items` in runs of at most `most` and of at most `ROUND_BYTES`."""
    first = 0
    while first < len(items):
        last, nbytes = first + 1, items[first].nbytes
        while last < min(len(items), first + most) and nbytes + items[last].nbytes <= ROUND_BYTES:
            nbytes += items[last].nbytes
            last += 1
        yield items[first:last]
        first = last
