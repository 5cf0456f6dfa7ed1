"""When conversations return: what was learnt is what was so."""

import math
import random
from statistics import NormalDist

import pytest

from kvcore_prefetch.returns import ENOUGH, Returns


def learnt(gaps: list[float], lost: list[float], within_s: float, waiting: tuple[float, ...] = ()) -> Returns:
    returns = Returns()
    for gap in gaps:
        returns.came(1, gap)
    for age in lost:
        returns.lost(1, age)
    returns.update(((1, age) for age in waiting), within_s)
    return returns


@pytest.mark.parametrize("age", [1.0, 4.0, 6.0, 9.0])
@pytest.mark.parametrize("lost", [0, 400])
def test_the_chance_is_that_of_the_distribution(age: float, lost: int) -> None:
    rng, within = random.Random(1), 2.0
    came = [6 * rng.lognormvariate(0, 0.5) for _ in range(800)]
    returns = learnt(came, [1e5] * lost, within)
    gap = NormalDist(math.log(6), 0.5)
    there = 800 * (1 - gap.cdf(math.log(age))) + lost
    expected = 800 * (gap.cdf(math.log(age + within)) - gap.cdf(math.log(age))) / there
    assert returns.chance(1, age) == pytest.approx(expected, abs=0.08)


def test_those_that_may_still_return_count() -> None:
    came = [5.0] * 20
    assert learnt(came, [], 10.0).chance(1, 1.0) > 0.85
    assert learnt(came, [], 10.0, waiting=(100.0,) * 180).chance(1, 1.0) == pytest.approx(0.1, abs=0.02)
    assert learnt(came, [], 10.0, waiting=(1.0,) * 180).chance(1, 1.0) > 0.85  # they are as young


def test_of_few_nothing_is_said() -> None:
    assert learnt([5.0] * (ENOUGH - 1), [], 10.0).chance(1, 1.0) == 0
    assert learnt([5.0] * ENOUGH, [], 10.0).chance(1, 1.0) > 0.85
    returns = learnt([5.0] * 50, [], 10.0)
    assert returns.chance(2, 1.0) == 0  # another kind


def test_the_ripe_time_is_where_most_return_in_one_stay() -> None:
    rng = random.Random(2)
    returns = learnt([rng.gauss(20, 2) for _ in range(900)], [], 5.0)
    assert not returns.ripe(1, 5.0)
    assert not returns.ripe(1, 12.0)
    assert returns.ripe(1, 17.5)
    memoryless = learnt([rng.expovariate(0.1) for _ in range(900)], [], 5.0)
    assert memoryless.ripe(1, 0.0)


def test_what_is_long_past_is_outweighed() -> None:
    returns = Returns()
    for _ in range(2000):
        returns.came(1, 5.0)
    for _ in range(2000):
        returns.lost(1, 5000.0)
    returns.update((), 10.0)
    assert returns.chance(1, 1.0) < 0.4


@pytest.mark.parametrize("age", [0.0, 1e-9, 0.05, 1e6, 1e12])
def test_any_age_has_a_place(age: float) -> None:
    returns = learnt([age] * 20, [age] * 20, 1.0)
    assert 0 <= returns.chance(1, age) <= 1
    returns.ripe(1, age)
