"""What an open cache shows of itself, whichever face it has: its metrics on a port, and its opening and closing."""

import os

from kvcore.control import StorageManager


class Presence:
    """Made last when a cache opens, and closed to close it. Owns the manager from then on."""

    def __init__(self, manager: StorageManager, name: str) -> None:
        self._manager = manager
        self._name = name
        self._pid = os.getpid()
        self._server = None
        self._over = False
        if manager.config.metrics_port is not None:
            from kvcore.observe.exposition import serve

            self._server = serve(manager.metrics.registry, manager.config.metrics_port)
        manager.hooks.opened(name)

    def close(self) -> None:
        """End the server, close the manager, tell the observers. Idempotent; in a fork it lets go of the port only."""
        if self._over:
            return
        self._over = True
        mine = os.getpid() == self._pid
        if self._server is not None:
            if mine:  # the thread that would answer is not in a fork
                self._server.shutdown()
            self._server.server_close()
        self._manager.close()
        if mine:
            if self._manager.spans is not None:
                self._manager.spans.close()
            self._manager.hooks.closed(self._name)
