"""The local cache engine and the local store whose calls are spans. Made in the place of those without where somebody
listens to spans, so that others pay nothing."""

import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvcore.api import Attribute
from kvcore.control import StorageManager
from kvcore.engine.cache_engine import CacheEngine, Claim
from kvcore.engine.local_store import LocalStore
from kvcore.engine.lookup import Lookup
from kvcore.engine.space import Space
from kvcore.engine.store_face import Buffers
from kvcore.engine.store_space import StoreSpace
from kvcore.observe import Asked
from kvcore.observe.decisions import tenant_shown
from kvcore.observe.spans import MAX_REQUESTS, OpenSpan, Spans, traced, within


class _Search:
    """A lookup's span: it ends when the lookup is answered, which may be before or after its maker has it."""

    def __init__(self, span: OpenSpan, on_answer: Callable[[], None] | None) -> None:
        self._span = span
        self._on_answer = on_answer
        self._lock = threading.Lock()
        self._lookup: Lookup | None = None
        self._at = 0

    def answered(self) -> None:
        """It is, now."""
        self._end(at=time.time_ns())
        if self._on_answer is not None:
            self._on_answer()

    def made(self, lookup: Lookup) -> None:
        """This one it is."""
        self._end(lookup=lookup)

    def _end(self, lookup: Lookup | None = None, at: int = 0) -> None:
        with self._lock:
            self._lookup, self._at = lookup or self._lookup, at or self._at
            if self._lookup is None or not self._at:
                return
        found = self._lookup
        attributes: dict[str, Attribute] = {"kvcore.chunks.found": (found.answer or 0) - found.first}
        attributes |= _counts("kvcore.sources", found.sources) | _counts("kvcore.misses", found.misses)
        attributes |= {f"kvcore.{name}": text for name in ("broke", "blame") if (text := getattr(found, name))}
        self._span.end(attributes, self._at)


class TracedEngine(CacheEngine):
    """See above."""

    def __init__(self, manager: StorageManager, name: str, spans: Spans) -> None:
        self._spans = spans
        super().__init__(manager, name)
        self._looked: weakref.WeakKeyDictionary[Lookup, OpenSpan] = weakref.WeakKeyDictionary()
        self._reading: weakref.WeakKeyDictionary[Lookup, OpenSpan] = weakref.WeakKeyDictionary()
        self._queued: dict[str, OpenSpan] = {}
        self._storing: dict[int, OpenSpan] = {}

    def lookup(
        self,
        space: Space,
        hashes: Sequence[bytes],
        first: int = 0,
        asked: Asked | None = None,
        on_answer: Callable[[], None] | None = None,
        each: bool = False,
        begin: int = 0,
        on_coming: Callable[[], None] | None = None,
    ) -> Lookup:
        """See `CacheEngine.lookup`."""
        about: dict[str, Attribute] = _about(space, self.manager.config.tenants)
        about |= {"kvcore.chunks": begin + len(hashes), "kvcore.chunks.first": begin + first}
        span = self._spans.begin("kvcore.lookup", asked, about)
        if asked is not None and (waited := self._queued.pop(asked.id, None)) is not None:
            waited.end({})
        search = _Search(span, on_answer)
        with within(span):
            lookup = super().lookup(space, hashes, first, asked, search.answered, each, begin, on_coming)
        self._looked[lookup] = span
        search.made(lookup)
        return lookup

    def queued(self, space: Space, hashes: Sequence[bytes], asked: Asked | None = None) -> None:
        """See `CacheEngine.queued`. Its span ends with the lookup."""
        if asked is None or not asked.id or asked.id in self._queued:
            return super().queued(space, hashes, asked)
        span = self._queued[asked.id] = self._spans.begin("kvcore.queued", asked, {})
        if len(self._queued) > MAX_REQUESTS:  # some are never looked up
            self._queued.pop(next(iter(self._queued)), span).end({})
        with within(span):
            super().queued(space, hashes, asked)
        return None

    def used(self, lookup: Lookup, tokens: int) -> None:
        """See `CacheEngine.used`."""
        super().used(lookup, tokens)
        looked = self._looked.get(lookup)
        if looked is not None and lookup not in self._reading:
            self._reading[lookup] = looked.begin_beside("kvcore.retrieve", {"kvcore.tokens": tokens})

    def release(self, lookup: Lookup) -> None:
        """See `CacheEngine.release`."""
        super().release(lookup)
        span = self._reading.pop(lookup, None)
        if span is not None:
            span.end({})

    def claim(
        self, space: Space, wanted: Sequence[Sequence[bytes]], chain: Sequence[bytes], request: str = ""
    ) -> Claim:
        """See `CacheEngine.claim`."""
        span = self._spans.begin("kvcore.store", Asked(request), _about(space, self.manager.config.tenants))
        claim = super().claim(space, wanted, chain, request)
        span.attributes["kvcore.chunks"] = max(map(len, claim.objects), default=0)
        span.attributes |= _counts("kvcore.skipped", claim.skipped)
        if claim.id:
            self._storing[claim.id] = span
        else:
            span.end({})
        return claim

    def publish(self, plan_id: int, ok: bool = True) -> None:
        """See `CacheEngine.publish`."""
        span = self._storing.pop(plan_id, None)
        with within(span):
            super().publish(plan_id, ok)
        if span is not None:
            if not ok:
                span.error = "a rank has not copied"
            span.end({})


class TracedStore(LocalStore):
    """See above."""

    def __init__(self, manager: StorageManager, name: str, spans: Spans) -> None:
        self._spans = spans
        super().__init__(manager, name)

    def exists(
        self, space: StoreSpace, hashes: Sequence[bytes], group: int = 0, asked: Asked | None = None, begin: int = 0
    ) -> list[bool]:
        """See `ObjectStore.exists`."""
        hashes = tuple(hashes)
        with self._span("kvcore.lookup", space, hashes, asked) as span:
            found = super().exists(space, hashes, group, asked, begin)
            span.attributes["kvcore.chunks.found"] = sum(found)
        return found

    def load(
        self, space: StoreSpace, hashes: Sequence[bytes], buffers: Buffers, group: int = 0, request: str = ""
    ) -> list[bool]:
        """See `ObjectStore.load`."""
        hashes = tuple(hashes)
        with self._span("kvcore.retrieve", space, hashes, Asked(request)) as span:
            loaded = super().load(space, hashes, buffers, group, request)
            span.attributes["kvcore.chunks.found"] = sum(loaded)
        return loaded

    def store(
        self, space: StoreSpace, hashes: Sequence[bytes], buffers: Buffers, group: int = 0, request: str = ""
    ) -> list[bool]:
        """See `ObjectStore.store`."""
        hashes = tuple(hashes)
        with self._span("kvcore.store", space, hashes, Asked(request)) as span:
            stored = super().store(space, hashes, buffers, group, request)
            span.attributes["kvcore.chunks.stored"] = sum(stored)
        return stored

    @contextmanager
    def _span(self, name: str, space: StoreSpace, hashes: Sequence[bytes], asked: Asked | None) -> Iterator[OpenSpan]:
        with traced(self._spans, name, asked=asked) as span:
            assert span is not None
            span.attributes["kvcore.chunks"] = len(hashes)
            if isinstance(space, StoreSpace):  # else the store says what is wrong
                span.attributes["kvcore.model"] = space.spec.model
            yield span


def _about(space: Space, named: Container[str]) -> dict[str, Attribute]:
    about: dict[str, Attribute] = {"kvcore.model": space.spec.model, "kvcore.namespace": space.namespace.hex()}
    if space.tenant:
        about["kvcore.tenant"] = tenant_shown(space.tenant, named)
    return about


def _counts(prefix: str, counts: Mapping[str, int]) -> dict[str, Attribute]:
    return {f"{prefix}.{name}": count for name, count in counts.items()}
