"""Tells observers what came into L1 and what left it, in the order in which it happened.

Without an observer of `evicted` nothing is noted and no lock is taken.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from kvcore.api import ObjectEvent
from kvcore.l1 import L1, L1Object
from kvcore.plugins import Hooks


class Residents:
    """What observers are told of L1. Thread-safe.

    Args:
        l1: notes what leaves it, once `watch` was called.
        hooks: the observers.
    """

    def __init__(self, l1: L1, hooks: Hooks) -> None:
        self._l1 = l1
        self._hooks = hooks
        self._order = threading.RLock()  # an observer may call the cache
        self.watch()

    def watch(self) -> None:
        """See whether there is an observer of `evicted` by now."""
        self._l1.watched = self._hooks.listens("evicted")

    def in_order(self) -> AbstractContextManager[None]:
        """Publish objects and tell of it inside: what left before is told before, what leaves then is told after."""
        return self._ordered() if self._l1.watched else nullcontext()

    def loaded(self, tier: str, objects: Sequence[L1Object]) -> None:
        """These came from a tier into L1."""
        if self._hooks.listens("loaded"):
            self._hooks.loaded([ObjectEvent(o.key, tier, o.space.nbytes) for o in objects])
        if self._hooks.listens("stored"):
            self._hooks.stored([ObjectEvent(o.key, "l1", o.space.nbytes, "loaded") for o in objects])

    def tell(self) -> None:
        """Tell what has left L1 since the last time."""
        if self._l1.watched:
            with self._order:
                self._tell()

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        with self._order:
            self._tell()
            yield

    def _tell(self) -> None:
        gone = self._l1.take_gone()
        self._hooks.evicted([ObjectEvent(o.key, "l1", o.space.nbytes, reason) for reason, objs in gone for o in objs])
