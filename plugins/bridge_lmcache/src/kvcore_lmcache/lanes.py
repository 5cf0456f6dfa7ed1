"""Tasks in the way LMCache wants them: submitted without waiting, announced by an event, asked for by number."""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
logger = logging.getLogger("kvcore")

MAX_RESULTS = 1 << 16
"""Results that nobody has asked for; beyond, the oldest go. LMCache never asks for those of a request it gave up."""


class Lane(Generic[T]):
    """Tasks of one kind, on threads of their own: a slow store keeps no lookup waiting.

    Args:
        name: of the threads.
        threads: how many tasks run at once.
        event: has `fileno`, `notify` and `close`; notified after each task.
    """

    def __init__(self, name: str, threads: int, event: Any) -> None:
        self._event = event
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._closed = False
        self._work: queue.SimpleQueue[tuple[int, Callable[[], T], Callable[[], T]] | None] = queue.SimpleQueue()
        # Daemons: a storage that hangs must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._run, name=f"kvcore-{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def fd(self) -> int:
        """What LMCache polls."""
        return int(self._event.fileno())

    def submit(self, work: Callable[[], T], otherwise: Callable[[], T]) -> int:
        """The number of a new task. `otherwise` gives its result when `work` raises or is not begun before the end."""
        number = next(self._ids)
        with self._lock:
            if not self._closed:
                self._work.put((number, work, otherwise))
                return number
        self._finish(number, otherwise())
        return number

    def ended(self, result: T) -> int:
        """The number of a task that has this result already, whatever other tasks are waiting for."""
        number = next(self._ids)
        self._finish(number, result)
        return number

    def take(self, number: int) -> T | None:
        """The result of a task, once; None while it runs."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """All results that are there, once."""
        with self._lock:
            found, self._results = self._results, {}
        return found

    def close(self, timeout_s: float) -> bool:
        """Begin no more tasks, wait for those that run and close the event. False: some did not end in that time."""
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._work.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:  # a thread that is late finds the lane closed and does not touch the event
            self._event.close()
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            number, work, otherwise = task
            try:
                result = otherwise() if self._closed else work()
            except Exception:
                logger.exception("LMCache's task could not be done: its objects count as misses")
                result = otherwise()
            del task, work, otherwise  # they hold LMCache's buffers
            self._finish(number, result)

    def _finish(self, number: int, result: T) -> None:
        with self._lock:
            self._results[number] = result
            while len(self._results) > MAX_RESULTS:
                del self._results[next(iter(self._results))]
            if not self._closed:
                self._event.notify()
