"""What each request has asked the store, and what it said. vLLM asks chunk by chunk, the store is asked in batches."""

import time
from collections.abc import Callable, Iterable, Mapping

Key = bytes
"""vLLM's `OffloadKey`: a block hash and, in the last four bytes, the KV cache group."""


class Question:
    """One request's chunks. The scheduler's thread asks; another answers, each chunk once.

    Attributes:
        request_id: of the request. tenant: whose it is; None: nobody's, so that nothing is found.
        fresh: chunks of which the store has not been asked yet.
        answers: chunk -> is it there; None while that is not known.
        due_s: when what is not known is given up, on the monotonic clock.
    """

    __slots__ = ("answers", "due_s", "fresh", "request_id", "tenant")

    def __init__(self, request_id: str, tenant: str | None) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.fresh: list[Key] = []
        self.answers: dict[Key, bool | None] = {}
        self.due_s = 0.0

    def answer(self, said: Mapping[Key, bool]) -> None:
        """What the store says. It comes too late for chunks that were given up."""
        for key, there in said.items():
            if self.answers.get(key, there) is None:
                self.answers[key] = there

    def lost(self, keys: Iterable[Key]) -> None:
        """These were there and could not be loaded. Never offered again, or the request would try for ever."""
        self.answers.update(dict.fromkeys(keys, False))


class Lookups:
    """The questions of all requests. For the scheduler's thread only.

    Args:
        ask: has the store asked, on another thread, and `Question.answer` told.
        patience_s: tells how much later what the store has not answered is absent.
    """

    def __init__(self, ask: Callable[[Question, list[Key]], None], patience_s: Callable[[], float]) -> None:
        self._ask = ask
        self._patience_s = patience_s
        self._questions: dict[str, Question] = {}
        self._fresh: list[Question] = []
        self.late = 0
        """Chunks that were given up."""

    def begin(self, request_id: str, tenant: str | None) -> Question:
        """A new request."""
        question = self._questions[request_id] = Question(request_id, tenant)
        return question

    def of(self, request_id: str) -> Question | None:
        """A request's question."""
        return self._questions.get(request_id)

    def look(self, question: Question, key: Key) -> bool | None:
        """Is this chunk there? None while that is not known."""
        try:
            answer = question.answers[key]
        except KeyError:
            if question.tenant is None:
                return False
            if not question.fresh:
                self._fresh.append(question)
            question.fresh.append(key)
            question.answers[key] = None
            return None
        if answer is None and not question.fresh and time.monotonic() >= question.due_s:
            open_ends = [k for k, known in question.answers.items() if known is None]
            question.lost(open_ends)
            self.late += len(open_ends)
            return False
        return answer

    def flush(self) -> None:
        """A step has asked all that it asks: hand it on, one batch per request."""
        fresh, self._fresh = self._fresh, []
        for question in fresh:
            keys, question.fresh = question.fresh, []
            question.due_s = time.monotonic() + self._patience_s()
            self._ask(question, keys)

    def end(self, request_id: str) -> None:
        """The request is over."""
        self._questions.pop(request_id, None)

    def forget(self) -> None:
        """Nothing that was said holds any more."""
        self._questions.clear()
        self._fresh.clear()
