"""A tier whose calls are spans of the request that they are made for."""

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvcore.api import Failed, LoadOutcome, Missing, ObjectKey, StoreOutcome
from kvcore.l2.parcels import Moved, Outcome, Parcel
from kvcore.l2.record import word_of
from kvcore.l2.tier import Tier
from kvcore.observe.spans import CURRENT, OpenSpan, within


class TracedTier(Tier):
    """Made in the place of a `Tier` where somebody listens to spans."""

    async def ask(self, keys: Sequence[ObjectKey]) -> list[bool] | None:
        """See `Tier.ask`."""
        span = self._begin("exists", len(keys))
        if span is None:
            return await super().ask(keys)
        found: list[bool] | None = None
        try:
            with within(span):
                found = await super().ask(keys)
            return found
        finally:
            span.end({"kvcore.objects.found": sum(found or ())})

    async def load(self, wanted: Sequence[Parcel], held: Callable[[], bool] = lambda: True) -> Moved[LoadOutcome]:
        """See `Tier.load`."""
        return await self._spanned("load", wanted, super().load(wanted, held))

    async def store(self, given: Sequence[Parcel], *args: Any, **kwargs: Any) -> Moved[StoreOutcome]:
        """See `Tier.store`."""
        return await self._spanned("store", given, super().store(given, *args, **kwargs))

    async def _spanned(
        self, op: str, batch: Sequence[Parcel], call: Coroutine[Any, Any, Moved[Outcome]]
    ) -> Moved[Outcome]:
        span = self._begin(op, len(batch))
        if span is None:
            return await call
        outcomes: Sequence[LoadOutcome | StoreOutcome] = ()
        try:
            with within(span):
                moved = await call
            outcomes = moved.outcomes
            return moved
        finally:
            _end(span, batch, outcomes)

    def _begin(self, op: str, objects: int) -> OpenSpan | None:
        above = CURRENT.get()
        if above is None or not objects:
            return None
        span = above.begin(f"kvcore.tier.{op}", {"kvcore.tier": self.name, "kvcore.objects": objects})
        if not self.usable:
            span.error = "tier_down"
        return span


def _end(span: OpenSpan, batch: Sequence[Parcel], outcomes: Sequence[LoadOutcome | StoreOutcome]) -> None:
    nbytes = sum(t.nbytes for t, o in zip(batch, outcomes, strict=False) if not isinstance(o, Failed | Missing))
    counts = Counter(map(word_of, outcomes))
    for outcome in outcomes:
        if isinstance(outcome, Failed):
            span.error = span.error or outcome.reason
    if not outcomes:
        span.error = span.error or "it was given up"
    span.end({"kvcore.bytes": nbytes, **{f"kvcore.objects.{word}": count for word, count in counts.items()}})
