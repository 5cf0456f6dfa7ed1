"""A server's arena as a client's own threads use it: mapped when it is first needed, let go when nobody copies."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvcore.api import ArenaError
from kvcore.engine import ArenaView, attach_arena
from kvcore.observe import Throttle


class _Mapped:
    """One arena, and how many threads copy to or from it."""

    def __init__(self, view: ArenaView) -> None:
        self.view = view
        self.users = 0
        self.over = False


class Attachment:
    """The arena of the session of now. Thread-safe.

    A mapping is kept while anybody copies: the server takes the end of its connection for the end of all writing.

    Args:
        descriptor: see `Engine.descriptor`.
    """

    def __init__(self, descriptor: Callable[[], dict[str, Any] | None]) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._mapped: _Mapped | None = None
        self._closed = False
        self._pid = os.getpid()
        self._log = Throttle()

    @contextmanager
    def use(self, token: str) -> Iterator[ArenaView | None]:
        """The arena of this name, for as long as the context lasts; None when it is not there any more."""
        with self._lock:
            mapped = self._map(token)
            if mapped is not None:
                mapped.users += 1
        try:
            yield mapped.view if mapped is not None else None
        finally:
            if mapped is not None:
                with self._lock:
                    mapped.users -= 1
                    self._settle(mapped)

    def close(self) -> None:
        """Let go of it, once nobody copies. Idempotent. In a fork nothing: another thread may have had the lock."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            self._drop()

    def _map(self, token: str) -> _Mapped | None:
        if self._mapped is not None and self._mapped.view.descriptor["token"] == token:
            return self._mapped
        descriptor = self._descriptor()
        if self._closed or descriptor is None or descriptor["token"] != token:
            return None
        self._drop()
        try:
            mapped = _Mapped(attach_arena(descriptor))
        except (ArenaError, OSError) as error:  # out of files
            self._log.warning("attach", str(error))
            return None
        try:
            mapped.view.watch(lambda: self._lost(mapped))
        except (OSError, RuntimeError) as error:  # out of files or threads: its end would go unnoticed
            self._log.warning("attach", str(error))
            mapped.view.close()
            return None
        self._mapped = mapped
        return mapped

    def _lost(self, mapped: _Mapped) -> None:
        """Its server has gone: the memory must not stay taken as long as nobody asks."""
        with self._lock:
            mapped.over = True
            if self._mapped is mapped:
                self._mapped = None
            self._settle(mapped)

    def _drop(self) -> None:
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.over = True
            self._settle(mapped)

    def _settle(self, mapped: _Mapped) -> None:
        if mapped.over and not mapped.users:
            mapped.view.close()
