"""No fault of the cache may reach the engine: the guard around every call that SGLang makes while it serves."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("kvcore.sglang")

F = TypeVar("F", bound=Callable[..., Any])


class Guarded:
    """Counts errors by place and kind, and logs the first of each."""

    faults: dict[str, int]
    """Method and kind of error -> how many."""

    def fault(self, where: str, error: BaseException) -> None:
        """Count an error that must not reach the engine; log the first of its kind."""
        kind = f"{where}:{type(error).__name__}"
        count = self.faults.get(kind, 0)
        self.faults[kind] = count + 1
        if not count:
            logger.error("kvcore failed in %s and goes on without (logged once): %s", where, error, exc_info=error)


def guarded(default: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a method of a `Guarded`: its errors become `default(first argument)`."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.fault(method.__name__, error)
                return default(args[0] if args else next(iter(kwargs.values()), None))

        return call  # type: ignore[return-value]

    return decorate
