"""Spans: what the cache did for a request, and when. Kept only where a plugin implements `kvcore_spans`.

A request's spans are one tree, whose root lasts from the first to the last of them. Nobody says when a request is over:
the root is told once nothing has happened for `QUIET_S`, and what comes later belongs to it all the same.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from kvcore.api import Attribute, Span
from kvcore.observe.decisions import NOBODY, Asked, kept_word
from kvcore.observe.log import Throttle

TELL_S = 1.0
"""What has ended is told about so much later."""
QUIET_S = 5.0
STUCK_S = 60.0
"""A root with a span that does not end is told after so long."""
KEPT_S = 600.0
"""So long after its last span, a request's id still means the same request."""
MAX_REQUESTS = 4096
MAX_ENDED = 16_384
"""More spans do not wait to be told: they are dropped. Roots have room for `MAX_REQUESTS` more."""

_ids = itertools.count(1)


class OpenSpan:
    """A span that has begun. `error`: why what it is about has failed."""

    __slots__ = ("_spans", "attributes", "begun", "error", "id", "name", "parent", "root")

    def __init__(
        self, spans: "Spans", name: str, root: "_Root", parent: int, attributes: Mapping[str, Attribute]
    ) -> None:
        self._spans = spans
        self.name = name
        self.root = root
        self.id = next(_ids)
        self.parent = parent
        self.attributes = dict(attributes)
        self.error = ""
        self.begun = time.time_ns()

    def begin(self, name: str, attributes: Mapping[str, Attribute]) -> "OpenSpan":
        """One within this one."""
        return self._spans.begin_in(self.root, self.id, name, attributes)

    def begin_beside(self, name: str, attributes: Mapping[str, Attribute]) -> "OpenSpan":
        """One of the same request."""
        return self._spans.begin_in(self.root, self.root.id, name, attributes)

    def end(self, attributes: Mapping[str, Attribute], at: int | None = None) -> None:
        """It ends: now, or at this time (ns)."""
        self.attributes.update(attributes)
        self._spans.ended(self, at or time.time_ns())


CURRENT: ContextVar[OpenSpan | None] = ContextVar("kvcore_span", default=None)
"""The span that this code runs for, also in the tasks and callbacks that it begins. None where nobody listens."""


class _Root:
    """What the spans of one tree have in common. `id`: of the root; 0 where no request is known, and the first span of
    the tree is its root."""

    __slots__ = ("asked", "begun", "busy", "id", "last", "told")

    def __init__(self, asked: Asked, own_id: int) -> None:
        self.asked = asked
        self.id = own_id
        self.begun = self.last = time.time_ns()
        self.busy = 0
        """Its spans that have not ended."""
        self.told = False


class Spans:
    """Those of one cache. Thread-safe; what has ended is told on the tiers' loop, and by `close`.

    Args:
        tell: hears of spans. post: has something called on that loop.
    """

    def __init__(self, tell: Callable[[Sequence[Span]], None], post: Callable[[Callable[[], Any]], None]) -> None:
        self._tell = tell
        self._post = post
        self._lock = threading.Lock()
        self._ended: list[Span] = []
        self._dropped = 0
        self._requests: dict[str, _Root] = {}  # the one that was heard of last stands last
        self._untold = 0
        """How many of them are not told."""
        self._armed = False
        self._log = Throttle()

    def begin(self, name: str, asked: Asked | None, attributes: Mapping[str, Attribute]) -> OpenSpan:
        """Something is begun for a request."""
        if asked is None:
            asked = NOBODY
        else:  # bounded, and as the record has it
            asked = asked._replace(id=kept_word(asked.id), adapter=kept_word(asked.adapter), ids=None)
        with self._lock:
            root = self._root(asked) if asked.id else _Root(asked, 0)
        return self.begin_in(root, root.id, name, attributes)

    def begin_in(self, root: _Root, parent: int, name: str, attributes: Mapping[str, Attribute]) -> OpenSpan:
        """Within a tree and a span of it."""
        span = OpenSpan(self, name, root, parent, attributes)
        with self._lock:
            root.id = root.id or span.id
            root.busy += 1
        return span

    def ended(self, span: OpenSpan, at: int) -> None:
        """See `OpenSpan.end`."""
        root = span.root
        asked = root.asked
        at = max(at, span.begun)  # clocks are set
        told = Span(
            span.name, span.id, span.parent, root.id, asked.id, asked.trace, span.begun, at, span.attributes, span.error
        )
        with self._lock:
            root.busy -= 1
            root.last = max(root.last, at)
            self._add(told, MAX_ENDED)
            arm, self._armed = not self._armed, True
        if arm:
            self._post(self._wait)

    def close(self) -> None:
        """Tell all that is left."""
        self._take(at_once=True)

    def forked(self) -> None:
        """In the child of a fork: a thread that is not here may have held the lock."""
        self._lock = threading.Lock()

    def _root(self, asked: Asked) -> _Root:
        now = time.time_ns()
        root = self._requests.pop(asked.id, None)
        if root is not None and now - root.last > KEPT_S * 1e9:
            self._tell_root(root)
            root = None
        if root is None:
            root = _Root(asked, next(_ids))
            self._untold += 1
        elif asked.trace and not root.asked.trace:  # whoever stores names the request only
            root.asked = asked
        self._requests[asked.id] = root
        if len(self._requests) > MAX_REQUESTS:
            self._tell_root(self._requests.pop(next(iter(self._requests))))
        return root

    def _tell_root(self, root: _Root) -> None:
        """Once. Under the lock."""
        if not root.told:
            root.told = True
            self._untold -= 1
            asked = root.asked
            attributes: dict[str, Attribute] = {"kvcore.prompt_tokens": asked.tokens} if asked.tokens else {}
            if asked.adapter:
                attributes["kvcore.adapter"] = asked.adapter
            span = Span(
                "kvcore.request", root.id, 0, root.id, asked.id, asked.trace, root.begun, root.last, attributes, ""
            )
            self._add(span, MAX_ENDED + MAX_REQUESTS)

    def _add(self, span: Span, most: int) -> None:
        if len(self._ended) < most:
            self._ended.append(span)
        else:
            self._dropped += 1

    # -- on the loop -------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        asyncio.get_running_loop().call_later(TELL_S, self._due)

    def _due(self) -> None:
        if self._take():
            self._wait()

    def _take(self, at_once: bool = False) -> bool:
        """Tell what has ended, and the roots of requests that are quiet. Is there more to come?"""
        now = time.time_ns()
        with self._lock:
            if self._untold:
                for root in self._requests.values():
                    if at_once or now - root.last > (STUCK_S if root.busy else QUIET_S) * 1e9:
                        self._tell_root(root)
            batch, self._ended = self._ended, []
            dropped, self._dropped = self._dropped, 0
            self._armed = more = self._untold > 0
        if dropped:
            self._log.warning("spans", f"{dropped} spans were dropped: they ended faster than they are told")
        if batch:
            self._tell(batch)
        return more


@contextmanager
def within(span: OpenSpan | None) -> Iterator[None]:
    """What is begun in here is done for `span`."""
    token = CURRENT.set(span)
    try:
        yield
    finally:
        CURRENT.reset(token)


@contextmanager
def traced(
    spans: Spans | None, name: str, above: OpenSpan | None = None, asked: Asked | None = None
) -> Iterator[OpenSpan | None]:
    """What is done in here is a span, where spans are kept: of the request of `above`, else of that of `asked`."""
    if spans is None:
        yield None
        return
    span = above.begin_beside(name, {}) if above is not None else spans.begin(name, asked, {})
    try:
        with within(span):
            yield span
    except BaseException as error:
        span.error = str(error) or repr(error)
        raise
    finally:
        span.end({})


def failed(error: object) -> None:
    """What this code does has failed."""
    span = CURRENT.get()
    if span is not None:
        span.error = str(error) or repr(error)
