"""The numbers of a run, from its requests."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvcore_bench.speed.engine.client import Answer
from kvcore_bench.speed.engine.counters import Counts, behind_share, reused_share
from kvcore_bench.speed.engine.drive import Done, Round
from kvcore_bench.speed.engine.workloads import Phase

PERCENTILES = (50, 90, 99)
LEAST_REUSED = 0.5
"""Where less of the prompts was reused, what a reused token costs is a small difference of large numbers: noise."""
PHASES: tuple[Phase, ...] = ("first", "again")


class Spread(NamedTuple):
    """How some times are spread, in seconds."""

    mean: float
    least: float
    most: float
    p50: float
    p90: float
    p99: float

    def as_json(self) -> dict[str, float]:
        """Seconds, to the microsecond."""
        return {name: round(value, 6) for name, value in self._asdict().items()}


class Numbers(NamedTuple):
    """Of the requests of one phase, or of all. What failed is counted and is in no other number.

    Args:
        seconds: from the first request's start to the last one's end.
        itl: None when no answer had two pieces of text.
        prompt, computed, reused: tokens; the last two are None when the server does not tell.
        output: tokens of the answers, or their pieces of text where the server does not count.
        late_s: how long after it was due a request began, the latest of them.
    """

    requests: int
    failed: int
    seconds: float
    ttft: Spread | None
    itl: Spread | None
    whole: Spread | None
    prompt: int
    computed: int | None
    reused: int | None
    output: int
    late_s: float

    @property
    def reused_share(self) -> float | None:
        """Of the prompts' tokens."""
        return self.reused / self.prompt if self.reused is not None and self.prompt else None

    def as_json(self) -> dict[str, Any]:
        """Seconds, tokens and shares."""
        spreads = {
            f"{n}_s": s and s.as_json() for n, s in (("ttft", self.ttft), ("itl", self.itl), ("e2e", self.whole))
        }
        rate = 1 / self.seconds if self.seconds else 0.0
        return {
            "requests": self.requests,
            "failed": self.failed,
            "seconds": round(self.seconds, 3),
            **spreads,
            "prompt_tokens": self.prompt,
            "computed_tokens": self.computed,
            "reused_tokens": self.reused,
            "reused_share": _rounded(self.reused_share, 4),
            "output_tokens": self.output,
            "prompt_tokens_per_s": round(self.prompt * rate, 1),
            "output_tokens_per_s": round(self.output * rate, 1),
            "requests_per_s": round((self.requests - self.failed) * rate, 4),
            "late_s": round(self.late_s, 3),
        }


class Cost(NamedTuple):
    """Microseconds of TTFT for a token. None: nothing of the kind was measured."""

    computed_us: float | None
    reused_us: float | None

    def as_json(self) -> dict[str, float | None]:
        """Microseconds."""
        return {name: _rounded(value, 3) for name, value in self._asdict().items()}


class Result(NamedTuple):
    """One server's.

    Args:
        name: of the server. rounds: of all turns. counters: what the engine counted meanwhile.
        command: how it was started; empty when it ran already.
    """

    name: str
    rounds: list[Round]
    counters: Counts
    command: str = ""

    def numbers(self, phase: Phase | None = None) -> Numbers:
        """Of a phase, or of everything."""
        rounds = [Round([d for d in r.done if phase in (None, d.ask.phase)], r.seconds) for r in self.rounds]
        return numbers(rounds)

    def cost(self) -> Cost:
        """See the package's docstring."""
        return cost(self.numbers("first"), self.numbers("again"))

    def reused_share(self) -> float | None:
        """Of all prompts, by the answers or else by the engine's counters."""
        told = self.numbers().reused_share
        return told if told is not None else reused_share(self.counters)

    def as_json(self) -> dict[str, Any]:
        """Everything but the texts."""
        return {
            "name": self.name,
            "command": self.command,
            "phases": {p: self.numbers(p).as_json() for p in PHASES},
            "all": {**self.numbers().as_json(), "reused_share": _rounded(self.reused_share(), 4)},
            "cost": self.cost().as_json(),
            "behind_share": _rounded(behind_share(self.counters), 4),
            "counters": self.counters,
            "requests": [_request(number, d) for number, r in enumerate(self.rounds) for d in r.done],
        }


def numbers(rounds: Sequence[Round]) -> Numbers:
    """Of these requests. The time between rounds counts for nobody."""
    done = [d for r in rounds for d in r.done]
    good = [d.answer for d in done if not d.answer.error]
    told = [a for a in good if a.cached is not None and a.prompt is not None]
    prompt = sum(a.prompt or 0 for a in good)
    reused = sum(a.cached or 0 for a in told) if told and len(told) == len(good) else None
    return Numbers(
        requests=len(done),
        failed=len(done) - len(good),
        seconds=sum(_seconds(r.done) for r in rounds),
        ttft=spread(a.first_s for a in good if a.first_s is not None),
        itl=spread(gap for a in good for gap in a.gaps_s),
        whole=spread(a.whole_s for a in good),
        prompt=prompt,
        computed=None if reused is None else prompt - reused,
        reused=reused,
        output=sum(_output(a) for a in good),
        late_s=max((d.begun_s - d.ask.due_s for d in done if d.ask.due_s), default=0.0),
    )


def cost(first: Numbers, again: Numbers) -> Cost:
    """Of a computed and of a reused token."""
    if not (first.ttft and first.computed):
        return Cost(None, None)
    computed_us = first.ttft.mean * (first.requests - first.failed) / first.computed * 1e6
    if not again.ttft or (again.reused_share or 0) < LEAST_REUSED or again.computed is None or not again.reused:
        return Cost(computed_us, None)
    all_us = again.ttft.mean * (again.requests - again.failed) * 1e6
    return Cost(computed_us, (all_us - again.computed * computed_us) / again.reused)


def spread(seconds: Iterable[float]) -> Spread | None:
    """None of nothing."""
    found = sorted(seconds)
    if not found:
        return None
    return Spread(statistics.fmean(found), found[0], found[-1], *(percentile(found, p) for p in PERCENTILES))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in order, between the two that lie next to it in proportion."""
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _seconds(done: Sequence[Done]) -> float:
    if not done:
        return 0.0
    return max(d.begun_s + d.answer.whole_s for d in done) - min(d.begun_s for d in done)


def _output(answer: Answer) -> int:
    return answer.output if answer.output is not None else len(answer.gaps_s) + (1 if answer.text else 0)


def _request(number: int, done: Done) -> dict[str, Any]:
    answer = done.answer
    return {
        "round": number,
        "phase": done.ask.phase,
        "talk": done.ask.talk,
        "begun_s": round(done.begun_s, 4),
        "ttft_s": _rounded(answer.first_s, 6),
        "e2e_s": round(answer.whole_s, 6),
        "prompt_tokens": answer.prompt,
        "reused_tokens": answer.cached,
        "output_tokens": _output(answer),
        "error": answer.error,
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
