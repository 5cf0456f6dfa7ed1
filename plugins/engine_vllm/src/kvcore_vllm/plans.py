"""Loads and saves under way, until every rank has ended them."""

import time

from kvcore.engine import EngineLookup
from kvcore_vllm.metadata import Tally
from kvcore_vllm.requests import RequestState


class Plan:
    """A load or a save under way on the ranks."""

    __slots__ = ("began", "failed", "first", "lookup", "ranks", "state")

    def __init__(self, state: RequestState, first: int = 0, lookup: EngineLookup | None = None) -> None:
        self.state = state
        self.first = first
        self.lookup = lookup
        self.began = time.monotonic()
        self.ranks = 0
        self.failed = 0


def settle(plans: dict[int, Plan], plan_id: int, tally: Tally, ranks: int) -> Plan | None:
    """The plan, once every rank has ended it."""
    plan = plans.get(plan_id)
    if plan is None:
        return None
    plan.ranks += tally.ranks
    plan.failed += tally.failed
    return plans.pop(plan_id) if plan.ranks >= ranks else None
