"""No fault of the cache may fail a request: the guard around every call that TensorRT-LLM makes."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("kvcore.trtllm")

F = TypeVar("F", bound=Callable[..., Any])


class Guarded:
    """Base of both halves: counts faults by place and kind, and logs each kind once."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}

    def fault(self, where: str, error: BaseException) -> None:
        """Count an error that must not reach the engine; log the first of its kind."""
        kind = f"{where}:{type(error).__name__}"
        count = self.faults.get(kind, 0)
        self.faults[kind] = count + 1
        if not count:
            logger.error("kvcore failed in %s and goes on without (logged once): %s", where, error, exc_info=error)


def guarded(default: Callable[[], Any]) -> Callable[[F], F]:
    """Decorate a method of a `Guarded`: its errors become `default()`."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.fault(method.__name__, error)
                return default()

        return call  # type: ignore[return-value]

    return decorate
