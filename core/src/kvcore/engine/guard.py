"""No fault of the cache may reach the engine: the guard around every call that an engine makes while it serves."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Guarded:
    """Base of what an engine calls: counts errors by place and kind, logs each kind once, adds up the time of calls."""

    logger: ClassVar[logging.Logger] = logging.getLogger("kvcore")

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        """`method:error` -> how many."""
        self.seconds = 0.0
        """Time spent in guarded calls."""

    def fault(self, where: str, error: BaseException) -> None:
        """Count an error that must not reach the engine; log the first of its kind."""
        kind = f"{where}:{type(error).__name__}"
        count = self.faults.get(kind, 0)
        self.faults[kind] = count + 1
        if not count:
            text = "kvcore failed in %s and goes on without (logged once): %s"
            self.logger.error(text, where, error, exc_info=error)


def guarded(default: Callable[..., Any], *, of_first: bool = False) -> Callable[[F], F]:
    """Decorate a method of a `Guarded`: its errors become `default()`, or with `of_first` `default(first argument)`,
    None where there is none."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.fault(method.__name__, error)
                return default(next(iter((*args, *kwargs.values())), None)) if of_first else default()
            finally:
                self.seconds += time.perf_counter() - began

        return call  # type: ignore[return-value]

    return decorate
