"""What is loaded and what is computed: by what the tiers and the engine were measured at, and only the front of a
prefix."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine import FULL, WINDOW, contents, hashes, opened, put, spec

from kvcore.control.admission import ENOUGH, FAVOUR, MODELS, PROBE_S, LoadAdmission, Step
from kvcore.engine import CacheEngine, Space
from kvcore.l2.speed import ENOUGH as LOADS
from kvcore.l2.speed import REACH, LoadSpeed
from kvcore.l2.speed import WINDOW as LAST_LOADS
from kvcore.observe import Metrics

MIB = 1 << 20

# -- how fast a tier is ------------------------------------------------------------------------------------------------


def measured(*loads: tuple[int, float]) -> LoadSpeed:
    speed = LoadSpeed()
    for nbytes, seconds in loads:
        speed.loaded(nbytes, seconds)
    return speed


def line(nbytes: int, latency: float = 0.05, bandwidth: float = 1e9) -> float:
    return latency + nbytes / bandwidth


def test_nothing_is_said_before_enough_was_loaded() -> None:
    speed = LoadSpeed()
    for _ in range(LOADS):
        assert speed.seconds(MIB) == 0.0
        assert not speed.known
        speed.loaded(MIB, 1.0)
    assert speed.seconds(MIB) == pytest.approx(1.0)


def test_latency_and_bandwidth_are_found() -> None:
    speed = measured(*((n * MIB, line(n * MIB)) for n in range(1, 11)))
    assert speed.latency_s == pytest.approx(0.05)
    assert 1 / speed.seconds_per_byte == pytest.approx(1e9)
    assert speed.seconds(5 * MIB) == pytest.approx(line(5 * MIB))
    assert speed.seconds(0) == 0.0


def test_a_fifth_of_the_loads_may_be_anything() -> None:
    fate = random.Random(1)
    loads = [(n * MIB, line(n * MIB) * fate.uniform(0.95, 1.05)) for n in range(10, 30)]
    for i in range(0, 20, 5):
        loads[i] = (loads[i][0], 7.0)
    speed = measured(*loads)
    for n in (10, 20, 40):
        assert speed.seconds(n * MIB) == pytest.approx(line(n * MIB), rel=0.25)


def test_of_one_size_less_takes_less_and_more_no_longer() -> None:
    speed = measured(*[(MIB, 0.1)] * 10)
    assert speed.seconds(MIB // 2) == pytest.approx(0.05)
    assert speed.seconds(MIB) == speed.seconds(100 * MIB) == pytest.approx(0.1)


def test_far_beyond_what_was_seen_the_shorter_time_is_believed() -> None:
    speed = measured(*((n * MIB, line(n * MIB)) for n in range(1, 11)))
    most = round(10 * MIB * REACH)
    assert speed.seconds(most) == speed.seconds(1000 * most)
    assert speed.seconds(MIB // 400) == pytest.approx(speed.seconds(MIB // 4) / 100, rel=0.01)


def test_an_old_speed_is_forgotten() -> None:
    speed = measured(*[(MIB, 9.0)] * 50, *[(MIB, 0.1)] * LAST_LOADS)
    assert speed.seconds(MIB) == pytest.approx(0.1)


def test_a_fast_probe_begins_anew_and_a_slow_one_does_not() -> None:
    speed = measured(*[(MIB, 1.0)] * LAST_LOADS)
    speed.probed(MIB, 0.6)
    assert speed.seconds(MIB) == pytest.approx(1.0)
    speed.probed(MIB, 0.1)
    assert not speed.known


@given(
    st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(1e-6, 100)), min_size=1, max_size=40),
    st.lists(st.integers(0, 1 << 42), min_size=2, max_size=6),
)
def test_more_never_takes_less_and_no_time_is_negative(loads: list[tuple[int, float]], sizes: list[int]) -> None:
    speed = measured(*loads)
    answers = [speed.seconds(n) for n in sorted(sizes)]
    assert answers[0] >= 0
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(answers))


# -- what is loaded ----------------------------------------------------------------------------------------------------


class FakeTier:
    """Takes `latency` and then `pace` seconds a byte."""

    def __init__(self, name: str, latency: float, pace: float) -> None:
        self.name, self.latency, self.pace = name, latency, pace

    def load_seconds(self, nbytes: int) -> float:
        return self.latency + nbytes * self.pace


NEAR, FAR = FakeTier("near", 0.0, 0.001), FakeTier("far", 0.5, 0.1)


def admission(tokens_per_s: float | None = 100.0) -> LoadAdmission:
    made = LoadAdmission(Metrics())
    for _ in range(ENOUGH if tokens_per_s else 0):
        made.prefilled("m", 1000, 1000 / (tokens_per_s or 1))
    return made


def steps(*tiers: Any, tokens: int = 1, nbytes: int = 1) -> list[Step]:
    return [Step(tokens, [(tier, nbytes)] if tier else []) for tier in tiers]


def test_everything_is_loaded_while_the_engines_speed_is_unknown() -> None:
    assert admission(None).cut("m", steps(FAR, FAR)) == 2
    assert admission().cut("another model", steps(FAR, FAR)) == 2


def test_a_tier_slower_than_computing_is_not_loaded_from() -> None:
    assert admission().cut("m", steps(*[FAR] * 10)) == 0
    assert admission().cut("m", steps(*[NEAR] * 10)) == 10


def test_latency_pays_once_the_prefix_is_long_enough() -> None:
    tier = FakeTier("t", 1.0, 0.001)
    assert admission().cut("m", steps(*[tier] * 50)) == 0  # computed in half a second
    assert admission().cut("m", steps(*[tier] * 500)) == 500


def test_a_slow_tail_is_left_and_a_slow_front_takes_the_tail_with_it() -> None:
    assert admission().cut("m", steps(*[NEAR] * 6, *[FAR] * 6)) == 6
    assert admission().cut("m", steps(*[FAR] * 6, *[NEAR] * 6)) == 0
    assert admission().cut("m", steps(*[FAR] * 6, *[NEAR] * 1000)) == 1006  # the tail is worth the front


def test_what_lies_in_l1_costs_nothing() -> None:
    assert admission().cut("m", steps(None, None, FAR, None)) == 2
    assert admission().cut("m", steps(None, None, FAR, *[None] * 400)) == 403


@given(
    st.lists(st.tuples(st.sampled_from([NEAR, FAR, None]), st.integers(1, 300)), max_size=12),
    st.floats(1, 1e4),
)
def test_no_other_cut_would_save_more(run: list[tuple[Any, int]], speed: float) -> None:
    chosen = [Step(n, [(tier, n)] if tier else []) for tier, n in run]

    def saved(cut: int) -> float:
        by_tier: dict[Any, int] = {}
        for step in chosen[:cut]:
            for tier, n in step.loads:
                by_tier[tier] = by_tier.get(tier, 0) + n
        load = max((t.load_seconds(n) for t, n in by_tier.items()), default=0.0)
        return FAVOUR * sum(s.tokens for s in chosen[:cut]) / speed - load

    cut = admission(speed).cut("m", chosen)
    assert saved(cut) >= max(saved(n) for n in range(len(chosen) + 1)) - 1e-9 * (1 + abs(saved(cut)))


def test_of_a_long_prefix_the_cuts_at_which_the_tier_changes_are_seen() -> None:
    assert admission().cut("m", steps(*[NEAR] * 777, *[FAR] * 301)) == 777


def test_steps_of_few_tokens_say_little_about_the_speed() -> None:
    made = admission(None)
    for _ in range(20):
        made.prefilled("m", 16, 0.02)  # 800 a second: the step's fixed cost
        made.prefilled("m", 8192, 0.4)
    assert made.speed("m") == pytest.approx(20480)


def test_of_ever_new_models_the_speeds_of_the_latest_are_known() -> None:
    made = admission()
    for n in range(3 * MODELS):
        made.prefilled("m", 1000, 10.0)
        for _ in range(ENOUGH):
            made.prefilled(n, 1000, 1.0)
    assert made.speed("m") == pytest.approx(100.0)
    assert made.speed(0) is None
    assert made.speed(3 * MODELS - 1) == pytest.approx(1000.0)
    assert len(made._steps) == len(made._speeds) == MODELS


def test_garbage_is_no_speed() -> None:
    made = admission(None)
    for tokens, seconds in ((0, 1.0), (-5, 1.0), (5, 0.0), (5, -1.0), (5, float("nan")), (5, float("inf"))):
        for _ in range(2 * ENOUGH):
            made.prefilled("m", tokens, seconds)
    assert made.speed("m") is None


def test_a_refused_tier_is_probed_now_and_then() -> None:
    now = [100.0]
    made = LoadAdmission(Metrics(), lambda: now[0])
    assert not made.probe_due(FAR)  # it was measured a moment ago
    now[0] += PROBE_S
    assert made.probe_due(FAR)
    assert not made.probe_due(FAR)
    assert not made.probe_due(NEAR)
    now[0] += PROBE_S
    assert made.probe_due(FAR)


# -- in an engine ------------------------------------------------------------------------------------------------------

SLOW = "{{name: {0}, storage: {{plugin: faulty, storage: memory, latency: {1}, operations: [load]}}{2}}}"
CHUNKS = 8
COMPUTE_S = 0.05
"""What the engine takes to compute eight chunks: far more than memory does, far less than a slow tier."""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., tuple[CacheEngine, Space]]]:
    with ExitStack() as stack:

        def open_(tiers: str, *groups: Any) -> tuple[CacheEngine, Space]:
            engine = opened(tmp_path, f"lookup_timeout: 10s\nl2: [{tiers}]\n")
            stack.callback(engine.close)
            space = engine.register(spec(*groups))
            return engine, space

        yield open_


def filled(engine: CacheEngine, space: Space, groups: int = 1) -> list[bytes]:
    keys = hashes(CHUNKS)
    put(engine, space, keys, groups=groups)
    assert engine.drain() == 0
    return keys


def learn(engine: CacheEngine, space: Space, keys: list[bytes]) -> None:
    """Enough loads for the tiers' speeds, and then the engine's own."""
    for _ in range(LOADS):
        engine.clear(space)
        assert len(contents(engine, space, keys)) == len(keys)
    for _ in range(ENOUGH):
        engine.prefilled(space, CHUNKS * space.chunk_tokens, COMPUTE_S)
    engine.clear(space)


def asked(engine: CacheEngine, space: Space, keys: list[bytes]) -> tuple[int | None, dict[str, int]]:
    lookup = engine.lookup(space, keys)
    assert lookup.wait(20)
    answer = lookup.poll()
    engine.release(lookup)
    return answer, lookup.misses


def test_a_slow_tier_is_left_alone_once_both_speeds_are_known(make: Any) -> None:
    engine, space = make(SLOW.format("far", "150ms", ""))
    keys = filled(engine, space)
    learn(engine, space, keys)
    assert asked(engine, space, keys) == (0, {"slow_tier": CHUNKS})
    stats = engine.stats()
    assert stats['kvcore_miss_chunks_total{reason="slow_tier"}'] == CHUNKS
    assert stats["kvcore_prefill_tokens_per_second"] == pytest.approx(CHUNKS * space.chunk_tokens / COMPUTE_S)
    assert engine.l1.usage()["leases"] == 0


def test_a_fast_tier_goes_on_serving(make: Any) -> None:
    engine, space = make("{storage: memory}")
    keys = filled(engine, space)
    learn(engine, space, keys)
    assert contents(engine, space, keys) == list(range(1, CHUNKS + 1))


def test_read_always_is_always_read(make: Any) -> None:
    engine, space = make(SLOW.format("far", "150ms", ", read: always"))
    keys = filled(engine, space)
    learn(engine, space, keys)
    assert contents(engine, space, keys) == list(range(1, CHUNKS + 1))


def test_the_front_of_a_fast_tier_is_used_without_the_slow_tail(make: Any) -> None:
    engine, space = make("{name: near, storage: memory, promote: false}, " + SLOW.format("far", "150ms", ""))
    keys = filled(engine, space)
    near = engine.manager.tiers[0].storage._objects
    for key in [k for k in near if k.chunk_hash in keys[5:]]:
        del near[key]
    learn(engine, space, keys)
    assert contents(engine, space, keys) == [1, 2, 3, 4, 5]
    assert asked(engine, space, keys) == (5, {"slow_tier": 3})


def test_what_is_resident_is_used_though_the_rest_is_refused(make: Any) -> None:
    engine, space = make(SLOW.format("far", "150ms", ""))
    keys = filled(engine, space)
    learn(engine, space, keys)
    put(engine, space, keys[:3])
    assert asked(engine, space, keys) == (3, {"slow_tier": 5})


def test_a_model_with_windows_is_loaded_whole_or_not_at_all(make: Any) -> None:
    engine, space = make(SLOW.format("far", "150ms", ""), FULL, WINDOW)
    keys = filled(engine, space, groups=2)
    learn_all = [len(contents(engine, space, keys)) for _ in range(1)]
    assert learn_all[0] > CHUNKS
    for _ in range(LOADS):
        engine.clear(space)
        assert asked(engine, space, keys)[0] == CHUNKS
    for _ in range(ENOUGH):
        engine.prefilled(space, CHUNKS * space.chunk_tokens, COMPUTE_S)
    engine.clear(space)
    answer, misses = asked(engine, space, keys)
    assert answer == 0
    assert misses["slow_tier"] > CHUNKS


def test_a_tier_that_has_become_fast_is_found_out_and_used_again(make: Any) -> None:
    engine, space = make(SLOW.format("far", "150ms", ""))
    keys = filled(engine, space)
    learn(engine, space, keys)
    now = [time.monotonic()]
    engine.manager.admission._clock = lambda: now[0]
    assert asked(engine, space, keys)[0] == 0
    (tier,) = engine.manager.tiers
    slow = tier.storage.faults
    tier.storage.faults = slow.model_copy(update={"latency": 0.0})
    assert asked(engine, space, keys)[0] == 0  # nobody has looked yet
    now[0] += PROBE_S
    begun = time.monotonic()
    assert asked(engine, space, keys)[0] == 0  # it looks, and nobody waits for it
    while tier.load_seconds(MIB):
        assert time.monotonic() < begun + 10
        time.sleep(0.01)
    assert contents(engine, space, keys) == list(range(1, CHUNKS + 1))
    assert engine.l1.usage()["leases"] == 0
