"""A cache and its users in no time: L1 as an LRU of chunks, a tier that has all of them, and a clock of the test's."""

import heapq
import logging
import random
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Any

from kvcore.api import ObjectEvent, ObjectKey
from kvcore_prefetch.config import PrefetchConfig
from kvcore_prefetch.policy import NextTurns

NAMESPACE = b"n" * 16
TICK_S = 0.25
QUARTER = 4
"""What is brought and not used takes at most one part in so many."""
NBYTES = 100


class Users:
    """Conversations that begin at `starts_s` a second and go on after each turn with the chance `returns`, after `gap`
    seconds; each has `chunks` at first, and one more after each turn."""

    def __init__(self, seed: int, starts_s: float, returns: float, gap: Callable[[random.Random], float]) -> None:
        self.rng = random.Random(seed)
        self.starts_s, self.returns, self.gap = starts_s, returns, gap
        self._numbers = count()
        self._waiting: list[tuple[float, int, int]] = []

    def forget(self) -> None:
        """None of those that have begun comes back."""
        self._waiting.clear()

    def requests(self, begin: float, end: float, chunks: int = 8) -> list[tuple[float, list[bytes]]]:
        """Those of a time, in order."""
        at = begin
        while (at := at + self.rng.expovariate(self.starts_s)) < end:
            heapq.heappush(self._waiting, (at, next(self._numbers), chunks))
        found = []
        while self._waiting and self._waiting[0][0] < end:
            at, number, length = heapq.heappop(self._waiting)
            found.append((at, [b"%016d%016d" % (number, i) for i in range(length)]))
            if self.rng.random() < self.returns:
                heapq.heappush(self._waiting, (at + self.gap(self.rng), number, length + 1))
        return found


class Cache:
    """See above. With `policy=False` nothing is loaded ahead."""

    def __init__(self, chunks: int, policy: bool = True, **options: Any) -> None:
        self.policy = NextTurns(PrefetchConfig(**{"chunks": 20_000, **options}), logging.getLogger("kvcore"))
        self._policy_is_used = policy
        self._room = chunks
        self._l1: OrderedDict[bytes, bool] = OrderedDict()
        """Chunk -> was it brought and is not used? The one used longest ago first."""
        self.now = 0.0
        self.hits = self.asked = self.used = self.brought = 0
        """In chunks."""

    def run(self, requests: list[tuple[float, list[bytes]]]) -> None:
        """Serve them, and let the policy look in between."""
        for at, hashes in requests:
            while self.now + TICK_S < at:
                self.now += TICK_S
                free = 0.0 if len(self._l1) >= self._room else 0.5
                for conversation in self.policy.choose(self.now, free, lambda _: self._allowed() * NBYTES):
                    if self._policy_is_used:
                        self._bring(conversation.hashes)
            self._serve(at, hashes)

    def _serve(self, at: float, hashes: list[bytes]) -> None:
        self.now = at
        self.policy.turn(NAMESPACE, hashes, at)
        front = next((i for i, h in enumerate(hashes) if h not in self._l1), len(hashes))
        self.hits += front
        self.asked += len(hashes)
        self.used += sum(self._l1.get(h, False) for h in hashes)
        self._put(hashes, ahead=False)

    def _bring(self, hashes: list[bytes]) -> None:
        new = [h for h in hashes if h not in self._l1]
        if len(new) <= self._allowed():
            self.brought += len(new)
            self._put(hashes, ahead=True)

    def _allowed(self) -> int:
        return self._room // QUARTER - sum(self._l1.values())

    def _put(self, hashes: list[bytes], *, ahead: bool) -> None:
        came = [i for i, h in enumerate(hashes) if h not in self._l1]
        for chunk_hash in reversed(hashes):  # a head outlives its tail
            self._l1[chunk_hash] = ahead and (chunk_hash not in self._l1 or self._l1[chunk_hash])
            self._l1.move_to_end(chunk_hash)
        gone = [self._l1.popitem(last=False)[0] for _ in range(len(self._l1) - self._room)]
        parents = [b"", *hashes]
        self.policy.stored([_event(hashes[i], None if ahead else parents[i]) for i in came], self.now)
        self.policy.evicted([_event(h, None, "room") for h in gone], self.now)


def _event(chunk_hash: bytes, parent: bytes | None, reason: str = "") -> ObjectEvent:
    return ObjectEvent(ObjectKey(NAMESPACE, chunk_hash, 0), "l1", NBYTES, reason, parent)
