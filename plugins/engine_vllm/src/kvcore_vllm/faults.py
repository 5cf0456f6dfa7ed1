"""No fault of the cache may fail a request: the guard around every call that vLLM makes."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("kvcore.vllm")

F = TypeVar("F", bound=Callable[..., Any])


class Guarded:
    """Base of both halves: counts faults by place and kind, logs each kind once, and adds up the time of the calls."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self.seconds = 0.0
        """Time spent in guarded calls, less the waiting of idle moments."""

    def fault(self, where: str, error: BaseException) -> None:
        """Count an error that must not reach the engine; log the first of its kind."""
        kind = f"{where}:{type(error).__name__}"
        count = self.faults.get(kind, 0)
        self.faults[kind] = count + 1
        if not count:
            logger.error("kvcore failed in %s and goes on without (logged once): %s", where, error, exc_info=error)


def guarded(default: Callable[[], Any]) -> Callable[[F], F]:
    """Decorate a method of a `Guarded`: its errors become `default()`, its time is counted."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.fault(method.__name__, error)
                return default()
            finally:
                self.seconds += time.perf_counter() - began

        return call  # type: ignore[return-value]

    return decorate
