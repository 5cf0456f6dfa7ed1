"""A real pool: a master and holders. Makes storages over it, moves objects, and looks at it past them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvcore.api import Context, Failed, Item, Loaded, Missing, ObjectKey
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, source
from kvcore.testing.servers import Server
from kvcore.testing.servers.mooncake import MooncakeHolder, MooncakeMaster
from kvcore_mooncake.config import MooncakeConfig
from kvcore_mooncake.storage import MooncakeStorage
from moved import eventually

MIB = 1 << 20


def make_storage(master: str, **options: Any) -> MooncakeStorage:
    """An unopened storage over the pool of a master."""
    return MooncakeStorage(MooncakeConfig.model_validate({"master_server_address": master, **options}), Context())


class Pool:
    """A master and holders of `nbytes` each. A context manager."""

    def __init__(self, folder: Path, nbytes: int, holders: int = 1, **options: Any) -> None:
        self.master = MooncakeMaster(folder, **options)
        self.holders = [
            MooncakeHolder(folder, self.master.address, nbytes, f"mooncake-holder-{i}") for i in range(holders)
        ]

    def __enter__(self) -> Self:
        self.master.start()
        for holder in self.holders:
            holder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (*self.holders, self.master):
            server.kill()

    def storage(self, **options: Any) -> MooncakeStorage:
        """An unopened storage over the pool."""
        return make_storage(self.master.address, **options)

    def driver(self, **options: Any) -> Driver:
        """A driver over such a storage: opens at `with`."""
        return Driver(self.storage(**options))


def names(driver: Driver, keys: Sequence[ObjectKey]) -> list[str]:
    """The keys' names in the pool."""
    assert isinstance(driver.storage, MooncakeStorage)
    return driver.storage._names(keys)


def body(key: ObjectKey, nbytes: int = 100_000) -> bytes:
    """What is stored under a key."""
    return content(key, nbytes)


def put(driver: Driver, keys: Sequence[ObjectKey], nbytes: int = 100_000) -> list[str]:
    """Store an object each; what became of it: `stored`, or the kind of its failure."""
    items = [source(key, body(key, nbytes), (4096,)) for key in keys]
    return [outcome.kind if isinstance(outcome, Failed) else "stored" for outcome in driver.store(items)]


def get(driver: Driver, keys: Sequence[ObjectKey], nbytes: int = 100_000) -> list[str]:
    """Load an object each, which must be whole: `ok`, `missing`, or the kind of its failure."""
    rooms = [Room(nbytes, (4096,)) for _ in keys]
    outcomes = driver.load([Item(key, room.buffers) for key, room in zip(keys, rooms, strict=True)])
    for key, room, outcome in zip(keys, rooms, outcomes, strict=True):
        assert not isinstance(outcome, Loaded) or bytes(room.view) == body(key, nbytes), "a changed object was loaded"
    return [
        outcome.kind if isinstance(outcome, Failed) else "missing" if isinstance(outcome, Missing) else "ok"
        for outcome in outcomes
    ]


def freeze(server: Server) -> None:
    """SIGSTOP, and wait until every thread has stopped."""
    server.freeze()
    tasks = Path(f"/proc/{server.pid}/task")
    eventually(lambda: all(f.read_text().rpartition(")")[2].split()[0] == "T" for f in tasks.glob("*/stat")))


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """The body must not take longer. Give several times of what it takes."""
    begun = time.monotonic()
    yield
    took_s = time.monotonic() - begun
    assert took_s < limit_s, f"took {took_s:.1f} s, allowed are {limit_s:g} s"


class RawClient:
    """Mooncake's own client, for looking at the pool past the storage."""

    def __init__(self, pool: Pool) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 * MIB, "tcp", "", pool.master.address)
        assert code == 0, f"the raw client cannot be set up: {code}"

    def get(self, name: str) -> bytes:
        """The object's bytes; empty when there is none."""
        data: bytes = self.store.get(name)
        return data

    def put(self, name: str, data: bytes) -> None:
        """Put an object, over one that is there."""
        self.store.remove(name, True)
        assert self.store.put(name, data) == 0

    def places(self, name: str) -> list[str]:
        """Where the copies of an object lie, as the `HOST:PORT` of transfers."""
        found = self.store.get_replica_desc(name)
        return [str(d.get_memory_descriptor().buffer_descriptor.transport_endpoint) for d in found]

    def empty(self) -> None:
        """Remove every object of the pool."""
        self.store.remove_all(True)

    def close(self) -> None:
        self.store.close()
