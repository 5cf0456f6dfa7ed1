"""The conformance suite of observers. Subclass `ObserverConformance` and give `make_observer`."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pluggy
import pytest

from kvcore.api import Brought, ObjectEvent, Span, hooks
from kvcore.testing.memory import make_key

NAME = "conformance"
SOON_S = 10.0
"""Nine hundred batches take so long at most: a hook is called where requests wait."""
END_S = 30.0
"""Its threads have ended so long after the cache."""
_THREADS, _BATCHES = 4, 250
_OFFERS = ("kvcore_observer", "kvcore_storage", "kvcore_serde", "kvcore_eviction", "kvcore_keys", "kvcore_engine")


class Nothing:
    """A `Prefetch` that brings nothing."""

    free = 0.5

    def bring(self, namespace: bytes, hashes: Sequence[bytes], cause: str) -> bool:
        """See `Prefetch.bring`."""
        return False

    def brought(self, cause: str) -> Brought:
        """See `Prefetch.brought`."""
        return Brought()

    def room(self, namespace: bytes) -> int:
        """See `Prefetch.room`."""
        return 0


def batch(first: int = 0, tier: str = "l1", reason: str = "", count: int = 8) -> list[ObjectEvent]:
    """What one request has left in a tier: each chunk with the one before it, as an engine's come into L1."""
    keys = [make_key(first + i) for i in range(count)]
    if tier != "l1" or reason:
        return [ObjectEvent(key, tier, 65_536, reason) for key in keys]
    parents = [b"", *(key.chunk_hash for key in keys)]
    return [ObjectEvent(key, tier, 65_536, reason, parent, 256) for key, parent in zip(keys, parents, strict=False)]


def spans(first: int = 1, error: str = "") -> list[Span]:
    """A request with one part; the part is told first."""
    part = Span("kvcore.lookup", first + 1, first, first, "request", None, 1_000, 2_000, {"kvcore.chunks": 8}, error)
    return [part, Span("kvcore.request", first, 0, first, "request", None, 1_000, 3_000, {})]


class ObserverConformance:
    """All tests of an observer.

    class TestAcmeObserver(ObserverConformance):
        def make_observer(self):
            return AcmeObserver(AcmeConfig(), context())
    """

    def make_observer(self) -> object:
        """An observer. Called several times."""
        raise NotImplementedError("override make_observer(self) and return an observer")

    # The tests.

    def test_its_hooks_are_those_of_kvcore(self) -> None:
        observer = self.make_observer()
        told = _Told(observer)
        assert told.names, "it implements no hook: mark its methods with @hookimpl"
        named = {name for name in dir(observer) if name.startswith("kvcore_")}
        assert named == told.names, f"not marked with @hookimpl: {', '.join(sorted(named - told.names))}"
        offers = told.names & set(_OFFERS)
        assert not offers, f"{', '.join(sorted(offers))} belongs to the plugin's module: an observer is what it offers"

    def test_its_work_begins_when_the_cache_opens(self) -> None:
        """It is made wherever the configuration is read, as by `kvcore config check`, and then thrown away."""
        with _threads() as left:
            made = [self.make_observer() for _ in range(3)]
            assert not left(), f"its constructor has started {left()}: begin with `kvcore_opened`"
            for observer in made:
                _Told(observer)("closed", name=NAME)  # also of a cache whose start has failed

    def test_it_ends_with_the_cache(self) -> None:
        with _threads() as left:
            for _ in range(3):
                told = _Told(self.make_observer())
                told.open()
                told.all(0)
                told("closed", name=NAME)
            give_up = time.monotonic() + END_S
            while left() and time.monotonic() < give_up:
                time.sleep(0.01)
            assert not left(), f"{END_S:g} s after `kvcore_closed` there still are its threads {left()}"

    def test_what_comes_before_the_beginning_and_after_the_end_is_harmless(self) -> None:
        """A request may still be under way."""
        told = _Told(self.make_observer())
        told.all(0)
        told.open()
        told("closed", name=NAME)
        told.all(100)
        told("closed", name=NAME)

    @pytest.mark.parametrize("tier", ["l1", "disk", "a name with spaces, \u00fcmlauts and {braces}"])
    @pytest.mark.parametrize("reason", ["", "loaded", "room", "cleared", "expired", "unused", "a later word"])
    def test_any_tier_and_reason(self, tier: str, reason: str) -> None:
        with self.opened() as told:
            for event in ("stored", "loaded", "evicted", "failed"):
                told(event, events=batch(0, tier, reason))
                told(event, events=batch(0, tier, reason))  # what was told before, too
                told(event, events=[ObjectEvent(make_key(99), tier, 0, reason)])
                told(event, events=tuple(batch(200, tier, reason, 3000)))
            told("spans", spans=spans(error=reason))
            told("spans", spans=[])

    def test_many_threads_tell_at_once_while_the_cache_closes(self) -> None:
        told = _Told(self.make_observer())
        told.open()
        with ThreadPoolExecutor(_THREADS + 1) as pool:
            telling = [pool.submit(_often, told, thread) for thread in range(_THREADS)]
            closing = pool.submit(told, "closed", name=NAME)
            for each in (*telling, closing):
                each.result(END_S)

    def test_it_holds_nobody_up(self) -> None:
        with self.opened() as told:
            begun = time.monotonic()
            _often(told, 0, 1000)
            took = time.monotonic() - begun
        assert took < SOON_S, f"900 batches took {took:.1f} s: take them down, and let a thread of your own do the rest"

    @contextmanager
    def opened(self) -> "Iterator[_Told]":
        """An observer of a cache that is open."""
        told = _Told(self.make_observer())
        told.open()
        try:
            yield told
        finally:
            told("closed", name=NAME)


class _Told:
    """Tells an observer as the core does: with all of a hook's arguments, of which it takes those that it names."""

    def __init__(self, observer: object) -> None:
        self._manager = pluggy.PluginManager("kvcore")
        self._manager.add_hookspecs(hooks)
        self._manager.register(observer)
        self._manager.check_pending()
        self.names = {caller.name for caller in self._manager.get_hookcallers(observer) or ()}

    def __call__(self, event: str, **arguments: Any) -> None:
        getattr(self._manager.hook, f"kvcore_{event}")(**arguments)

    def open(self) -> None:
        """The cache is open."""
        self("opened", name=NAME)
        self("prefetch", prefetch=Nothing())

    def all(self, first: int) -> None:
        """One of each."""
        namespace, hashes = make_key(first).namespace, [make_key(first + i).chunk_hash for i in range(8)]
        self("queued", namespace=namespace, hashes=hashes)
        self("asked", namespace=namespace, hashes=hashes)
        for tier in ("l1", "disk"):
            self("stored", events=batch(first, tier))
        self("evicted", events=batch(first, reason="room"))
        self("loaded", events=batch(first, "disk"))
        self("stored", events=batch(first, reason="loaded"))
        self("failed", events=batch(first, "disk", "timeout", 1))
        self("spans", spans=spans(first + 1))


def _often(told: _Told, thread: int, batches: int = _BATCHES) -> None:
    for i in range(0, batches, 10):
        told.all(8 * (thread * batches + i))  # nine calls


@contextmanager
def _threads() -> Iterator[Callable[[], list[str]]]:
    """The names of those threads that were started meanwhile and still run."""
    before = set(threading.enumerate())
    yield lambda: [t.name for t in threading.enumerate() if t not in before]
