"""Asks a workload: each request when it is due, so many at once, each conversation in its order."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore_bench.speed.engine.client import Answer, Message
from kvcore_bench.speed.engine.workloads import Ask


class Done(NamedTuple):
    """A request that is over. `begun_s`: after its round began."""

    ask: Ask
    begun_s: float
    answer: Answer


class Round(NamedTuple):
    """Its requests in the order in which they were over, and how long it took."""

    done: list[Done]
    seconds: float


class _Talk:
    """A conversation. One request at a time has it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.free = threading.Event()
        self.free.set()


def drive(
    asks: Sequence[Ask], send: Callable[[Sequence[Message], int], Answer], inflight: int, tell: Callable[[Done], None]
) -> Round:
    """All of them, from first to last: who waits for a place, or for the answer before, holds up those behind.

    Args:
        send: asks the server; called in threads.
        tell: hears of each that is over, in threads, one at a time.
    """
    places, done, lock = threading.Semaphore(inflight), list[Done](), threading.Lock()
    talks: dict[int, _Talk] = {}

    def one(ask: Ask, talk: _Talk) -> None:
        said = [*talk.messages, {"role": "user", "content": ask.says}]
        begun_s = time.monotonic() - begun
        answer = send(said, ask.output)
        if not answer.error:
            talk.messages = [*said, {"role": "assistant", "content": answer.text}]
        with lock:
            done.append(Done(ask, begun_s, answer))
            tell(done[-1])
        talk.free.set()
        places.release()

    threads = []
    begun = time.monotonic()
    for ask in asks:
        time.sleep(max(0.0, begun + ask.due_s - time.monotonic()))
        talk = _Talk() if ask.talk is None else talks.setdefault(ask.talk, _Talk())
        talk.free.wait()
        talk.free.clear()
        places.acquire()
        thread = threading.Thread(target=one, args=(ask, talk), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return Round(done, time.monotonic() - begun)
