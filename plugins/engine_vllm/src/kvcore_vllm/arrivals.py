"""Loads that begin before their lookups are answered: each object is copied when it comes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcore.api import LeaseError
from kvcore.engine import Engine, EngineLookup
from kvcore.transfer.plan import Copy
from kvcore_vllm.metadata import Load


@dataclass
class _Arrival:
    id: int
    req_id: str
    lookup: EngineLookup
    first_block: int
    block_ids: Sequence[Sequence[int]]
    promised: frozenset[int]
    """The blocks that vLLM counts on."""
    left: set[int]
    """Those of them that nothing has come for."""
    begun: bool = False
    dropped: bool = False


class Arrivals:
    """The loads under way of requests that have their blocks, in parts as objects come.

    Args:
        engine: the cache.
        fault: told what it has raised.
        answered: told of lookups, once they are answered, with their requests' names.
    """

    def __init__(
        self, engine: Engine, fault: Callable[[str, Exception], None], answered: Callable[[str, EngineLookup], None]
    ) -> None:
        self._engine = engine
        self._fault = fault
        self._answered = answered
        self._arrivals: list[_Arrival] = []

    @property
    def next_lookup(self) -> EngineLookup | None:
        """What is waited for, of the oldest."""
        return self._arrivals[0].lookup if self._arrivals else None

    def add(
        self,
        load_id: int,
        req_id: str,
        lookup: EngineLookup,
        first_block: int,
        block_ids: Sequence[Sequence[int]],
        promised: frozenset[int],
    ) -> None:
        """A request has its blocks: `promised` are to be loaded, from the request's block `first_block` on."""
        self._arrivals.append(_Arrival(load_id, req_id, lookup, first_block, block_ids, promised, set(promised)))

    def drop(self, req_ids: Iterable[str]) -> None:
        """Wait no longer for these. All that was promised has failed, also what has come."""
        for arrival in self._arrivals:
            if arrival.req_id in req_ids:
                arrival.dropped, arrival.left = True, set(arrival.promised)

    def parts(self) -> list[Load]:
        """What is to be copied in this step. The last part of a load tells what has not come."""
        parts = []
        for arrival in list(self._arrivals):
            copies, last = self._come(arrival)
            arrival.left.difference_update(*(c.blocks for c in copies))
            if copies or last:
                parts.append(_part(arrival, copies, last))
            if last:
                self._arrivals.remove(arrival)
                self._answered(arrival.req_id, arrival.lookup)
        return parts

    def _come(self, arrival: _Arrival) -> tuple[tuple[Copy, ...], bool]:
        """The copies of what has come since the last step, and whether that is all."""
        if arrival.dropped:
            return (), True
        try:
            answered = arrival.lookup.poll() is not None  # before the rest is taken
            copies = self._engine.arrived(arrival.lookup, arrival.first_block, arrival.block_ids)
        except LeaseError:  # a pause longer than a lease, or the server is gone
            return (), True
        except Exception as error:
            self._fault("retrieve", error)
            return (), True
        return tuple(copies), answered


def _part(arrival: _Arrival, copies: tuple[Copy, ...], last: bool) -> Load:
    missing = frozenset(arrival.left) if last else frozenset()
    blocks = arrival.promised.intersection(b for c in copies for b in c.blocks) | missing
    first, arrival.begun = not arrival.begun, True
    return Load(arrival.id, arrival.req_id, arrival.lookup.arena, copies, blocks, missing, True, first, last)
