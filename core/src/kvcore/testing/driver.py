"""Drives a storage of either kind through one blocking face, each call with a deadline, and checks what comes back."""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Self

from kvcore.api import (
    BlockingStorage,
    Entry,
    Failed,
    Item,
    Loaded,
    LoadOutcome,
    Missing,
    ObjectKey,
    Storage,
    Stored,
    StoreOutcome,
    Usage,
)

AnyStorage = Storage | BlockingStorage
Result = Future[Any]
_MAX_THREADS = 16


class Driver:
    """One storage under test. A context manager: opens and closes it.

    Blocking storages run on daemon threads, asyncio ones on an event loop in a thread, as in the core. A call that
    does not return within `timeout_s` seconds fails the test.
    """

    def __init__(self, storage: AnyStorage, timeout_s: float = 30.0) -> None:
        self.storage = storage
        self.timeout_s = timeout_s
        self._runner: _Threads | _Loop = _Loop() if isinstance(storage, Storage) else _Threads()
        self._stopped = False

    @property
    def cancellable(self) -> bool:
        """Whether calls can be cancelled, that is, whether the storage is an asyncio one."""
        return isinstance(self._runner, _Loop)

    def __enter__(self) -> Self:
        try:
            self.call("open")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, method: str, *args: Any) -> Result:
        """Start `storage.method(*args)`; the future of its result."""
        return self._runner.submit(getattr(self.storage, method), *args)

    def wait(self, future: Result, what: str) -> Any:
        """The future's result, or a failed test when it takes too long."""
        try:
            return future.result(self.timeout_s)
        except TimeoutError:
            if future.done():  # the storage's own TimeoutError
                raise
            raise AssertionError(f"`{what}` did not return within {self.timeout_s:g} s") from None

    def call(self, method: str, *args: Any) -> Any:
        """`storage.method(*args)`."""
        return self.wait(self.submit(method, *args), method)

    def close(self) -> None:
        """Close the storage, once; asyncio calls in flight are cancelled first, blocking ones are left running."""
        if self._stopped:
            return
        self._stopped = True
        if isinstance(self._runner, _Loop):
            self._runner.cancel()
        try:
            self.call("close")
        finally:
            self._runner.stop()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """`storage.exists`, checked for shape."""
        found = self.call("exists", keys)
        assert isinstance(found, list), f"`exists` must return a list, not {type(found).__name__}"
        assert all(isinstance(f, bool) for f in found), f"`exists` must return a list of bool, not {found!r}"
        assert len(found) == len(keys), f"`exists` of {len(keys)} keys returned {len(found)} answers"
        return found

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        """`storage.load`, checked for shape."""
        return self.check_load(items, self.call("load", items))

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        """`storage.store`, checked for shape."""
        return self.check_store(items, self.call("store", items))

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """`storage.delete`."""
        self.call("delete", keys)

    def entries(self) -> list[Entry]:
        """`storage.list`, as a list of `Entry`."""
        entries = list(self.call("list"))
        for entry in entries:
            assert isinstance(entry, Entry), f"`list` must yield Entry(key, nbytes), not {entry!r}"
        return entries

    @property
    def can_list(self) -> bool:
        """Whether the storage says that it can enumerate."""
        base = Storage if isinstance(self.storage, Storage) else BlockingStorage
        return type(self.storage).list is not base.list

    def usage(self) -> Usage | None:
        """`storage.usage`."""
        usage = self.call("usage")
        assert usage is None or isinstance(usage, Usage), f"`usage` must return Usage or None, not {usage!r}"
        return usage

    @staticmethod
    def check_load(items: Sequence[Item], outcomes: Any) -> list[LoadOutcome]:
        """`outcomes`, one of the three kinds for each item."""
        _check_outcomes("load", items, outcomes, (Loaded, Missing, Failed))
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Loaded):
                assert 0 <= outcome.nbytes <= item.nbytes, (
                    f"`load` answered {outcome} for a room of {item.nbytes} bytes"
                )
        return list(outcomes)

    @staticmethod
    def check_store(items: Sequence[Item], outcomes: Any) -> list[StoreOutcome]:
        """`outcomes`, one of the two kinds for each item."""
        _check_outcomes("store", items, outcomes, (Stored, Failed))
        return list(outcomes)


def _check_outcomes(method: str, items: Sequence[Item], outcomes: Any, kinds: tuple[type, ...]) -> None:
    assert isinstance(outcomes, list), f"`{method}` must return a list, not {type(outcomes).__name__}"
    assert len(outcomes) == len(items), f"`{method}` of {len(items)} items returned {len(outcomes)} outcomes"
    names = ", ".join(kind.__name__ for kind in kinds)
    for outcome in outcomes:
        assert isinstance(outcome, kinds), f"`{method}` must return one of {names} per item, not {outcome!r}"


class _Threads:
    """Daemon threads, started as needed: a hanging storage fails its test and does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Result, Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._pending = 0

    def submit(self, function: Callable[..., Any], *args: Any) -> Result:
        future: Result = Future()
        with self._lock:
            self._pending += 1
            if self._pending > len(self._threads) < _MAX_THREADS:
                thread = threading.Thread(target=self._run, name="conformance", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._calls.put((future, function, args))
        return future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args = call
            try:
                result = function(*args)
            except BaseException as error:  # handed to the waiting test
                future.set_exception(error)
            else:
                future.set_result(result)
            del call, future, function, args
            with self._lock:
                self._pending -= 1

    def stop(self) -> None:
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(1)  # one that hangs is left behind


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="conformance-loop", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Result:
        async def run() -> Any:
            return await function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def cancel(self) -> None:
        """Cancel every call in flight and wait until it has ended."""

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result(30)

    def stop(self) -> None:
        self.cancel()
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop).result(30)
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()
