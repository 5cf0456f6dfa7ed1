"""The connection to the pool: set up while the master answers, used by many threads, closed when nobody uses it.

Mooncake's library asks for care. Using a client that is not set up, or that is being closed, ends the process with a
segmentation fault: so every call is counted, and the client is closed when the last one has returned. `setup` and
`close` hold Python's lock while they wait, which with a dead master takes seconds: so the master is asked past the
library first, and a client that would take long to close is left to the end of the process.
"""

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcore.api import StorageError, StorageUnavailable, format_size
from kvcore_mooncake import probe
from kvcore_mooncake.config import MooncakeConfig
from kvcore_mooncake.errors import OK, words
from kvcore_mooncake.library import Store, load_library, put_config
from kvcore_mooncake.session import Session

DRAIN_S = 2.0
"""How long `close` waits for calls in flight."""


class Client:
    """One connection. Thread-safe. `config` is a resolved one."""

    def __init__(self, config: MooncakeConfig, log: logging.Logger) -> None:
        self._config = config
        self._log = log
        self._opening = threading.Lock()
        self._changed = threading.Condition()
        self._memory: list[memoryview] = []  # held, so that it stays mapped as long as it is registered
        self._session: Session | None = None
        self._calls = 0
        self._closed = False
        self._left = False  # `close` waits no longer: whoever comes last closes
        self._doubtful = False  # the master did not answer the last call

    def open(self) -> None:
        """Connect. Raises `StorageUnavailable` when the master does not answer, `StorageError` when it never will
        with this configuration or library."""
        with self._opening:  # an open that was abandoned may still be at it
            library = load_library(self._config)
            if self._session is not None:
                return
            session = self._connect(library)
            with self._changed:
                if not self._closed:
                    self._session = session
                    return
        self._finish(session)
        raise StorageError("the storage was closed while it was opened")

    def register(self, memory: memoryview) -> None:
        """Objects in `memory` need no staging from now on."""
        with self.session() as session:
            self._memory.append(memory)
            why = session.add_region(memory)
        if why is not None:
            self._log.warning(
                "the arena of %s cannot be registered with Mooncake, its objects go through staging memory: %s",
                format_size(len(memory)),
                why,
            )

    @contextmanager
    def session(self) -> Iterator[Session]:
        """The connection, for one call. Raises `StorageError` when it is closed, or the master is silent."""
        with self._changed:
            if self._closed or self._session is None:
                raise StorageError("the storage is not open")
            session = self._session
            self._calls += 1
        try:
            if self._doubtful and not probe.answers(self._config.master_server_address):
                raise StorageError(self._silent())  # the library would find out in 2 to 4 s
            yield session
        finally:
            with self._changed:
                self._calls -= 1
                last = self._take() if self._left else None
                self._changed.notify_all()
            if last is not None:
                self._finish(last)

    def close(self) -> None:
        """Close the client once calls in flight have returned; should one hang, it closes the client afterwards."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._calls == 0, DRAIN_S)
            self._left = True
            session = self._take()
        if session is not None:
            self._finish(session)

    def _connect(self, library: Any) -> Session:
        config = self._config
        if not probe.answers(config.master_server_address):
            raise StorageUnavailable(self._silent())
        if not probe.accepts(config.metadata_server):
            raise StorageUnavailable(
                f"the metadata server {config.metadata_server} cannot be reached: start it, or correct "
                "`metadata_server`"
            )
        store: Store = library.MooncakeDistributedStore()
        hostname = config.local_hostname or probe.own_address(config.master_server_address)
        code = store.setup(
            hostname,
            config.metadata_server,
            config.global_segment_size,
            config.local_buffer_size,
            config.protocol,
            config.device_name,
            config.master_server_address,
        )
        if code == OK:
            return Session(store, put_config(library, config), config.staging_size, self._saw)
        if not probe.answers(config.master_server_address):
            raise StorageUnavailable(self._silent())
        raise StorageError(
            f"Mooncake's client cannot be set up: {words(code)}; the master {config.master_server_address} runs. "
            f"Check `protocol` ({config.protocol}), `device_name` ({config.device_name or 'none'}), `local_hostname` "
            f"({hostname}) and `metadata_server` ({config.metadata_server}); with MC_LOG_LEVEL=INFO in the environment "
            "the library says more"
        )

    def _saw(self, answered: bool) -> None:
        self._doubtful = not answered

    def _silent(self) -> str:
        return (
            f"the Mooncake master {self._config.master_server_address} does not answer: start it, or correct "
            "`master_server_address`"
        )

    def _take(self) -> Session | None:
        """Under the lock: the session, to be closed, when nobody uses it any more."""
        if self._calls:
            return None
        session, self._session = self._session, None
        return session

    def _finish(self, session: Session) -> None:
        if self._config.global_segment_size and not probe.answers(self._config.master_server_address):
            # it would try for 18 s to take its segment off the master's list, with Python's lock held
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
            self._log.warning("%s: this client is left to the end of the process", self._silent())
            return
        session.store.close()
        self._memory.clear()
