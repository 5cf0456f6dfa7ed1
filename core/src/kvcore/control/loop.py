"""The event loop of the tiers, on a thread of its own."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvcore.observe import logger

T = TypeVar("T")

CLOSE_S = 5.0
"""How long `close` waits for a loop that a plugin blocks."""


class LoopThread:
    """An asyncio loop on a daemon thread. Other threads hand it callbacks and coroutines."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread.start()

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback(*args)` on the loop soon. Silently nothing after `close`."""
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(callback, *args)

    def begin(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        """Run `work(*args)` on the loop; nobody waits for it. From any thread. Silently nothing after `close`."""
        self.post(lambda: self.spawn(work(*args)))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the loop; its result is a future for other threads."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task from the loop's own thread and keep it alive until done."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Cancel what still runs and stop the loop. Idempotent."""
        if self._loop.is_closed():
            return
        self._stopping = True
        self.post(self._loop.stop)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("a plugin blocks the event loop of the tiers: it is left behind")
            return
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._stopping:
            try:
                self._loop.run_forever()
            except BaseException:  # a plugin's SystemExit or KeyboardInterrupt ends its task, not everyone's loop
                logger.exception("a task ended with an exception that ends processes; the tiers go on")
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
