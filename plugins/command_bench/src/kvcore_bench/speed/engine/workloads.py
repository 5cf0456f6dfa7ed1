"""What is asked, in which order. Three workloads, each of a shape that LMCache publishes numbers for.

`LongDocQA` is its `long_doc_qa` and the `long-doc-qa` of `lmcache bench engine`: the same sizes, order and number at
once. Theirs repeats one word, ours are random words, as KV of one word repeated compresses like nothing that is served.
The round that asks each document for the first time is measured here; there it is the warm-up.

`MultiRoundChat` is its `multi-round-qa`: users who ask in turn at one common rate and wait for their own answers, with
the defaults of its README. There users come and go for as long as it runs; here each asks all its rounds, so that every
server is asked the same.

`SharedPrefix` splits a prompt as `prefix-suffix-tuner` of `lmcache bench engine` does, four fifths and one fifth. There
each prefix is asked twice, one request at a time, with one suffix for all; here each has many requests with suffixes of
their own, several at once.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from kvcore_bench.speed.engine.texts import Texts

Phase = Literal["first", "again"]
Order = Literal["random", "tile"]
_QUESTIONS = ("What is this about?", "Summarize the key points.", "What is the main topic?", "Give a brief overview.")


class Ask(NamedTuple):
    """One request.

    Args:
        phase: `first` when its prompt has nothing that an earlier one had (or, of a chat, only what all users share).
        says: what the user says.
        output: tokens of the answer, at most.
        talk: the conversation that it goes on; None: it stands alone.
        due_s: not before so many seconds after its round has begun.
    """

    phase: Phase
    says: str
    output: int
    talk: int | None = None
    due_s: float = 0.0


@dataclass(frozen=True)
class Workload(ABC):
    """Sizes are in tokens.

    Args:
        output: of an answer, at most. inflight: requests at once, at most.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    output: int
    inflight: int

    @abstractmethod
    def rounds(self, texts: Texts) -> list[list[Ask]]:
        """What is asked. A round begins when the one before has been answered."""

    def described(self) -> dict[str, Any]:
        """Its name and sizes."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class LongDocQA(Workload):
    """Long documents, and several questions about each."""

    name: ClassVar = "long-doc-qa"
    help: ClassVar = "long documents, each asked about several times"
    documents: int = 8
    length: int = 10_000
    questions: int = 2
    output: int = 128
    inflight: int = 3
    order: Order = "random"

    def rounds(self, texts: Texts) -> list[list[Ask]]:
        documents = [texts.text(f"document{i}", self.length) for i in range(self.documents)]
        asks = [
            [Ask("again" if q else "first", f"{d}\n\nQuestion {q}: {_question(q)}", self.output) for d in documents]
            for q in range(self.questions + 1)
        ]
        return [asks[0], _ordered([ask for question in asks[1:] for ask in question], self.order)]


@dataclass(frozen=True)
class MultiRoundChat(Workload):
    """Users who talk with the model in turn, behind a beginning that all share and a history of their own."""

    name: ClassVar = "multi-round-chat"
    help: ClassVar = "users who go on with their conversations, in turn"
    users: int = 10
    turns: int = 5
    system: int = 1000
    history: int = 2000
    question: int = 50
    output: int = 100
    qps: float = 0.5
    inflight: int = 64

    def rounds(self, texts: Texts) -> list[list[Ask]]:
        begin = texts.text("system", self.system)
        asks: list[Ask] = []
        for turn in range(self.turns):
            for user in range(self.users):
                says = texts.text(f"question{user}.{turn}", self.question)
                if turn == 0:
                    says = f"{begin}\n\n{texts.text(f'history{user}', self.history)}\n\n{says}"
                asks.append(Ask("again" if turn else "first", says, self.output, user, len(asks) / self.qps))
        return [asks]


@dataclass(frozen=True)
class SharedPrefix(Workload):
    """Long beginnings, each shared by many requests that go on differently."""

    name: ClassVar = "shared-prefix"
    help: ClassVar = "long beginnings that many requests share"
    prefixes: int = 4
    requests: int = 8
    length: int = 6400
    question: int = 1600
    output: int = 32
    inflight: int = 3
    order: Order = "random"

    def rounds(self, texts: Texts) -> list[list[Ask]]:
        prefixes = [texts.text(f"prefix{i}", self.length) for i in range(self.prefixes)]
        asks = [
            [
                Ask("again" if r else "first", f"{p}\n\n{texts.text(f'suffix{i}.{r}', self.question)}", self.output)
                for i, p in enumerate(prefixes)
            ]
            for r in range(self.requests)
        ]
        return [asks[0], _ordered([ask for request in asks[1:] for ask in request], self.order)]


WORKLOADS: Sequence[type[Workload]] = (LongDocQA, MultiRoundChat, SharedPrefix)


def _question(number: int) -> str:
    return _QUESTIONS[number % len(_QUESTIONS)]


def _ordered(asks: list[Ask], order: Order) -> list[Ask]:
    """As they stand (`tile`), or shuffled, the same way each time."""
    if order == "random":
        random.Random(len(asks)).shuffle(asks)  # noqa: S311 - an order
    return asks
