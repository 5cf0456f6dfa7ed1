"""The few threads that wait for the store, so that vLLM's scheduler never does."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from kvcore_vllm.faults import logger

Task = Callable[[bool], Any]
"""Called with False: do it; with True: the lane is closed, do without the store."""


class Lane:
    """Tasks of one kind, in order, on threads of their own."""

    def __init__(self, name: str, threads: int) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._quiet = threading.Condition()
        self._open = 0
        self._closed = False
        # Daemons: a storage that hangs in a call of its own must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._run, name=f"kvcore-tier-{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        """Have it done. After `close` it is done at once, without the store."""
        with self._quiet:
            if not self._closed:
                self._open += 1
                self._tasks.put(task)
                return
        task(True)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to do; whether that is so."""
        with self._quiet:
            return self._quiet.wait_for(lambda: not self._open, timeout_s)

    def close(self) -> None:
        """Begin nothing more with the store. Idempotent."""
        with self._quiet:
            if self._closed:
                return
            self._closed = True
        for _ in self._threads:
            self._tasks.put(None)

    def join(self, timeout_s: float) -> bool:
        """After `close`: wait for the threads; whether all have ended."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task(self._closed)
            except Exception:
                logger.exception("kvcore's tier: a task failed")
            finally:
                with self._quiet:
                    self._open -= 1
                    self._quiet.notify_all()
