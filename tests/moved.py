"""Objects that tests move through a storage over a network, and how long that takes."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvcore.api import Failed, Loaded, Missing, ObjectKey
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, make_key

SLACK = 5.0


def keys_of(count: int) -> list[ObjectKey]:
    return [make_key(i) for i in range(count)]


def get(driver: Driver, keys: Sequence[ObjectKey], nbytes: int = 10_000) -> list[str]:
    """Load all keys in one batch: `ok`, `missing` or the kind of failure for each. What is loaded must be right."""
    rooms = [Room(nbytes, (4096,)) for _ in keys]
    outcomes = driver.load([room.item(key) for room, key in zip(rooms, keys, strict=True)])
    found = []
    for key, room, outcome in zip(keys, rooms, outcomes, strict=True):
        if isinstance(outcome, Loaded):
            assert bytes(room.view[: outcome.nbytes]) == content(key, nbytes), "bytes of another object, or torn"
            assert room.clean_from(outcome.nbytes)
        found.append(kind(outcome))
    return found


def kind(outcome: object) -> str:
    if isinstance(outcome, Failed):
        return outcome.kind
    return "missing" if isinstance(outcome, Missing) else "ok"


@contextmanager
def takes(at_least_s: float, at_most_s: float) -> Iterator[None]:
    """The body takes so long; the upper bound is `SLACK` times as high, for busy machines."""
    begun = time.monotonic()
    yield
    took = time.monotonic() - begun
    assert at_least_s <= took <= at_most_s * SLACK, f"{took:.2f} s"


def eventually(check: Callable[[], object], within_s: float = 30.0) -> None:
    """`check()` becomes true."""
    give_up = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < give_up, f"not within {within_s:g} s"
        time.sleep(0.05)
