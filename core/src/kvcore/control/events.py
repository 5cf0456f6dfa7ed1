"""What observers are told of one batch through a tier."""

from collections.abc import Sequence

from kvcore.api import Failed, LoadOutcome, Missing, ObjectEvent, ObjectKey, StoreOutcome


def sort_events(
    tier: str, objects: Sequence[tuple[ObjectKey, int]], outcomes: Sequence[LoadOutcome | StoreOutcome]
) -> tuple[list[ObjectEvent], list[ObjectEvent]]:
    """What was done and what failed, of objects given as key and bytes. Absent ones are neither."""
    good, bad = [], []
    for (key, nbytes), outcome in zip(objects, outcomes, strict=True):
        if isinstance(outcome, Failed):
            bad.append(ObjectEvent(key, tier, nbytes, outcome.kind))
        elif not isinstance(outcome, Missing):
            good.append(ObjectEvent(key, tier, nbytes))
    return good, bad
