"""Runs a command's coroutines so that Ctrl-C and SIGTERM cancel them, and they can tidy up."""

import asyncio
import signal
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`. Raises `KeyboardInterrupt` after Ctrl-C and `SystemExit(143)` after SIGTERM, both once the
    coroutine has ended."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in whose place alone asyncio puts its own
    try:
        return asyncio.run(_watched(main))
    finally:
        signal.signal(signal.SIGINT, before)


async def _watched(main: Coroutine[Any, Any, T]) -> T:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await main
    except asyncio.CancelledError:
        if terminated:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


class Runs:
    """One coroutine after another on one loop, with other work in between. After Ctrl-C or SIGTERM the coroutine under
    way is cancelled, or else the next is not begun, and `run` raises `KeyboardInterrupt`; what is run after that, to
    tidy up, runs. Only ever there: anywhere else a coroutine could be left behind that nobody awaits.
    """

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        self._interrupted = False
        self._task: asyncio.Task[Any] | None = None
        self._before = {number: signal.signal(number, self._heed) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._runner.close()
        if self._interrupted and kind is None:
            raise KeyboardInterrupt

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result."""
        return self._runner.run(self._watched(coroutine))

    async def _watched(self, coroutine: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        try:
            if not self._interrupted:
                return await coroutine
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
        finally:
            self._task = None
            coroutine.close()
        self._interrupted = False
        raise KeyboardInterrupt

    def _heed(self, *_: object) -> None:
        self._interrupted = True
        if self._task is not None:
            self._runner.get_loop().call_soon_threadsafe(self._task.cancel)
