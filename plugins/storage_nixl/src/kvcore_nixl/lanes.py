"""Lanes: what one call needs of NIXL, namely an agent and registered memory of its own to copy through."""

import contextlib
import logging
import mmap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvcore.api import StorageError
from kvcore_nixl.agent import Agent, Backend
from kvcore_nixl.library import load_nixl

_STEP = 1 << 20


class Lane:
    """Used by one call at a time."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._memory: Any = np.empty(0, np.uint8)
        self._token: Any = None
        self._arena = (0, 0)

    def stage(self, nbytes: int) -> Any:
        """Registered, page-aligned memory of `nbytes` as an array; what it holds is left over from earlier calls."""
        if len(self._memory) < nbytes:
            if self._token is not None:
                self.agent.forget(self._token)
            self._memory, self._token = self._memory[:0], None
            # A mapping, not an array of numpy's own: it must lie on a page.
            memory = np.frombuffer(mmap.mmap(-1, -(-nbytes // _STEP) * _STEP), np.uint8)
            self._token = self.agent.register(address(memory), len(memory))
            self._memory = memory
        return self._memory[:nbytes]

    def covers(self, start: int, nbytes: int) -> bool:
        """Does this lie in the arena?"""
        return self._arena[0] <= start and start + nbytes <= sum(self._arena)

    def use(self, arena: tuple[int, int], *, register: bool) -> None:
        """Know the arena (address, length), and register it unless that has been done for this agent."""
        if self._arena != arena:
            if register:
                self.agent.register(*arena)
            self._arena = arena


class Lanes:
    """As many lanes as calls run at once, made when needed and kept for the next call."""

    def __init__(self, backend: Backend, params: dict[str, str], log: logging.Logger) -> None:
        self.backend = backend
        self._params = params
        self._log = log
        self._lock = threading.Lock()
        self._free: list[Lane] = []
        self._open = False
        self._shared: Agent | None = None
        self._library: Any = None
        self._arena: Any = np.empty(0, np.uint8)

    def open(self) -> None:
        """Load NIXL and make the first lane. Raises `StorageError`."""
        self._library = load_nixl(self._log)
        self._shared = self._agent() if self.backend.shared else None
        self._free.append(self._lane())
        self._open = True

    def close(self) -> None:
        """Let go of NIXL; calls under way keep what they use until they end."""
        with self._lock:
            self._open = False
            self._free.clear()
            self._shared = None
            self._arena = self._arena[:0].copy()

    def register_arena(self, memory: memoryview) -> None:
        """Transfers from and to this memory need no copy from now on. Raises `StorageError`."""
        arena = np.frombuffer(memory, np.uint8)
        if self._shared is not None:
            self._shared.register(address(arena), len(arena))
        self._arena = arena

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane for one call. Raises `StorageError` when the storage is closed or NIXL cannot give one more."""
        with self._lock:
            if not self._open:
                raise StorageError("the storage is not open")
            lane = self._free.pop() if self._free else None
        if lane is None:
            lane = self._lane()
        if len(self._arena):
            lane.use((address(self._arena), len(self._arena)), register=not self.backend.shared)
        try:
            yield lane
        finally:
            with self._lock:
                if self._open and (lane.agent.sound or self.backend.shared):
                    self._free.append(lane)

    def _lane(self) -> Lane:
        agent = self._shared if self.backend.shared else self._agent()
        if agent is None:
            raise StorageError("the storage is not open")
        return Lane(agent)

    def _agent(self) -> Agent:
        return Agent(self._library, self.backend, self._params)


def address(array: Any) -> int:
    """Where an array begins."""
    return int(array.__array_interface__["data"][0])
