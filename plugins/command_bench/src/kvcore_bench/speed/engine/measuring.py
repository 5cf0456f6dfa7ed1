"""One run: every server asked the same, in turn."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcore.cli.kit.progress import Progress
from kvcore_bench.speed.engine.client import Api
from kvcore_bench.speed.engine.counters import Counts, counts, increase
from kvcore_bench.speed.engine.drive import Done, Round, drive
from kvcore_bench.speed.engine.subjects import EngineError, Subject
from kvcore_bench.speed.engine.summary import Result
from kvcore_bench.speed.engine.texts import Ruler, Texts, measured
from kvcore_bench.speed.engine.workloads import Ask, Workload

COUNTED_S = 1.5
"""vLLM takes a connector's numbers over once a second, in a step."""


@dataclass(frozen=True)
class Settings:
    """What is asked, and how.

    Args:
        seed: of the texts; each turn has its own from it. turns: how often, each with servers that are new.
        settle_s: between one round of the workload and the next.
        model: None: the first that the server names. key, chat, more, timeout_s: as of `Api`.
        say: tells the user something.
    """

    workload: Workload
    seed: str
    turns: int
    settle_s: float
    timeout_s: float
    model: str | None
    key: str
    chat: bool
    more: dict[str, Any]
    say: Callable[[str], None]


class Outcome(NamedTuple):
    """What a run has found, one result for each server, in the order in which they were named."""

    workload: Workload
    seed: str
    turns: int
    ruler: Ruler
    results: list[Result]

    def as_json(self) -> dict[str, Any]:
        """Without the machine."""
        return {
            "workload": self.workload.described(),
            "seed": self.seed,
            "repeat": self.turns,
            "tokens_per_word": round(self.ruler.tokens_per_word, 4),
            "subjects": [result.as_json() for result in self.results],
        }


def measure(subjects: Sequence[Subject], settings: Settings) -> Outcome:
    """Ask every server the workload, `turns` times, every other time in the opposite order. Raises `EngineError` for
    a server that does not come up or answers nothing."""
    rounds: dict[str, list[Round]] = {subject.name: [] for subject in subjects}
    counted: dict[str, Counts] = {subject.name: {} for subject in subjects}
    ruler: Ruler | None = None
    for turn in range(settings.turns):
        for subject in subjects if turn % 2 == 0 else reversed(subjects):
            with subject.up() as url:
                api = Api(
                    url, settings.model, key=settings.key, chat=settings.chat, more=settings.more,
                    timeout_s=settings.timeout_s,
                )  # fmt: skip
                seed = f"{settings.seed}/{turn}"
                found = _warmed(api, seed, subject.name)  # asked of each, so that no first request is slow
                ruler = ruler or found
                before = counts(api)
                rounds[subject.name] += _rounds(api, subject, settings, Texts(seed, ruler))
                for name, value in increase(before, _settled(api, seed)).items():
                    counted[subject.name][name] = counted[subject.name].get(name, 0.0) + value
    results = [Result(s.name, rounds[s.name], counted[s.name], s.command) for s in subjects]
    assert ruler is not None
    return Outcome(settings.workload, settings.seed, settings.turns, ruler, results)


def _warmed(api: Api, seed: str, name: str) -> Ruler:
    """Raises `EngineError` when the server does not answer."""

    def tokens_of(text: str) -> int | None:
        answer = api.ask([{"role": "user", "content": text}], 2)
        if answer.error:
            raise EngineError(f"{name} does not answer: {answer.error}")
        return answer.prompt

    try:
        api.find_model()
    except OSError as error:
        raise EngineError(f"{name} does not answer: {error}") from None
    return measured(f"{seed}/{name}", tokens_of)


def _rounds(api: Api, subject: Subject, settings: Settings, texts: Texts) -> list[Round]:
    asked: list[list[Ask]] = settings.workload.rounds(texts)
    done: list[Round] = []
    with Progress(f"{subject.name}, {settings.workload.name}", sum(map(len, asked)), "requests") as progress:

        def tell(each: Done) -> None:
            progress.add(1)
            if each.answer.error:
                progress.warn(f"{subject.name}: a request failed: {each.answer.error}")

        for number, asks in enumerate(asked):
            time.sleep(settings.settle_s if number else 0.0)
            done.append(drive(asks, api.ask, settings.workload.inflight, tell))
    answers = [d for r in done for d in r.done]
    settings.say(f"{subject.name}: {len(answers)} requests in {sum(r.seconds for r in done):.1f} s")
    return done


def _settled(api: Api, seed: str) -> Counts:
    """The counters, once they hold what was asked."""
    if not counts(api):
        return {}
    time.sleep(COUNTED_S)
    api.ask([{"role": "user", "content": Texts(seed, Ruler()).text("last", 8)}], 2)
    return counts(api)
