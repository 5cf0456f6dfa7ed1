"""What lookups have found: counted, and held to what was promised."""

from kvcore.api import LeaseError
from kvcore.engine.face import EngineLookup
from kvcore.observe import Metrics


def count_answer(metrics: Metrics, lookup: EngineLookup, seconds: float) -> None:
    """Count an answered lookup, which has taken so long. One of nothing is on record only."""
    chunks = sum(lookup.sources.values()) + sum(lookup.misses.values())
    if not chunks:
        return
    metrics.add("lookups")
    metrics.add("lookup_chunks", chunks)
    metrics.observe("lookup_seconds", seconds)
    for source, count in lookup.sources.items():
        metrics.add("hit_chunks", count, source)
    for reason, count in lookup.misses.items():
        metrics.add("miss_chunks", count, reason)


def count_asked(metrics: Metrics, absent: int, reason: str) -> None:
    """Count a question for single objects, `absent` of which are not there, and why; others are counted as they are
    loaded."""
    metrics.add("lookups")
    metrics.add("lookup_chunks", absent)
    metrics.add("miss_chunks", absent, reason)


def promised(lookup: EngineLookup) -> int:
    """Where ends what an answered lookup has found. Raises `LeaseError` when that is less than it once was."""
    before = lookup.answer
    end = lookup.poll()
    if end is None or end < (before or 0):
        raise LeaseError("the lookup's leases have ended")
    return end
