"""Mooncake's client library: found, loaded with its own deadlines set, and what is used of it."""

import importlib
import math
import os
from collections.abc import Sequence
from typing import Any, Protocol

from kvcore.api import StorageError
from kvcore_mooncake.config import MooncakeConfig

_REMEDY = (
    "install the build for your engine, `pip install mooncake-transfer-engine` (with CUDA) or `pip install "
    "mooncake-transfer-engine-non-cuda` (without), 0.3.13 or newer"
)


class Store(Protocol):
    """What is used of `mooncake.store.MooncakeDistributedStore`. Codes below 0 are errors (`errors.py`)."""

    def setup(self, *args: Any) -> int: ...
    def close(self) -> int: ...
    def register_buffer(self, address: int, nbytes: int) -> int: ...
    def unregister_buffer(self, address: int) -> int: ...
    def get_size(self, name: str) -> int: ...
    def batch_is_exist(self, names: Sequence[str]) -> list[int]: ...
    def batch_get_replica_desc(self, names: Sequence[str]) -> dict[str, list[Any]]: ...
    def batch_put_from_multi_buffers(
        self, names: Sequence[str], pointers: list[list[int]], sizes: list[list[int]], config: Any
    ) -> list[int]: ...
    def batch_get_into_multi_buffers(
        self, names: Sequence[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...
    def batch_remove(self, names: Sequence[str], force: bool) -> list[int]: ...


_USED = [name for name in vars(Store) if not name.startswith("_")]


def load_library(config: MooncakeConfig) -> Any:
    """The module `mooncake.store`. Raises `StorageError` when it is missing, broken or too old."""
    stall_s = str(math.ceil(config.transfer_timeout))
    for name, value in {
        "MC_TCP_STATUS_TIMEOUT_SEC": stall_s,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": stall_s,
        "MC_RPC_TIMEOUT_MS": str(math.ceil(1000 * config.rpc_timeout)),
        "MC_STORE_CLIENT_SETUP_RETRIES": "3",
        "MC_LOG_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)  # the user's own setting wins
    try:
        library = importlib.import_module("mooncake.store")
    except ImportError as error:
        system = "and the system's libibverbs (Debian, Ubuntu: libibverbs1)"
        raise StorageError(f"Mooncake's client library cannot be loaded ({error}): {_REMEDY}, {system}") from error
    missing = [name for name in _USED if not hasattr(library.MooncakeDistributedStore, name)]
    if missing:
        raise StorageError(f"Mooncake's client library is too old, it has no {', '.join(missing)}: {_REMEDY}")
    return library


def put_config(library: Any, config: MooncakeConfig) -> Any:
    """How objects are placed: a `ReplicateConfig`."""
    put = library.ReplicateConfig()
    put.replica_num = config.replica_num
    put.preferred_segment = config.preferred_segment
    if config.pin == "soft":
        put.soft_pin_action = library.SoftPinAction.ENABLE
    put.with_hard_pin = config.pin == "hard"
    return put
