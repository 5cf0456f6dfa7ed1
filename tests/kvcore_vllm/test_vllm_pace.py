"""How fast vLLM computes prompts, by steps that mostly do."""

from types import SimpleNamespace
from typing import Any

from kvcore_vllm.pace import IN_FLIGHT, Pace

SPACE: Any = object()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def output(**counts: int) -> Any:
    return SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()))


def request(computed: int, prompt: int) -> Any:
    return SimpleNamespace(space=SPACE, request=SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=prompt))


def timed(out: Any, states: dict[str, Any], seconds: float = 0.5, loads: bool = False) -> Any:
    clock = Clock()
    pace = Pace(clock)
    pace.begin(out, states, loads)
    clock.now += seconds
    return pace.end()


def test_a_step_of_prompts_is_told() -> None:
    states = {"a": request(0, 4000), "b": request(2000, 2100)}
    assert timed(output(a=400, b=100), states) == (SPACE, 500, 0.5)


def test_a_few_decodes_beside_do_not_matter_and_many_do() -> None:
    states = {"a": request(0, 400), "b": request(50, 50), "c": request(70, 70)}
    assert timed(output(a=400, b=1, c=1), states) == (SPACE, 402, 0.5)
    assert timed(output(a=4, b=8, c=8), states) is None


def test_what_says_nothing_of_computing_is_not_told() -> None:
    states = {"a": request(0, 4000), "b": request(50, 50)}
    assert timed(output(b=1), states) is None
    assert timed(output(), states) is None
    assert timed(output(unknown=400), states) is None
    assert timed(output(a=400), states, loads=True) is None
    assert timed(output(a=400), states, seconds=0.0) is None


def test_steps_that_overlap_are_timed_from_the_end_of_the_one_before() -> None:
    clock, states = Clock(), {"a": request(0, 4000)}
    pace = Pace(clock)
    pace.begin(output(a=400), states, False)
    clock.now += 0.1
    pace.begin(output(a=300), states, False)
    clock.now += 0.4
    assert pace.end() == (SPACE, 400, 0.5)
    clock.now += 0.25
    assert pace.end() == (SPACE, 300, 0.25)
    assert pace.end() is None


def test_a_step_whose_end_was_not_seen_is_forgotten() -> None:
    clock, states = Clock(), {"a": request(0, 4000)}
    pace = Pace(clock)
    for _ in range(3 * IN_FLIGHT):
        pace.begin(output(a=400), states, False)
    for _ in range(IN_FLIGHT):
        clock.now += 1
        assert pace.end() is not None
    assert pace.end() is None
