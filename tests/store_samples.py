"""Stores for the tests of `kvcore store` and `kvcore bench l2`: filled through a storage, looked at past it."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvcore.api import STORED, Item, ObjectKey
from kvcore.l2 import HEADER_BYTES, frame
from kvcore.l2.frame import Stage
from kvcore.plugins import PluginSpec, Registry

ONE, TWO = b"\x01" * 16, b"\x02" * 16


def key_of(number: int, namespace: bytes = ONE) -> ObjectKey:
    return ObjectKey(namespace, hashlib.sha256(b"object %d" % number).digest())


def frame_of(key: ObjectKey, nbytes: int = 8192, stages: Sequence[Stage] = ()) -> tuple[memoryview, memoryview]:
    """Header and payload of an object whose bytes follow from its key."""
    payload = memoryview(hashlib.sha256(key.chunk_hash).digest() * (nbytes // 32))
    header = memoryview(bytearray(HEADER_BYTES))
    frame.pack(key, len(payload), stages, frame.checksum(payload), header)
    return header, payload


def disk(path: Path, capacity: str = "1GiB") -> Any:
    """An open disk storage."""
    options = {"path": str(path), "capacity": capacity}
    storage = Registry().create("storage", PluginSpec("disk", options, "test"))
    storage.open()
    return storage


def put(storage: Any, numbers: Iterable[int], namespace: bytes = ONE, nbytes: int = 8192) -> None:
    items = [Item(key, frame_of(key, nbytes)) for key in (key_of(i, namespace) for i in numbers)]
    assert storage.store(items) == [STORED] * len(items)


def fill(path: Path, numbers: Iterable[int], namespace: bytes = ONE, nbytes: int = 8192) -> None:
    """Put objects into a store on disk."""
    storage = disk(path)
    put(storage, numbers, namespace, nbytes)
    storage.close()


def place(path: Path, key: ObjectKey) -> Path:
    """The file of an object, wherever the storage has put it."""
    (found,) = path.rglob(key.name)
    return found


def contents(path: Path) -> dict[str, bytes]:
    """Every object of a store on disk, past the storage."""
    return {file.name: file.read_bytes() for file in path.glob("?/?/*")}


def kvcore(*words: str, cwd: Path, timeout_s: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kvcore", *words],
        cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False,
        env={**clean_env(), "KVCORE_RUN_DIR": str(cwd / "run")}, **options,
    )  # fmt: skip


def clean_env() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("KVCORE_")}
