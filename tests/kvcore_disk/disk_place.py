"""Makes disk storages for the tests, and looks at their directories past them."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcore.api import Context
from kvcore.plugins import PluginSpec, Registry
from kvcore.testing.driver import Driver
from kvcore_disk.config import DiskConfig
from kvcore_disk.paths import occupied
from kvcore_disk.storage import DiskStorage

CONTROL = ".kvcore"


def make_disk(root: Path, capacity: str = "64MiB", **options: Any) -> DiskStorage:
    """An unopened storage over `root`."""
    registry = Registry()
    config = DiskConfig.model_validate({"path": str(root), "capacity": capacity, **options})
    return DiskStorage(
        config, Context(make_eviction=lambda name: registry.create("eviction", PluginSpec(name, {}, "test")))
    )


def opened(root: Path, capacity: str = "64MiB", **options: Any) -> Driver:
    """A driver over it: opens at `with`."""
    return Driver(make_disk(root, capacity, **options))


@contextlib.contextmanager
def account_locked(root: Path) -> Iterator[int]:
    """Nobody stores, evicts or publishes meanwhile; yields the count of the shared account. Bytes still flow."""
    with open(root / CONTROL / "account", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield int.from_bytes(file.read(8), "little")


def set_account(root: Path, nbytes: int, objects: int = 0) -> None:
    """Write a count that is believed."""
    flipped = (1 << 64) - 1
    numbers = (nbytes, objects, nbytes ^ flipped, objects ^ flipped)
    (root / CONTROL / "account").write_bytes(b"".join(n.to_bytes(8, "little") for n in numbers))


def files(root: Path) -> dict[str, int]:
    """Every file below `root` but the account's own, with the bytes that it takes."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = f"{folder}/{name}"
            if path.startswith(f"{root}/{CONTROL}/") and not path.startswith(f"{root}/{CONTROL}/writing/"):
                continue
            try:
                status = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:  # an unfinished write that was cleaned up since
                continue
            found[path] = max(occupied(status.st_size), status.st_blocks * 512)
    return found


def held_bytes(root: Path) -> int:
    """Bytes of all objects and unfinished writes, at one moment."""
    with account_locked(root):
        return sum(files(root).values())


def unfinished(root: Path) -> list[str]:
    """Unfinished writes; none where nobody has come to open it."""
    folder = root / CONTROL / "writing"
    return os.listdir(folder) if folder.is_dir() else []
