"""How samples are taken and become rows. See the package's docstring for the method."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcore_bench.speed.rows import SMALLER_IS_BETTER, Row, Unit

Sampler = Callable[[], float]
"""Takes one sample, in the unit of its row."""


class Case(NamedTuple):
    """One row to measure.

    Args:
        limit: samples the floor, or the ceiling of a rate. None: there is none.
        peer: samples the peer's equivalent; returns None when the peer has failed.
    """

    name: str
    unit: Unit
    ours: Sampler
    limit: Callable[[], float | None] | None = None
    peer: Callable[[], float | None] | None = None
    note: str = ""


def _nothing() -> None:
    pass


def measure(cases: Sequence[Case], rounds: int) -> list[Row]:
    """Sample every case `rounds` times, in turn with its limit and its peer. The first round warms up and is dropped
    when there are more than two."""
    samples: list[list[tuple[float, float | None, float | None]]] = [[] for _ in cases]
    gc.collect()
    gc.freeze()  # what was imported is not for the collector to walk through in every sample
    try:
        for _ in range(rounds):
            for case, taken in zip(cases, samples, strict=True):
                ours = case.ours()
                limit = case.limit() if case.limit else None
                taken.append((ours, limit, case.peer() if case.peer else None))
    finally:
        gc.unfreeze()
    return [_row(case, taken[1:] if rounds > 2 else taken) for case, taken in zip(cases, samples, strict=True)]


def us_each(
    calls: Callable[[], object],
    each: int,
    *,
    repeats: int = 5,
    before: Callable[[], object] = _nothing,
    after: Callable[[], object] = _nothing,
) -> Sampler:
    """Microseconds of `calls()` divided by `each`: the best of `repeats` runs. `before` and `after` are not timed."""

    def sample() -> float:
        best = 1 << 62
        for _ in range(repeats):
            before()
            gc.collect()
            begun = time.perf_counter_ns()
            calls()
            best = min(best, time.perf_counter_ns() - begun)
            after()
        return best / each / 1000

    return sample


def rate(
    call: Callable[[], object],
    nbytes: int,
    *,
    repeats: int = 1,
    before: Callable[[], object] = _nothing,
    after: Callable[[], object] = _nothing,
) -> Sampler:
    """GB/s of `call()`, which handles `nbytes`: the best of `repeats` runs. `before` and `after` are not timed."""
    us = us_each(call, 1, repeats=repeats, before=before, after=after)
    return lambda: nbytes / us() / 1000


def absent(names: Iterable[tuple[str, Unit]], note: str) -> list[Row]:
    """Rows of something that is not installed."""
    return [Row(name, None, unit, note=note) for name, unit in names]


def _row(case: Case, samples: Sequence[tuple[float, float | None, float | None]]) -> Row:
    best = min if case.unit in SMALLER_IS_BETTER else max

    def beside(index: int) -> tuple[float | None, float | None]:
        pairs = [(s[0], other) for s in samples if (other := s[index]) is not None]
        if not pairs:
            return None, None
        return best(p[1] for p in pairs), statistics.median(p[0] / p[1] for p in pairs)

    return Row(case.name, best(s[0] for s in samples), case.unit, *beside(1), *beside(2), note=case.note)
