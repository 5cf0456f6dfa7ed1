"""The storage on Mooncake Store: objects in the memory of many machines, moved straight from and to the arena."""

import os
from collections.abc import Iterator, Sequence

from kvcore.api import (
    STORED,
    BlockingStorage,
    Context,
    Entry,
    Failed,
    Item,
    LoadOutcome,
    ObjectKey,
    StorageError,
    StoreOutcome,
    Usage,
)
from kvcore_mooncake.admin import Admin
from kvcore_mooncake.client import Client
from kvcore_mooncake.config import MooncakeConfig, resolve
from kvcore_mooncake.errors import ALREADY_EXISTS, OK, kind, words
from kvcore_mooncake.load import Loading
from kvcore_mooncake.memory import StagingFull
from kvcore_mooncake.session import Session
from kvcore_mooncake.transfer import Pieces, batches, lay_out, pieces, staged_bytes, to_staging


class MooncakeStorage(BlockingStorage):
    """Objects in a pool that many processes share. What the pool evicts, or loses with a machine, is a miss.

    The library waits by polling, so more calls at once take cores and win little: batches are what makes it fast.
    """

    shared = True
    max_object_bytes = None
    preferred_concurrency = 2
    zero_copy = True
    evicts = True

    def __init__(self, config: MooncakeConfig, context: Context) -> None:
        self._config = config
        self._log = context.log
        self._client: Client | None = None
        self.persistent = config.global_segment_size == 0  # what lies in our own segment goes with this process

    def open(self) -> None:
        if self._client is None:
            config = resolve(self._config, os.environ, self._log.warning)
            self.persistent = config.global_segment_size == 0
            self._client = Client(config, self._log)
        self._client.open()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def register_memory(self, memory: memoryview) -> None:
        self._opened.register(memory)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._opened.session() as session:
            return session.exists(self._names(keys)) if keys else []

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        with self._opened.session() as session:
            return Loading(session, items, self._names([item.key for item in items])).run()

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        """An object that is there already is kept, and counts as stored."""
        outcomes: list[StoreOutcome] = []
        with self._opened.session() as session:
            names = self._names([item.key for item in items])
            parts = [pieces(item.buffers, session.regions) for item in items]
            for batch in batches([staged_bytes(p) for p in parts], session.staging.batch_bytes):
                outcomes += _put(session, [names[i] for i in batch], [parts[i] for i in batch])
        return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """An object that someone is reading goes, too: the reader finds out by the frame's checksum."""
        with self._opened.session() as session:
            if keys:
                session.remove(self._names(keys))

    def ping(self) -> None:
        with self._opened.session() as session:
            session.exists([f"{self._config.key_prefix}ping"])

    @property
    def _opened(self) -> Client:
        if self._client is None:
            raise StorageError("the storage is not open")
        return self._client

    def _names(self, keys: Sequence[ObjectKey]) -> list[str]:
        return [self._config.key_prefix + key.name for key in keys]

    # What only the master's HTTP port can say. `list` comes last: it hides the built-in name.

    def usage(self) -> Usage | None:
        """With `admin_address`, that of the whole pool, others' objects included."""
        return Admin(self._config.admin_address).usage() if self._config.admin_address else None

    def list(self) -> Iterator[Entry]:
        """With `admin_address`, every object under the key prefix."""
        if not self._config.admin_address:
            raise NotImplementedError("Mooncake's library cannot list: set `admin_address`")
        return Admin(self._config.admin_address).entries(self._config.key_prefix)


def _put(session: Session, names: list[str], parts: Sequence[Pieces]) -> list[StoreOutcome]:
    try:
        with session.staging.lend(sum(map(staged_bytes, parts))) as staging:
            layout = lay_out(parts, staging)
            for copies in layout.copies:
                to_staging(copies)
            codes = session.put(names, layout)
    except StagingFull as error:
        return [Failed(str(error), "full")] * len(names)
    return [STORED if code in (OK, ALREADY_EXISTS) else Failed(words(code), kind(code)) for code in codes]
