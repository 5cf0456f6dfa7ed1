"""A real pool: a master and holders. Makes storages over it, and looks at it past them."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvcore.api import Context
from kvcore.testing.driver import Driver
from kvcore.testing.servers.mooncake import MooncakeHolder, MooncakeMaster
from kvcore_mooncake.config import MooncakeConfig
from kvcore_mooncake.storage import MooncakeStorage

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

    def empty(self) -> None:
        """Remove every object of the pool."""
        self.store.remove_all(True)

    def close(self) -> None:
        self.store.close()
