"""The suite of observers: a good one passes, and each test finds what it is there for."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvcore.api import ObjectEvent, hookimpl
from kvcore.testing import ObserverConformance, observer


class Good:
    """Counts, with a thread of its own while a cache is open."""

    def __init__(self) -> None:
        self.seen = 0
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    @hookimpl
    def kvcore_opened(self, name: str) -> None:
        self.thread = threading.Thread(target=self.over.wait, daemon=True)
        self.thread.start()

    @hookimpl
    def kvcore_stored(self, events: Sequence[ObjectEvent]) -> None:
        with self.lock:
            self.seen += len(events)

    @hookimpl
    def kvcore_spans(self) -> None:
        """A hook may leave out arguments."""

    @hookimpl
    def kvcore_closed(self, name: str) -> None:
        self.over.set()


class TestGood(ObserverConformance):
    def make_observer(self) -> Good:
        return Good()


class Unmarked(Good):
    def kvcore_loaded(self, events: Sequence[ObjectEvent]) -> None: ...


class Offering(Good):
    @hookimpl
    def kvcore_observer(self) -> Any: ...


class Early(Good):
    def __init__(self) -> None:
        super().__init__()
        self.kvcore_opened("early")


class Lasting(Good):
    @hookimpl
    def kvcore_closed(self, name: str) -> None: ...


class Strict(Good):
    @hookimpl
    def kvcore_stored(self, events: Sequence[ObjectEvent]) -> None:
        assert self.thread is not None


class Particular(Good):
    @hookimpl
    def kvcore_evicted(self, events: Sequence[ObjectEvent]) -> None:
        {"room": 1, "cleared": 2, "expired": 3, "unused": 4}[events[0].reason]


class Careless(Good):
    """Not made for threads."""

    @hookimpl
    def kvcore_stored(self, events: Sequence[ObjectEvent]) -> None:
        assert self.lock.acquire(blocking=False), "somebody else is here"
        time.sleep(0.001)
        self.lock.release()


class Slow(Good):
    @hookimpl
    def kvcore_stored(self, events: Sequence[ObjectEvent]) -> None:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("bad", "test", "arguments", "says"),
    [
        (Unmarked, "test_its_hooks_are_those_of_kvcore", (), "not marked with @hookimpl: kvcore_loaded"),
        (Offering, "test_its_hooks_are_those_of_kvcore", (), "kvcore_observer belongs to the plugin's module"),
        (Early, "test_its_work_begins_when_the_cache_opens", (), "its constructor has started"),
        (Lasting, "test_it_ends_with_the_cache", (), "there still are its threads"),
        (Strict, "test_what_comes_before_the_beginning_and_after_the_end_is_harmless", (), ""),
        (Particular, "test_any_tier_and_reason", ("l1", "a later word"), ""),
        (Careless, "test_many_threads_tell_at_once_while_the_cache_closes", (), "somebody else is here"),
        (Slow, "test_it_holds_nobody_up", (), "let a thread of your own do the rest"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_bad_one_is_found(
    bad: type[Good], test: str, arguments: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "END_S", 0.2 if bad is Lasting else 30.0)
    monkeypatch.setattr(observer, "SOON_S", 1.0)
    made: list[Good] = []

    class Suite(ObserverConformance):
        def make_observer(self) -> Good:
            made.append(bad())
            return made[-1]

    with pytest.raises((AssertionError, KeyError), match=says or None):
        getattr(Suite(), test)(*arguments)
    for one in made:
        one.over.set()


def test_an_unknown_hook_is_named() -> None:
    class Misspelt(Good):
        @hookimpl
        def kvcore_stord(self, events: Any) -> None: ...

    class Suite(ObserverConformance):
        def make_observer(self) -> Good:
            return Misspelt()

    with pytest.raises(Exception, match="unknown hook 'kvcore_stord'"):
        Suite().test_its_hooks_are_those_of_kvcore()
