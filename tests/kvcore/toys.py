"""Toy serdes and storages for the tests of codec and tier: small, real, and some of them bad."""

import asyncio
import threading
import zlib
from collections.abc import Sequence
from typing import Any

from kvcore.api import (
    MISSING,
    STORED,
    BlockingStorage,
    Item,
    LoadOutcome,
    ObjectKey,
    ObjectLayout,
    Serde,
    SerdeError,
    Storage,
    StoreOutcome,
    fill,
)

NBYTES = 8192
LAYOUT = ObjectLayout(2, 1, (NBYTES // 2,), "bfloat16", 2)


def key(i: int) -> ObjectKey:
    return ObjectKey(b"n" * 16, i.to_bytes(32, "little"), 0)


def payload(i: int, nbytes: int = NBYTES) -> memoryview:
    """Bytes that depend on `i` and compress well."""
    return memoryview(bytearray((b"object %d " % i) * nbytes)[:nbytes])


class Toy(Serde):
    """A serde with its tag given."""

    def __init__(self, tag: str = "toy/1") -> None:
        self._tag = tag

    @property
    def tag(self) -> str:
        return self._tag

    def encode(self, source: memoryview, layout: ObjectLayout) -> bytes:
        return bytes(source)

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        into[:] = source

    def max_encoded_bytes(self, nbytes: int) -> int:
        return nbytes


class Mirror(Toy):
    """Lossless, same length: the bytes in reverse."""

    def __init__(self) -> None:
        super().__init__("mirror/1")

    def encode(self, source: memoryview, layout: ObjectLayout) -> bytes:
        return bytes(source[::-1])

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        into[:] = source[::-1]


class Zip(Toy):
    """Lossless, shorter (or, for noise, longer)."""

    def __init__(self, level: int = 1) -> None:
        super().__init__("zip/1")
        self.level = level

    def encode(self, source: memoryview, layout: ObjectLayout) -> bytes:
        return zlib.compress(source, self.level)

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        try:
            data = zlib.decompress(source)
        except zlib.error as error:
            raise SerdeError(str(error)) from error
        if len(data) != len(into):
            raise SerdeError(f"{len(data)} bytes, not {len(into)}")
        into[:] = data

    def max_encoded_bytes(self, nbytes: int) -> int:
        return nbytes + nbytes // 100 + 64


class Pairs(Toy):
    """Lossless for payloads in which every byte stands twice. Decodes in two strided passes over its target."""

    def __init__(self) -> None:
        super().__init__("pairs/1")

    def encode(self, source: memoryview, layout: ObjectLayout) -> bytes:
        return bytes(source[::2])

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        for start in (0, 1):
            for i, byte in enumerate(source):
                into[2 * i + start] = byte


class Halve(Toy):
    """Lossy: keeps the high nibble of each byte; as long as its input, so that it never gains."""

    lossy = True

    def __init__(self) -> None:
        super().__init__("halve/1")

    def encode(self, source: memoryview, layout: ObjectLayout) -> bytes:
        return bytes(b & 0xF0 for b in source)


class Raising(Toy):
    """Raises where it is told to."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__("raising/1")
        self.where = where
        self.error = error

    def encode(self, source: memoryview, layout: ObjectLayout) -> bytes:
        if self.where == "encode":
            raise self.error
        return bytes(source[: len(source) // 2])

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        raise self.error


class DictStorage(BlockingStorage):
    """A dict, whose content tests read and damage; `on_call` runs first in each call and may block or raise."""

    preferred_concurrency = 2

    def __init__(self, on_call: Any = None) -> None:
        self.objects: dict[ObjectKey, bytes] = {}
        self.on_call = on_call
        self.calls: list[str] = []
        self.closed = False

    def begin(self, method: str) -> Any:
        self.calls.append(method)
        return self.on_call(method) if self.on_call else None

    def close(self) -> None:
        self.closed = True

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return self.begin("exists") or [k in self.objects for k in keys]

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        return self.begin("load") or [self.load_one(item) for item in items]

    def load_one(self, item: Item) -> LoadOutcome:
        data = self.objects.get(item.key)
        return MISSING if data is None else fill(item.buffers, data)

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        answer = self.begin("store")
        if answer:
            return answer
        self.objects.update((item.key, b"".join(item.buffers)) for item in items)
        return [STORED] * len(items)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self.begin("delete")
        for k in keys:
            self.objects.pop(k, None)


class AsyncStorage(Storage):
    """The same over asyncio; `on_call` may be awaited."""

    preferred_concurrency = 2

    def __init__(self, on_call: Any = None) -> None:
        self.inner = DictStorage()
        self.objects = self.inner.objects
        self.on_call = on_call
        self.calls: list[str] = []

    async def begin(self, method: str) -> Any:
        self.calls.append(method)
        if self.on_call is None:
            return None
        answer = self.on_call(method)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await self.begin("exists") or self.inner.exists(keys)

    async def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        return await self.begin("load") or self.inner.load(items)

    async def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        return await self.begin("store") or self.inner.store(items)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await self.begin("delete")
        self.inner.delete(keys)


class Gate:
    """Blocks every call of the named methods until it is opened."""

    def __init__(self, *methods: str) -> None:
        self.methods = methods
        self.open = threading.Event()
        self.inside = 0

    def __call__(self, method: str) -> None:
        if method in self.methods:
            self.inside += 1
            self.open.wait(30)
