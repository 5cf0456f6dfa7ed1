"""What lookups have found: counted, and held to what was promised."""

from collections.abc import Sequence

from kvcore.api import LeaseError
from kvcore.engine.face import EngineLookup
from kvcore.engine.space import Space
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


def check_blocks(space: Space, block_ids: Sequence[Sequence[int]], chunks: int = 0) -> None:
    """Raises `ValueError` for block ids that are not of so many groups, or of fewer than so many chunks."""
    if len(block_ids) != len(space.groups):
        raise ValueError(f"block_ids: of {len(block_ids)} groups, and the model has {len(space.groups)}")
    blocks = chunks * space.chunk_blocks
    short = [len(ids) for ids in block_ids if len(ids) < blocks]
    if short:
        raise ValueError(
            f"block_ids: {short[0]} of a group, but {chunks} chunks are coming, which have {blocks} blocks: give those "
            "of all that is coming, -1 for what is not wanted"
        )
