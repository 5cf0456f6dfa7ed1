"""Threads that share out the requests of one call. Daemons: a server that hangs never keeps a process from ending.

The calling thread works along, so that a call never waits for threads that are busy elsewhere; it gets helpers only as
far as there is room under the limit.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class Workers:
    """At most `size` threads at work at once, the callers included."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0
        self._busy = 0
        self._closed = False

    def run(self, function: Callable[[A], R], arguments: Sequence[A]) -> list[R]:
        """`function` of each argument, in order. When one raises, the rest is not begun and the first error is raised
        once those under way have ended."""
        share = _Share(function, arguments)
        with self._lock:
            helpers = 0 if self._closed else min(len(arguments) - 1, self._size - self._busy - 1)
            self._busy += 1
            for _ in range(helpers):
                self._start(share.work)
        try:
            share.work()
        finally:
            with self._lock:
                self._busy -= 1
        return share.result()

    def begin(self, function: Callable[[], None]) -> None:
        """Run `function` some time soon, in the background; not at all once closed."""
        with self._lock:
            if not self._closed:
                self._start(function)

    def close(self) -> None:
        """Let the threads end, each after what it is doing."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def _start(self, task: Callable[[], None]) -> None:
        """Under the lock."""
        if self._threads < self._size:
            with suppress(RuntimeError, MemoryError):  # the system has none to give now
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
                self._threads += 1
        if self._threads:
            self._busy += 1
            self._queue.put(task)

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            finally:
                del task  # lets go of the buffers before it waits
                with self._lock:
                    self._busy -= 1


class _Share(Generic[A, R]):
    """One call's arguments, taken one by one by whoever is free."""

    def __init__(self, function: Callable[[A], R], arguments: Sequence[A]) -> None:
        self._function = function
        self._arguments = arguments
        self._results: list[Any] = [None] * len(arguments)
        self._lock = threading.Lock()
        self._next = 0
        self._running = 0
        self._error: BaseException | None = None
        self._idle = threading.Condition(self._lock)

    def work(self) -> None:
        """Take arguments until there are none."""
        while (at := self._take()) is not None:
            error = None
            try:
                self._results[at] = self._function(self._arguments[at])
            except BaseException as caught:  # raised in the caller's thread by `result`
                error = caught
            with self._lock:
                self._running -= 1
                self._error = self._error or error
                self._idle.notify_all()

    def result(self) -> list[R]:
        """Wait for what is under way."""
        with self._lock:
            while self._running:
                self._idle.wait()
            error, self._arguments = self._error, ()  # a helper that comes late finds nothing to do
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, which would keep the buffers
        return self._results

    def _take(self) -> int | None:
        with self._lock:
            if self._error is not None or self._next >= len(self._arguments):
                return None
            self._next += 1
            self._running += 1
            return self._next - 1
