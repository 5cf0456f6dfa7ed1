"""The observer: it takes down what the cache tells, and a thread of its own thinks about it."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvcore.api import Context, ObjectEvent, Prefetch, hookimpl
from kvcore_prefetch.config import PrefetchConfig
from kvcore_prefetch.policy import NextTurns
from kvcore_prefetch.queued import Queued

TICK_S = 0.05
MOST_WAITING = 65_536
"""What the cache told and was not yet thought about; of more, the oldest is not."""
THINKING = 50.0
"""One part in so many of the time may go into looking at all conversations."""
CLOSE_S = 5.0


class PrefetchObserver:
    """Works from `kvcore_prefetch` to `kvcore_closed`."""

    def __init__(self, config: PrefetchConfig, context: Context) -> None:
        self._config = config
        self._log = context.log
        self._prefetch: Prefetch | None = None
        self._queued: Queued | None = None
        self._told: deque[tuple[str, float, Any]] = deque(maxlen=MOST_WAITING)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @hookimpl
    def kvcore_prefetch(self, prefetch: Prefetch) -> None:
        """The cache is open."""
        self._prefetch = prefetch
        if self._config.queued:
            self._queued = Queued(self._config.min_used, partial(prefetch.brought, "queued"), self._log)
        if self._config.next_turn:
            self._thread = threading.Thread(target=self._run, args=(prefetch,), name="kvcore-prefetch", daemon=True)
            self._thread.start()

    @hookimpl
    def kvcore_closed(self, name: str) -> None:
        """The cache is closed."""
        self._prefetch = self._queued = None
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    @hookimpl
    def kvcore_queued(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """See the hook."""
        now, prefetch, queued = time.monotonic(), self._prefetch, self._queued
        if prefetch is not None and queued is not None and queued.helps(now):
            prefetch.bring(namespace, hashes, "queued")
        self._tell("queued", now, (namespace, tuple(hashes)))

    @hookimpl
    def kvcore_asked(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """See the hook."""
        self._tell("asked", time.monotonic(), (namespace, tuple(hashes)))

    @hookimpl
    def kvcore_stored(self, events: Sequence[ObjectEvent]) -> None:
        """See the hook."""
        if events[0].tier == "l1":
            self._tell("stored", time.monotonic(), events)

    @hookimpl
    def kvcore_evicted(self, events: Sequence[ObjectEvent]) -> None:
        """See the hook."""
        if events[0].tier == "l1":
            self._tell("evicted", time.monotonic(), events)

    def _tell(self, what: str, at: float, about: Any) -> None:
        if self._thread is not None:
            self._told.append((what, at, about))

    def _run(self, prefetch: Prefetch) -> None:
        policy = NextTurns(self._config, self._log)
        try:
            pause_s = TICK_S
            while not self._stop.wait(pause_s):
                while self._told:
                    what, at, about = self._told.popleft()
                    if what in ("queued", "asked"):
                        policy.turn(about[0], about[1], at, queued=what == "queued")
                    elif what == "stored":
                        policy.stored(about, at)
                    else:
                        policy.evicted(about, at)
                begun = time.monotonic()
                chosen = policy.choose(begun, prefetch.free, prefetch.room)
                pause_s = max(TICK_S, THINKING * (time.monotonic() - begun))
                for conversation in chosen:
                    prefetch.bring(conversation.namespace, conversation.hashes, "next_turn")
        except Exception:
            self._log.exception("prefetch: next turns are not foreseen any more")
