"""Ctrl-C and SIGTERM end a run, and what it has started."""

import signal
from types import FrameType
from typing import Any, Self


class Ending:
    """While it is entered, either signal raises in the main thread: `KeyboardInterrupt`, or `SystemExit(143)`. Python
    drops what is raised while it forks, so whoever has started a process asks `check` as well."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._heed) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise again what a signal has raised."""
        if self._error is not None:
            raise self._error

    def _heed(self, number: int, _: FrameType | None) -> None:
        self._error = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        raise self._error
