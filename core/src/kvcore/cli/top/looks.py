"""Looks at several caches side by side: one that hangs holds up nobody but itself."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from kvcore.cli.kit.asking import LATE_S
from kvcore.cli.top.sample import Sample, Watch
from kvcore.service.inspect.client import ASK_S

PATIENCE_S = 1.0
"""So long a screen waits for answers before it is drawn."""


class _Question(NamedTuple):
    """What was asked of a cache, and when."""

    begun: float
    answer: "Future[Sample]"


class Looks:
    """Looks again and again. A cache that has not answered yet is not asked once more meanwhile."""

    def __init__(self) -> None:
        self._open: dict[Watch, _Question] = {}
        self._last: dict[Watch, Sample] = {}

    def once(self, watches: Sequence[Watch]) -> list[Sample]:
        """What each says. When one has said something, the others have `LATE_S` left."""
        asked = self._ask(watches)
        wait(asked, 2 * ASK_S, FIRST_COMPLETED)
        wait(asked, LATE_S)
        return self._samples(watches)

    def again(self, watches: Sequence[Watch]) -> list[Sample]:
        """What each says, within `PATIENCE_S`; of one that does not answer, what it said last, and since when it has
        said nothing."""
        wait(self._ask(watches), PATIENCE_S)
        return self._samples(watches)

    def _ask(self, watches: Sequence[Watch]) -> "list[Future[Sample]]":
        for gone in (self._last.keys() | self._open.keys()) - set(watches):
            self._last.pop(gone, None)
            self._open.pop(gone, None)
        for watch in watches:
            if watch not in self._open:
                answer: Future[Sample] = Future()
                self._open[watch] = _Question(time.monotonic(), answer)
                threading.Thread(target=_answer, args=(watch, answer), name="kvcore-ask", daemon=True).start()
        return [self._open[watch].answer for watch in watches]

    def _samples(self, watches: Sequence[Watch]) -> list[Sample]:
        for watch in watches:
            if self._open[watch].answer.done():
                self._last[watch] = self._open.pop(watch).answer.result()
        return [self._shown(watch) for watch in watches]

    def _shown(self, watch: Watch) -> Sample:
        label = watch.cache.label
        last = self._last.get(watch, Sample(label, None, None, None))
        question = self._open.get(watch)
        if question is None:
            return last
        silent_s = time.monotonic() - question.begun
        return last._replace(fault=f"{label} has not answered for {silent_s:.0f} s: see what its process is doing")


def _answer(watch: Watch, answer: "Future[Sample]") -> None:
    try:
        answer.set_result(watch.sample())
    except BaseException as error:  # a bug, which is to be seen where it is waited for
        answer.set_exception(error)
