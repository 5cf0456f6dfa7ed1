"""What the record behind `kvcore explain` costs in real vLLM: requests with it and without, in turn, in one engine.

    python benchmarks/record_cost.py --model DIR [--pairs 400] [--tokens 1460] [--cores 0|0-1]

Hot and cold prompts, each pair in random order. Prints, in Markdown, the medians and the median difference within a
pair (with the bounds that hold it in 95 of 100 resamples): of the calls that vLLM's scheduler makes to kvcore, and of
the time to first token.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm_here import Engine, add_arguments

CALLS = ("queued", "matched_tokens", "allocated", "hit_sources", "step", "end_step", "update", "finished")
"""The calls that vLLM's scheduler makes to kvcore for a request."""
RESAMPLES = 2000


class Took(NamedTuple):
    """Seconds of one request: in kvcore's half of the scheduler, and to the first token."""

    calls: float
    total: float


def main() -> None:
    arguments = argparse.ArgumentParser(description="Requests with the record and without, in turn.")
    add_arguments(arguments)
    arguments.add_argument("--pairs", default=400, type=int)
    arguments.add_argument("--tokens", default=1460, type=int)
    options = arguments.parse_args()
    engine = Recorded(options)
    document = engine.tokens(options.tokens - 21)
    engine.ask(document + engine.tokens(21))
    kinds: dict[str, tuple[int, Callable[[], list[int]]]] = {
        "hot": (options.pairs, lambda: document + engine.tokens(21)),
        "cold": (max(1, options.pairs // 20), lambda: engine.tokens(options.tokens)),
    }
    print("| | | without | with | difference | of it |\n|---|---|--:|--:|--:|--:|")
    for kind, (pairs, prompt) in kinds.items():
        took: dict[bool, list[Took]] = {True: [], False: []}
        for pair in range(pairs + 5):  # the first five are dropped
            for on in random.sample((True, False), 2):
                engine.record(on)
                engine.forget()
                one = engine.took(prompt())
                if pair >= 5:
                    took[on].append(one)
        for what, of in (("kvcore's calls", Took._fields.index("calls")), ("first token", Took._fields.index("total"))):
            without, with_ = [t[of] * 1e6 for t in took[False]], [t[of] * 1e6 for t in took[True]]
            differences = [b - a for a, b in zip(without, with_, strict=True)]
            base, (least, most) = statistics.median(without), bounds(differences)
            print(
                f"| {kind}, {pairs} pairs | {what} | {base:,.0f} us | {statistics.median(with_):,.0f} us | "
                f"{statistics.median(differences):.1f} us ({least:.1f} to {most:.1f}) | "
                f"{statistics.median(differences) / base:.2%} |"
            )


class Recorded(Engine):
    """An engine whose record is switched, and whose calls to kvcore are timed."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._in_calls = 0.0
        self._cache = self.half.engine
        self._kept = self._cache.decisions.most, self._cache.journal.most
        for name in CALLS:
            setattr(self.half, name, self._timed(getattr(self.half, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._in_calls += time.perf_counter() - began

        return timed

    def record(self, on: bool) -> None:
        """Whether lookups and what becomes of objects are on record from now on."""
        self._cache.decisions.most, self._cache.journal.most = self._kept if on else (0, 0)

    def took(self, prompt: list[int]) -> Took:
        """What a request takes."""
        self._in_calls = 0.0
        total = self.ask(prompt)
        return Took(self._in_calls, total)


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Between which the median lies in 95 of 100 resamples."""
    medians = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(RESAMPLES * 0.025)], medians[int(RESAMPLES * 0.975)]


if __name__ == "__main__":
    main()
