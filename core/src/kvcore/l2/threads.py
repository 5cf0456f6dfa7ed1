"""Threads for calls that block: bounded, and replaced when one hangs.

`concurrent.futures` cannot do this: its threads are joined at exit, so one stuck call would keep the process alive.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

MAX_STUCK = 16
"""So many hung calls are replaced by fresh threads; with more, the pool refuses work until one returns."""


class PoolExhausted(Exception):
    """Every thread is stuck in a call that overran its deadline."""


class Call:
    """One submitted call. `settled` is a future that ends when the thread is done with the call's arguments."""

    __slots__ = ("args", "function", "settled", "started", "stuck")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], settled: "asyncio.Future[Any]") -> None:
        self.function = function
        self.args = args
        self.settled = settled
        self.started = False
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
        self._stuck = 0
        self._closed = False

    def submit(self, function: Callable[..., Any], *args: Any) -> Call:
        """Run `function(*args)` on a thread; the result arrives in `.settled`. Raises `PoolExhausted`."""
        call = Call(function, args, asyncio.get_running_loop().create_future())
        call.settled.add_done_callback(_retrieve)
        with self._lock:
            if self._closed or self._stuck >= MAX_STUCK:
                raise PoolExhausted(f"{self._name}: {self._stuck} calls hang, no thread is left")
            if self._idle == 0 and self._threads - self._stuck < self._size:
                self._threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._queue.put(call)
        return call

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)` on a thread and return its result. Cancelling stops the waiting, not the call."""
        return await asyncio.shield(self.submit(function, *args).settled)

    def abandon(self, call: Call) -> None:
        """The caller waits no longer: a thread that is still in the call is replaced."""
        with self._lock:
            if call.started and not call.settled.done() and not call.stuck:
                call.stuck = True
                self._stuck += 1

    def close(self) -> None:
        """Let idle threads end. Threads inside a call end after it; hung ones end with the process."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            call = self._queue.get()
            with self._lock:
                self._idle -= 1
                if call is None:
                    self._threads -= 1
                    return
                call.started = True
            try:
                result, error = call.function(*call.args), None
            except BaseException as caught:
                result, error = None, caught
            call.args = ()  # lets go of the buffers before the loop hears of it
            with self._lock:
                if call.stuck:
                    self._stuck -= 1
            settled = call.settled
            del call
            try:
                settled.get_loop().call_soon_threadsafe(_settle, settled, result, error)
            except RuntimeError:
                return  # the loop has closed; nobody waits


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _retrieve(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()  # an abandoned call's error is nobody's: keep asyncio from logging it
