"""Small storages for the tests of the suite: correct ones, blocking and asyncio, and the base of the broken ones."""

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvcore.api import (
    MISSING,
    STORED,
    BlockingStorage,
    Entry,
    Failed,
    Item,
    LoadOutcome,
    ObjectKey,
    Storage,
    StoreOutcome,
    Usage,
    fill,
)


class FileStorage(BlockingStorage):
    """One file per object, written under a temporary name and renamed."""

    persistent = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: ObjectKey) -> Path:
        return self.root / key.name

    def open(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [self.path(key).exists() for key in keys]

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        return [self.load_one(item) for item in items]

    def load_one(self, item: Item) -> LoadOutcome:
        try:
            return fill(item.buffers, self.path(item.key).read_bytes())
        except FileNotFoundError:
            return MISSING

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        return [self.store_one(item) for item in items]

    def store_one(self, item: Item) -> StoreOutcome:
        final = self.path(item.key)
        temporary = final.with_name(f".{os.getpid()}-{threading.get_ident()}-{id(item)}.tmp")
        try:
            with temporary.open("wb") as file:
                file.writelines(item.buffers)
            temporary.rename(final)
        except (OSError, ValueError) as error:
            temporary.unlink(missing_ok=True)
            return Failed(str(error))
        return STORED

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self.path(key).unlink(missing_ok=True)

    def list(self) -> Sequence[Entry]:
        found = []
        for path in self.root.iterdir():
            if not path.name.startswith("."):
                try:
                    found.append(Entry(ObjectKey.from_name(path.name), path.stat().st_size))
                except FileNotFoundError:
                    continue
        return found

    def usage(self) -> Usage | None:
        entries = self.list()
        return Usage(sum(entry.nbytes for entry in entries), len(entries))


class AsyncStorage(Storage):
    """A dict that lets other tasks run between any two steps, and copies in one go without an await."""

    zero_copy = True
    shared = True
    places: dict[str, dict[ObjectKey, bytes]] = {}

    def __init__(self, place: str) -> None:
        self.objects = self.places.setdefault(place, {})

    async def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        await asyncio.sleep(0)
        return [key in self.objects for key in keys]

    async def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        outcomes: list[LoadOutcome] = []
        for item in items:
            await asyncio.sleep(0)
            data = self.objects.get(item.key)
            outcomes.append(MISSING if data is None else fill(item.buffers, data))
        return outcomes

    async def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        for item in items:
            await asyncio.sleep(0)
            self.objects[item.key] = b"".join(item.buffers)
        return [STORED] * len(items)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            await asyncio.sleep(0)
            self.objects.pop(key, None)
