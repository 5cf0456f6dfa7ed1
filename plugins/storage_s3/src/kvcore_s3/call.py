"""One call of the storage: its deadline, and the attempts at each of its requests."""

import math
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvcore_s3.faults import Fault, fault_of

ATTEMPTS = 3
"""How often a request is tried. More would only take the time of other requests: the core's circuit breaker gives a
server its rest."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0
R = TypeVar("R")


class Call:
    """Shared by all requests of one call, on all its threads.

    Args:
        place: names the bucket and the endpoint, with `{}` where an object's name goes.
        deadline_s: when the call has to be over, from now.
        request_s: what one request may take until its answer begins; with less time left, none is begun.
        slots: how many requests of all calls may be under way.
    """

    def __init__(self, place: str, deadline_s: float, request_s: float, slots: threading.Semaphore) -> None:
        self._place = place
        self._slots = slots
        self._until = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._request_s = request_s
        self._down: Fault | None = None

    def attempt(self, request: Callable[[], R], name: str = "") -> R:
        """What `request` returns, which is called again after a fault that may pass. `name`: the object it is about.

        Raises `Fault`.
        """
        for number in range(1, ATTEMPTS + 1):
            if self._down is not None:
                raise self._down.again()
            self._check_time(self._request_s, name)
            try:
                return self._take_a_slot(request, name)
            except Exception as error:
                fault = fault_of(error, self._place.format(name))
                # spread out, so that clients do not come back all at once
                pause_s = random.uniform(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**number))  # noqa: S311
                if not fault.retry or number == ATTEMPTS or self._left_s() < self._request_s + pause_s:
                    if fault.down:
                        self._down = fault.again()
                    try:
                        raise fault from error
                    finally:
                        del fault  # else the frame and the fault would hold each other, and the caller's buffers
            time.sleep(pause_s)
        raise AssertionError

    def _take_a_slot(self, request: Callable[[], R], name: str) -> R:
        if not self._slots.acquire(timeout=max(0.0, self._left_s() - self._request_s)):
            self._check_time(math.inf, name)
        try:
            return request()
        finally:
            self._slots.release()

    def check_time(self, name: str) -> None:
        """Raise `Fault` when the time is up."""
        self._check_time(0.0, name)

    def _check_time(self, needed_s: float, name: str) -> None:
        if self._left_s() < needed_s:
            text = f"{self._place.format(name)}: the call's `deadline` of {self._deadline_s:g} s leaves it no time"
            raise Fault(text, "timeout", code="Deadline")

    def _left_s(self) -> float:
        return self._until - time.monotonic()
