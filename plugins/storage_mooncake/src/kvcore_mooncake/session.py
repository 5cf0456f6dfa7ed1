"""Calls to a client that is set up, with every answer checked, and the memory registered with it."""

import time
from collections.abc import Callable
from typing import Any

from kvcore.api import StorageError, format_size
from kvcore.api.buffers import address_of
from kvcore_mooncake.errors import MASTER_SILENT, NOT_FOUND, OK, TRANSFER_FAILED, words
from kvcore_mooncake.library import Store
from kvcore_mooncake.memory import Region, Staging
from kvcore_mooncake.transfer import Layout

GIVEN_UP_S, SETTLE_S = 55.0, 300.0
"""The library gives a transfer up after 60 s, and it may then still write: such a call is held back."""


class Session:
    """One client of `mooncake.store` that is set up. Thread-safe.

    Args:
        saw: is told after each call whether the master answered.
    """

    def __init__(self, store: Store, put_config: Any, staging_bytes: int, saw: Callable[[bool], None]) -> None:
        self.store = store
        self.regions: list[Region] = []
        self.staging = Staging(self._register, self._unregister, staging_bytes)
        self._put_config = put_config
        self._saw = saw

    def add_region(self, memory: memoryview) -> str | None:
        """Register memory to transfer from and to; why not, when Mooncake refuses."""
        start = address_of(memory)
        code = self.store.register_buffer(start, len(memory))
        if code != OK:
            return words(code)
        self.regions = [*self.regions, Region(start, start + len(memory))]
        return None

    def exists(self, names: list[str]) -> list[bool]:
        """Which objects the pool has. Raises `StorageError` when the master does not answer."""
        return [code == 1 for code in self._ask(self.store.batch_is_exist, names)]

    def remove(self, names: list[str]) -> None:
        """Remove objects, leased ones too. Raises `StorageError` when the master does not answer."""
        self._ask(self.store.batch_remove, names, True)

    def sizes(self, names: list[str]) -> list[int]:
        """The size of each object in bytes, or an error code."""
        codes = self._codes(self.store.batch_is_exist, names)
        there = [name for name, code in zip(names, codes, strict=True) if code == 1]
        found = self.store.batch_get_replica_desc(there) if there else {}  # it complains loudly of those that are not
        answers: list[int] = []
        for name, code in zip(names, codes, strict=True):
            answer = NOT_FOUND if code == 0 else code
            if code == 1:  # once the master is silent, the others are not worth the wait
                silent = bool(answers) and answers[-1] in MASTER_SILENT
                answer = answers[-1] if silent else self._size(name, found)
            answers.append(answer)
        self._saw(not any(answer in MASTER_SILENT for answer in answers))
        return answers

    def put(self, names: list[str], layout: Layout) -> list[int]:
        """Store objects from registered memory; a code each."""
        return self._transfer(self.store.batch_put_from_multi_buffers, names, layout, self._put_config)

    def get(self, names: list[str], layout: Layout) -> list[int]:
        """Load objects, whose sizes `layout` must match, into registered memory; the size or a code each."""
        return self._transfer(self.store.batch_get_into_multi_buffers, names, layout)

    def _size(self, name: str, found: dict[str, list[Any]]) -> int:
        for replica in found.get(name, ()):
            if replica.is_memory_replica():
                return int(replica.get_memory_descriptor().buffer_descriptor.size)
        return self.store.get_size(name)

    def _ask(self, question: Callable[..., list[int]], names: list[str], *more: Any) -> list[int]:
        codes = self._codes(question, names, *more)
        for code in codes:
            if code in MASTER_SILENT:
                raise StorageError(words(code))
        return codes

    def _codes(self, question: Callable[..., list[int]], names: list[str], *more: Any) -> list[int]:
        codes = question(names, *more)
        if len(codes) != len(names):  # so it says that the whole call was wrong
            raise StorageError(f"Mooncake gave {len(codes)} answers for {len(names)} objects")
        self._saw(not any(code in MASTER_SILENT for code in codes))
        return codes

    def _transfer(self, transfer: Callable[..., list[int]], names: list[str], layout: Layout, *more: Any) -> list[int]:
        begun = time.monotonic()
        codes = self._codes(transfer, names, layout.pointers, layout.sizes, *more)
        if TRANSFER_FAILED in codes and time.monotonic() - begun > GIVEN_UP_S:
            time.sleep(SETTLE_S)  # whoever waited has given up; the buffers stay taken as long as this call lasts
        return codes

    def _register(self, address: int, nbytes: int) -> None:
        code = self.store.register_buffer(address, nbytes)
        if code != OK:
            raise StorageError(f"{format_size(nbytes)} of staging memory cannot be registered: {words(code)}")

    def _unregister(self, address: int) -> None:
        self.store.unregister_buffer(address)
