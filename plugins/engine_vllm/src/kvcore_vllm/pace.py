"""How fast vLLM computes prompts: what a load is measured against."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvcore.engine import Space
from kvcore_vllm.requests import RequestState

IN_FLIGHT = 4
"""More steps than are ever under way: one whose end was not seen is forgotten."""


class Prefilled(NamedTuple):
    """The arguments of `Engine.prefilled`."""

    space: Space
    tokens: int
    seconds: float


class _Step(NamedTuple):
    began: float
    tokens: int
    space: Space | None


class Pace:
    """Times steps from their plan, or from the end of the one before when they overlap, to their result."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=IN_FLIGHT)
        self._ended = 0.0

    def begin(self, output: Any, states: Mapping[str, RequestState], loads: bool) -> None:
        """A step is planned. One that mostly decodes, or `loads` before it computes, says nothing of computing."""
        counts: Mapping[str, int] = output.num_scheduled_tokens
        total = int(output.total_num_scheduled_tokens)
        space = None
        if total >= 2 * len(counts) and not loads:  # else all decode
            prefill = 0
            for req_id, tokens in counts.items():
                state = states.get(req_id)
                if state is not None and state.request.num_computed_tokens < state.request.num_prompt_tokens:
                    prefill += tokens
                    space = state.space
            if 2 * prefill < total:
                space = None
        self._steps.append(_Step(self._clock(), total, space))

    def end(self) -> Prefilled | None:
        """The oldest step under way has its result; what is to be told of it."""
        if not self._steps:
            return None
        step, now = self._steps.popleft(), self._clock()
        began, self._ended = max(step.began, self._ended), now
        return Prefilled(step.space, step.tokens, now - began) if step.space is not None and now > began else None
