"""When conversations return: the rate at each age, learnt from those that did and those that did not."""

import math
from collections.abc import Iterable
from itertools import pairwise

FIRST_S = 0.05
RATIO = 1.25
BINS = 76
"""Ages up to `FIRST_S * RATIO ** BINS`, two weeks."""
ENOUGH = 8
"""So many conversations must have reached an age for anything to be said of it."""
KINDS = 3
"""A first turn that returns is another thing than a fifth."""
NEAR = 0.95
"""So near to the best time is good enough."""
_KEPT = 1024
_LOG = math.log(RATIO)
_EDGES = [0.0, *(FIRST_S * RATIO**i for i in range(1, BINS + 1))]
_WIDTHS = [b - a for a, b in pairwise(_EDGES)]


def kind(turns: int) -> int:
    """Which conversations have the same habits: by how many turns they have had."""
    return min(turns, KINDS) - 1


def bin_of(age_s: float) -> int:
    """Where an age stands."""
    return 0 if age_s < _EDGES[1] else min(BINS - 1, int(math.log(age_s / FIRST_S) / _LOG + 1e-9))


class Returns:
    """A rate for each kind and age, as a step function of the age. What is long past counts less and less."""

    def __init__(self) -> None:
        self._came = [[0.0] * BINS for _ in range(KINDS)]
        self._lost = [[0.0] * BINS for _ in range(KINDS)]
        self._risen = [[0.0] * (BINS + 1) for _ in range(KINDS)]
        """By kind, the integral of the rate from 0 to each edge."""
        self._best = [[0.0] * (BINS + 2) for _ in range(KINDS)]
        """By kind, the largest part of all conversations that return in one stay that begins at this edge or later."""
        self._within_s = 0.0

    def came(self, turns: int, gap_s: float) -> None:
        """A conversation with so many turns has returned after `gap_s`."""
        self._note(self._came, turns, gap_s)

    def lost(self, turns: int, age_s: float) -> None:
        """Of one that had not returned at this age, nothing more will be heard."""
        self._note(self._lost, turns, age_s)

    def update(self, waiting: Iterable[tuple[int, float]], within_s: float) -> None:
        """Learn, from what was noted and from those that may still return: their turns and ages. `within_s`: how long
        what is brought stays."""
        self._within_s = within_s
        still = [[0.0] * BINS for _ in range(KINDS)]
        for turns, age_s in waiting:
            still[kind(turns)][bin_of(age_s)] += 1
        each = zip(self._came, self._lost, still, self._risen, self._best, strict=True)
        for came, lost, open_, risen, best in each:
            beyond = 0.0
            rates = [0.0] * BINS
            for i in range(BINS - 1, -1, -1):
                ended = came[i] + lost[i] + open_[i]
                if beyond + ended >= ENOUGH:
                    rates[i] = came[i] / (_WIDTHS[i] * (beyond + ended / 2))
                beyond += ended
            for i, rate in enumerate(rates):
                risen[i + 1] = risen[i] + rate * _WIDTHS[i]
            for i in range(BINS, -1, -1):
                best[i] = max(best[i + 1], _part(risen, _EDGES[i], within_s))

    def chance(self, turns: int, age_s: float) -> float:
        """How likely one of this age returns while it would stay, as of the last `update`."""
        risen = self._risen[kind(turns)]
        return 1.0 - math.exp(_at(risen, age_s) - _at(risen, age_s + self._within_s))

    def ripe(self, turns: int, age_s: float) -> bool:
        """Is now the time to bring it? Later, it would be more likely to be asked for before, than to come in time."""
        k = kind(turns)
        return _part(self._risen[k], age_s, self._within_s) >= NEAR * self._best[k][bin_of(age_s) + 1]

    def _note(self, where: list[list[float]], turns: int, age_s: float) -> None:
        k = kind(turns)
        where[k][bin_of(age_s)] += 1
        if sum(self._came[k]) + sum(self._lost[k]) > _KEPT:
            for counts in (self._came[k], self._lost[k]):
                counts[:] = [n / 2 for n in counts]


def _part(risen: list[float], age_s: float, within_s: float) -> float:
    """The part of all that return between this age and the end of a stay that begins then."""
    return math.exp(-_at(risen, age_s)) - math.exp(-_at(risen, age_s + within_s))


def _at(risen: list[float], age_s: float) -> float:
    i = bin_of(age_s)
    part = min(1.0, max(0.0, (age_s - _EDGES[i]) / _WIDTHS[i]))
    return risen[i] + part * (risen[i + 1] - risen[i])
