"""What every object store does alike, whether its tiers are in this process or behind a server."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvcore.engine.answers import count_asked
from kvcore.engine.store_space import StoreSpace
from kvcore.observe import Asked, Decision, Decisions, Metrics, Throttle, logger
from kvcore.observe.decisions import Answer

S = TypeVar("S", bound=StoreSpace)


class StoreBase(ABC):
    """See `ObjectStore`.

    Attributes:
        metrics: what it has counted.
        decisions: the record of what it was asked.
    """

    def __init__(self, metrics: Metrics, decisions: Decisions) -> None:
        self.metrics = metrics
        self.decisions = decisions
        self._log = Throttle()
        self._pid = os.getpid()
        self._fork_told = False

    @abstractmethod
    def exists(
        self, space: StoreSpace, hashes: Sequence[bytes], group: int = 0, asked: Asked | None = None, begin: int = 0
    ) -> list[bool]:
        """See `ObjectStore.exists`."""

    def prefix(
        self, space: StoreSpace, hashes: Sequence[bytes], group: int = 0, asked: Asked | None = None, begin: int = 0
    ) -> int:
        """See `ObjectStore.prefix`."""
        return _front(self.exists(space, hashes, group, asked, begin))

    def stats(self) -> dict[str, float]:
        """See `ObjectStore.stats`. What a server counts, for all its engines, are its own metrics."""
        return self.metrics.values()

    def metrics_text(self) -> str:
        """See `ObjectStore.metrics_text`."""
        return self.metrics.text()

    def _mine(self, space: object, kind: type[S], group: object) -> S | None:
        """The space, if this store has made it, in this process, and for a model that has such a group. What is not so
        is logged."""
        if self._forked():
            return None
        if not isinstance(space, kind) or space.owner is not self:
            self._log.warning(
                "space", f"a {type(space).__name__} that this store did not make: give what `register` returned"
            )
        elif not isinstance(group, int) or not 0 <= group < len(space.layouts):
            self._log.warning("group", f"group {group!r:.40} of a model whose groups are 0 to {len(space.layouts) - 1}")
        else:
            return space
        return None

    def _forked(self) -> bool:
        """Is this the child of a fork? It has the store, but none of the threads behind it. The first time that is
        logged; by no lock that the parent may have held."""
        if os.getpid() == self._pid:
            return False
        if not self._fork_told:
            self._fork_told = True
            logger.warning("an object store does not work in the child of a fork, where all is a miss: open another")
        return True

    # -- the record --------------------------------------------------------------------------------------------------

    def _asked(
        self,
        decision: Decision | None,
        there: Sequence[bool],
        sources: Mapping[str, int],
        broke: tuple[str, str],
        seconds: float,
    ) -> None:
        """`exists` has been answered. `broke`: see `Decision.broke` and `blame`, of what was not there."""
        absent = there.count(False)
        count_asked(self.metrics, absent, broke[0])
        if decision is not None:
            misses = {broke[0]: absent} if absent else {}
            decision.answered(Answer(_front(there), sources, misses, *(broke if absent else ("", ""))), seconds)

    def _loaded(self, request: str, group: int, tokens: int) -> None:
        """So many tokens of a request have been loaded. Each is in all groups: it counts once."""
        if not group and (decision := self.decisions.latest(request)) is not None:
            decision.retrieved += tokens

    def _stored(self, request: str, objects: int) -> None:
        """So many objects of a request have been stored."""
        if (decision := self.decisions.latest(request)) is not None:
            decision.stored += objects


def _front(there: Sequence[bool]) -> int:
    return there.index(False) if False in there else len(there)
