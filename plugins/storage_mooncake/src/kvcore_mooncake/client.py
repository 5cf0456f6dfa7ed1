"""The connection to the pool: set up in the background, used by many threads, closed when nobody uses it.

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

from kvcore.api import StorageError, format_size
from kvcore_mooncake import probe
from kvcore_mooncake.config import MooncakeConfig
from kvcore_mooncake.errors import OK, words
from kvcore_mooncake.library import Store, load_library, put_config
from kvcore_mooncake.session import Session

OPEN_WAIT_S = 5.0
"""How long `open` waits for the first try to connect; after that it goes on in the background."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Between two tries to connect; each pause is twice the one before."""

DRAIN_S = 2.0
"""How long `close` waits for calls in flight."""


class Client:
    """One connection. Thread-safe. `config` is a resolved one."""

    def __init__(self, config: MooncakeConfig, log: logging.Logger) -> None:
        self._config = config
        self._log = log
        self._changed = threading.Condition()
        self._memory: list[memoryview] = []  # held, so that it stays mapped as long as it is registered
        self._session: Session | None = None
        self._why = ""  # the last try to connect failed
        self._connecting = False
        self._calls = 0
        self._closed = False
        self._left = False  # `close` waits no longer: whoever comes last closes
        self._doubtful = False  # the master did not answer the last call

    def open(self) -> None:
        """Load the library and begin to connect. Raises `StorageError` when the library cannot be used."""
        library = load_library(self._config)
        self._connecting = True
        threading.Thread(target=self._connect, args=(library,), name="kvcore-mooncake-connect", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._session is not None or self._why, OPEN_WAIT_S)
            if self._session is None:
                self._why = self._why or f"connecting to {self._config.master_server_address} takes long"
                self._log.warning("%s; it is tried again in the background", self._why)

    def register(self, memory: memoryview) -> None:
        """Objects in `memory` need no staging, now or once connected."""
        with self._changed:
            self._memory.append(memory)
            if self._session is not None:
                self._add_region(self._session, memory)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """The connection, for one call. Raises `StorageError` while there is none, or the master is silent."""
        with self._changed:
            if self._closed or self._session is None:
                raise StorageError("the storage is closed" if self._closed else self._why)
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
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._calls == 0 and not self._connecting, DRAIN_S)
            self._left = True
            session = self._take()
        if session is not None:
            self._finish(session)

    # -- connecting, on a thread of its own --------------------------------------------------------------------------

    def _connect(self, library: Any) -> None:
        pause_s, session, why = FIRST_PAUSE_S, None, ""
        while session is None:
            try:
                session = self._try(library)
            except Exception as error:
                why = str(error) or repr(error)
            with self._changed:
                if session is not None:
                    for memory in self._memory:
                        self._add_region(session, memory)
                    self._session = session
                    if self._why:
                        self._log.warning("connected to the Mooncake master %s", self._config.master_server_address)
                self._why = why
                self._changed.notify_all()
                if session is None and self._changed.wait_for(lambda: self._closed, pause_s):
                    break
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        with self._changed:
            self._connecting = False
            last = self._take() if self._left else None
            self._changed.notify_all()
        if last is not None:
            self._finish(last)

    def _try(self, library: Any) -> Session:
        config = self._config
        if not probe.answers(config.master_server_address):
            raise StorageError(self._silent())
        if not probe.accepts(config.metadata_server):
            raise StorageError(f"the metadata server {config.metadata_server} cannot be reached: check it")
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
        if code != OK:
            raise StorageError(
                f"Mooncake's client cannot be set up: {words(code)}; the master {config.master_server_address} runs. "
                f"Check `protocol` ({config.protocol}), `device_name` ({config.device_name or 'none'}), "
                f"`local_hostname` ({hostname}) and `metadata_server` ({config.metadata_server}); with "
                "MC_LOG_LEVEL=INFO in the environment the library says more"
            )
        return Session(store, put_config(library, config), config.staging_size, self._saw)

    def _add_region(self, session: Session, memory: memoryview) -> None:
        why = session.add_region(memory)
        if why is not None:
            self._log.warning(
                "the arena of %s cannot be registered with Mooncake, its objects go through staging memory: %s",
                format_size(len(memory)),
                why,
            )

    def _saw(self, answered: bool) -> None:
        self._doubtful = not answered

    def _silent(self) -> str:
        return (
            f"the Mooncake master {self._config.master_server_address} does not answer: start it, or correct "
            "`master_server_address`"
        )

    # -- closing -----------------------------------------------------------------------------------------------------

    def _take(self) -> Session | None:
        """Under the lock: the session, to be closed, when nobody uses it any more."""
        if self._calls or self._connecting:
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
