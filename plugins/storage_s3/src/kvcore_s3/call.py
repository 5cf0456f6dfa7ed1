"""One call of the storage: its deadline, and the attempts at each of its requests."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from kvcore_s3.faults import Fault, fault_of

ATTEMPTS = 3
"""How often a request is tried. More would only take the time of other requests: the core's circuit breaker gives a
server its rest."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0
R = TypeVar("R")


class Limits(NamedTuple):
    """What all calls of a storage keep to.

    Args:
        place: names the bucket and the endpoint in faults, with `{}` where an object's name goes.
        deadline_s: the time for one call.
        connect_s: the time for a connection to be made.
        read_s: the longest silence of a server.
        slots: as many requests may be under way.
    """

    place: str
    deadline_s: float
    connect_s: float
    read_s: float
    slots: threading.Semaphore


class Call:
    """Shared by all requests of one call, on all its threads. Its time begins with it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._until = time.monotonic() + limits.deadline_s
        self._down: Fault | None = None

    @property
    def left_s(self) -> float:
        """The time that is left; negative when it is up."""
        return self._until - time.monotonic()

    def ask(self, method: Callable[..., Any], **parameters: Any) -> Any:
        """What a method of boto3's client returns. Raises `Fault`.

        boto3 cannot be told how much time is left, so that no such request begins with less than it may take.
        """
        needed_s = self.limits.connect_s + self.limits.read_s
        return self.attempt(lambda: method(**parameters), str(parameters.get("Key", "")), needed_s)

    def attempt(self, request: Callable[[], R], name: str, needed_s: float = 0.0) -> R:
        """What `request` returns, which is called again after a fault that may pass. Raises `Fault`.

        Args:
            name: the object it is about.
            needed_s: with less time left it is not begun.
        """
        for number in range(1, ATTEMPTS + 1):
            if self._down is not None:
                raise self._down.again()
            try:
                return self._once(request, name, needed_s)
            except Exception as error:
                fault = fault_of(error, self.limits.place.format(name))
                # spread out, so that clients do not come back all at once
                pause_s = random.uniform(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**number))  # noqa: S311
                if not fault.retry or number == ATTEMPTS or self.left_s <= needed_s + pause_s:
                    if fault.down:
                        self._down = fault.again()
                    try:
                        raise fault from (error if error is not fault else None)
                    finally:
                        del fault  # else the frame and the fault would hold each other, and the caller's buffers
            time.sleep(pause_s)
        raise AssertionError

    def check_time(self, name: str, needed_s: float = 0.0) -> None:
        """Raise `Fault` when the time is up."""
        if self.left_s <= needed_s:
            limits = self.limits
            text = f"{limits.place.format(name)}: the call's `deadline` of {limits.deadline_s:g} s leaves it no time"
            raise Fault(text, "timeout", code="Deadline")

    def _once(self, request: Callable[[], R], name: str, needed_s: float) -> R:
        slots = self.limits.slots
        if not slots.acquire(timeout=max(0.0, self.left_s - needed_s)):
            self.check_time(name, self.limits.deadline_s)
        try:
            self.check_time(name, needed_s)
            return request()
        finally:
            slots.release()
