"""The arenas that one rank has mapped: that of now, and earlier ones until their copies have ended."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcore.api import ArenaError
from kvcore.engine import ArenaView
from kvcore.transfer import PagedCache
from kvcore_vllm.metadata import Attach, Load, Save

RETRY_S = 1.0
"""An arena that could not be attached is not tried again before."""


@dataclass
class _Mapped:
    view: ArenaView
    cache: PagedCache


class Arenas:
    """A copy goes to the arena that its job names and to no other: slots and generations mean nothing elsewhere.

    Thread-safe: copies run on a thread of their own.

    Args:
        attach: maps an arena, as an `ArenaView`; raises `ArenaError`.
        paged: this rank's paged KV over a mapped arena.
    """

    def __init__(self, attach: Callable[[Attach], ArenaView], paged: Callable[[Attach, ArenaView], PagedCache]) -> None:
        self._attach = attach
        self._paged = paged
        self._lock = threading.Lock()
        self._mapping = threading.Lock()  # held while attaching, which may take a while
        self._known: dict[str, Attach] = {}
        self._mapped: dict[str, _Mapped] = {}
        self._failed: dict[str, tuple[float, Exception]] = {}
        self._jobs: Counter[str] = Counter()
        self._now = ""

    def begin(self, jobs: Sequence["Load | Save"]) -> None:
        """These are to be copied: until each has ended, its arena stays."""
        with self._lock:
            self._jobs.update(job.arena for job in jobs)

    def end(self, job: "Load | Save") -> None:
        """It has ended, or will not be begun."""
        with self._lock:
            self._jobs[job.arena] -= 1
            if self._jobs[job.arena] <= 0:
                del self._jobs[job.arena]
            self._sweep()

    def follow(self, now: str, attach: Attach | None) -> None:
        """`now` is the arena of now, "" while there is none; `attach` is how to reach it, where that is news."""
        with self._lock:
            self._now = now
            if attach is not None:
                self._known[attach.token] = attach
                self._failed.pop(attach.token, None)
            self._sweep()

    def cache(self, token: str) -> PagedCache:
        """The paged KV over this arena, mapped at its first use. Raises `ArenaError` when it cannot be had any more."""
        with self._mapping:
            with self._lock:
                mapped, attach = self._mapped.get(token), self._known.get(token)
            if mapped is not None:
                return mapped.cache
            if attach is None:
                raise ArenaError(f"the arena {token[:8] or 'of a server that is gone'} is not known to this worker")
            tried, error = self._failed.get(token, (0.0, None))
            if error is not None and time.monotonic() < tried + RETRY_S:
                raise error
            try:
                view = self._attach(attach)
                try:
                    mapped = _Mapped(view, self._paged(attach, view))
                except BaseException:
                    view.close()
                    raise
            except Exception as failed:
                self._failed[token] = (time.monotonic(), failed)
                raise
            self._failed.pop(token, None)
            with self._lock:
                self._mapped[token] = mapped
            view.watch(lambda: self._lost(token))
            return mapped.cache

    @property
    def mapped(self) -> list[str]:
        """Tokens of the arenas that are mapped."""
        with self._lock:
            return list(self._mapped)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        with self._lock:
            self._jobs.clear()
            self._known.clear()
            self._now = ""
            self._sweep()

    def _lost(self, token: str) -> None:
        """Its server is gone. Where nothing runs, no step would come to say so."""
        with self._lock:
            self._known.pop(token, None)
            if self._now == token:
                self._now = ""
            self._sweep()

    def _sweep(self) -> None:
        """Unmap what is over; only with the lock."""
        for token in [t for t in self._mapped if t != self._now and t not in self._jobs]:
            mapped = self._mapped.pop(token)
            del mapped.cache  # its views keep the memory mapped
            mapped.view.close()
        if self._now:  # without one, the last may come back: it is the same server after a pause
            for token in [t for t in self._known if t != self._now and t not in self._jobs]:
                del self._known[token]
                self._failed.pop(token, None)
