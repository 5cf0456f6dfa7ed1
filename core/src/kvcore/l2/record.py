"""What comes of a tier's calls: counted, logged, and told to its circuit breaker."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.api import Failed, LoadOutcome, Missing, ObjectKey, StoreOutcome
from kvcore.l2.breaker import Breaker
from kvcore.l2.threads import DeadlineExceeded
from kvcore.observe import Metrics, Throttle
from kvcore.observe.spans import failed

ANSWERS = ("full", "too_large", "read_only", "corrupt")
"""Kinds of `Failed` that are a storage's answer: it works. Others (`io`, `timeout`) count against it."""
_MAX_UNREADABLE = 1 << 16


class Record:
    """One tier's.

    Args:
        name: the tier's.
        useful_s: an answer that takes longer counts against the tier.
    """

    def __init__(self, name: str, metrics: Metrics, breaker: Breaker, useful_s: float) -> None:
        self.name = name
        self.metrics = metrics
        self.unreadable: set[ObjectKey] = set()
        """What is there and cannot be read here."""
        self._breaker = breaker
        self._useful_s = useful_s
        self._log = Throttle()

    def warn(self, kind: str, text: str) -> None:
        """Log it, but not too often."""
        self._log.warning(kind, f"tier {self.name}: {text}")

    def count(self, op: str, outcomes: Sequence[LoadOutcome | StoreOutcome], nbytes: int, begun: float) -> None:
        """Count a call that was answered, and log what failed."""
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                self._log.warning(f"{op} {outcome.kind}", f"tier {self.name}: {op} failed: {outcome.reason}")
        for word, count in Counter(map(word_of, outcomes)).items():
            self.metrics.add("tier_operations", count, self.name, op, word)
        self.metrics.add("tier_bytes", nbytes, self.name, op)
        self.metrics.observe("tier_seconds", time.perf_counter() - begun, self.name, op)

    def failed(self, op: str, count: int, error: Exception) -> list[Any]:
        """A whole call failed; the outcome of each of its objects."""
        late = isinstance(error, DeadlineExceeded)
        kind = "timeout" if late else "error"
        self.metrics.add("tier_operations", count, self.name, op, kind)
        self._log.warning(f"{op} {kind}", f"tier {self.name}: {op} failed: {error or repr(error)}")
        self._breaker.failure(op, str(error) or repr(error))
        failed(error)
        return [Failed(str(error), "timeout" if late else "io")] * count

    def answered(self, op: str, outcomes: Sequence[LoadOutcome | StoreOutcome], seconds: float) -> None:
        """A call was answered, in so long: is the storage well?"""
        failed = [o for o in outcomes if isinstance(o, Failed) and o.kind not in ANSWERS]
        if len(failed) == len(outcomes):
            self._breaker.failure(op, failed[0].reason)
        elif seconds > self._useful_s:
            self._breaker.failure(op, f"{op} took {seconds:.1f} s, a lookup waits {self._useful_s:g} s")
        else:
            self._breaker.success(op)

    def remember(self, keys: Iterable[ObjectKey]) -> None:
        """These are there, and cannot be read here."""
        if len(self.unreadable) < _MAX_UNREADABLE:
            self.unreadable.update(keys)


def word_of(outcome: LoadOutcome | StoreOutcome) -> str:
    """What came of one object, for metrics and traces."""
    if isinstance(outcome, Failed):
        return str(outcome.kind)
    return "missing" if isinstance(outcome, Missing) else "ok"
