"""Threads for calls that block: bounded, and replaced when one hangs.

`concurrent.futures` cannot do this: its threads are joined at exit, so one stuck call would keep the process alive.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from kvcore.api import StorageError

MAX_STUCK = 16
"""So many hung calls are replaced by fresh threads; with more, the pool refuses work until one returns."""


class DeadlineExceeded(StorageError):
    """A call overran its deadline, or no thread is left for it. `settled` ends when it no longer touches its arguments;
    None: it does not now."""

    def __init__(self, text: str, settled: "asyncio.Future[Any] | None" = None) -> None:
        super().__init__(text)
        self.settled = settled


class Call:
    """One submitted call. `settled` is a future that ends when the thread is done with the call's arguments."""

    __slots__ = ("args", "function", "settled", "state", "stuck")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], settled: "asyncio.Future[Any]") -> None:
        self.function = function
        self.args = args
        self.settled = settled
        self.state: Literal["queued", "running", "over"] = "queued"
        self.stuck = False


class Threads:
    """A pool of daemon threads that serves one event loop."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._waiting = 0  # calls in the queue
        self._stuck = 0
        self.stuck_since: float | None = None
        """When (monotonic) the first of those calls was abandoned that still have not returned; None: all have."""
        self._closed = False

    def submit(self, function: Callable[..., Any], *args: Any) -> Call:
        """Run `function(*args)` on a thread; the result arrives in `.settled`. Raises `DeadlineExceeded` when none is
        left."""
        call = Call(function, args, asyncio.get_running_loop().create_future())
        call.settled.add_done_callback(ignore_error)
        with self._lock:
            if self._closed:
                raise DeadlineExceeded(f"{self._name}: closed")
            if self._stuck >= MAX_STUCK:
                raise DeadlineExceeded(f"{self._name}: {self._stuck} calls hang, no thread is left")
            self._waiting += 1
            self._queue.put(call)
            self._grow()
            if self._threads == self._stuck:  # the system has no thread to give now
                call.state, call.args = "over", ()
                raise DeadlineExceeded(f"{self._name}: no thread can be started")
        return call

    async def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None, what: str = "a call"
    ) -> Any:
        """Run `function(*args)` on a thread and return its result. Cancelling stops the waiting, not the call.

        Raises what it raises, and `DeadlineExceeded` when `what` has not ended in time or no thread is left.
        """
        call = self.submit(function, *args)
        await asyncio.wait((call.settled,), timeout=timeout_s)
        if not call.settled.done():
            in_use = self.abandon(call)
            raise DeadlineExceeded(f"{what} took more than {timeout_s:g} s", call.settled if in_use else None)
        return call.settled.result()

    def abandon(self, call: Call) -> bool:
        """The caller waits no longer. A call that still queues is dropped, a thread that is inside it is replaced.

        True when the call's arguments may still be in use; its `settled` then tells when they no longer are.
        """
        with self._lock:
            if call.state == "queued":
                call.state, call.args = "over", ()
                return False
            if call.state == "running" and not call.stuck:
                call.stuck = True
                self._stuck += 1
                if self.stuck_since is None:
                    self.stuck_since = time.monotonic()
                self._grow()
            return call.state == "running"

    def close(self) -> None:
        """Let idle threads end. Threads inside a call end after it; hung ones end with the process."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def _grow(self) -> None:
        if self._waiting > self._idle and self._threads - self._stuck < self._size and not self._closed:
            with suppress(RuntimeError, MemoryError):  # those that there are do it; the next call tries again
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._threads += 1

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._threads - self._stuck > self._size:  # the call of a thread replaced meanwhile has returned
                    self._threads -= 1
                    return
                self._idle += 1
            call = self._queue.get()
            with self._lock:
                self._idle -= 1
                if call is None:
                    self._threads -= 1
                    return
                self._waiting -= 1
                if call.state == "over":  # abandoned before it began
                    continue
                call.state = "running"
            result, error = None, None
            try:
                result = call.function(*call.args)
            except Exception as caught:
                error = caught
            except BaseException as caught:  # SystemExit on a worker thread is no reason to end the event loop
                error = RuntimeError(repr(caught))
            if isinstance(error, StopIteration):  # a future cannot hold one
                error = RuntimeError(repr(error))
            call.args = ()  # lets go of the buffers before the loop hears of it
            with self._lock:
                call.state = "over"
                if call.stuck:
                    self._stuck -= 1
                    if not self._stuck:
                        self.stuck_since = None
            settled = call.settled
            del call
            try:
                settled.get_loop().call_soon_threadsafe(_settle, settled, result, error)
            except RuntimeError:
                return  # the loop has closed; nobody waits
            del settled, result, error


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def ignore_error(future: "asyncio.Future[Any]") -> None:
    """Nobody waits for this call any more: keep asyncio from logging its error."""
    if not future.cancelled():
        future.exception()
