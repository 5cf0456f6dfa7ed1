"""One policy at one capacity: the trace through a real L1 that has no memory."""

import time
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from kvcore.api import EvictionPolicy
from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.cli.kit.heard import heard
from kvcore.l1 import L1, Arena, ObjectSpace
from kvcore_bench.simulate.trace import Trace

SLOT_BYTES = 4096
"""Of every block, whatever its real size: the least that L1 gives. Blocks have one size, so it does not matter."""
_REAP_EVERY = 1024


class Replayed(NamedTuple):
    """What came of it, in blocks. With a `fault` the other figures mean nothing."""

    hits: int
    stranded: int
    """Resident when asked for, but behind a missing block, so that they served nobody."""
    seconds: float
    fault: str | None = None


def hashes_of(trace: Trace) -> list[bytes]:
    """A chunk hash for each different block: spread like real ones, since policies may look at them."""
    return [blake2b(block.to_bytes(8, "little"), digest_size=32).digest() for block in range(trace.distinct)]


def replay(trace: Trace, hashes: Sequence[bytes], policy: EvictionPolicy, capacity: int) -> Replayed:
    """Send every request through an L1 with room for `capacity` blocks. A policy's fault ends it and is returned."""
    now = 0.0
    watched = _Watched(policy)
    l1 = L1(_NoMemory(capacity * SLOT_BYTES), watched, clock=lambda: now)
    space = watched.space = l1.space(b"simulate" * 2, 0, SLOT_BYTES)
    resident, name = space.objects, hashes.__getitem__
    hits = stranded = number = 0
    begun = time.perf_counter()
    with heard():  # L1 logs what is wrong with a policy; it is said once, with the result
        for number, (now, blocks) in enumerate(trace.requests(), 1):  # noqa: B007 - the clock reads `now`
            prompt = list(map(name, blocks))
            lease = l1.reserve_read(space, prompt)
            served = len(lease.objects)
            l1.end_read(lease)
            hits += served
            rest = prompt[served:]
            if rest:
                stranded += sum(map(resident.__contains__, rest))
                write, _, no_room = l1.reserve_write(space, rest)
                stored, _ = l1.finish_write(write)
                if no_room and len(stored) < capacity:  # nothing is leased, so all the others could have gone
                    watched.fault = watched.fault or "evict freed too little although blocks were left"
            if watched.fault:
                break
            if number % _REAP_EVERY == 0:
                l1.reap()
        seconds = time.perf_counter() - begun
        watched.close()
        l1.clear(space.namespace)  # objects are invisible to the collector of cycles
    if watched.fault:
        return Replayed(0, 0, 0.0, f"{watched.fault} (in request {number:,})")
    return Replayed(hits, stranded, seconds)


class _NoMemory(Arena):
    """An arena of numbers: L1 only places objects in it, and nobody reads them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def bump(self, slots: list[int]) -> None:
        """Nobody looks at generations."""


class _Watched(EvictionPolicy):
    """A policy, and what was first wrong with it. L1 itself lives with any fault, which here would hide it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self.space: ObjectSpace | None = None
        self.fault: str | None = None

    def close(self) -> None:
        """Let go of the policy, and so of what it knows."""
        self._policy = LruPolicy(None, None)

    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        self._call("insert", self._policy.insert, keys, sizes)

    def touch(self, keys: Sequence[Hashable]) -> None:
        self._call("touch", self._policy.touch, keys)

    def remove(self, keys: Sequence[Hashable]) -> None:
        self._call("remove", self._policy.remove, keys)

    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        victims: Any = self._call("evict", self._policy.evict, nbytes, pinned)
        if not isinstance(victims, list):
            self._wrong(f"evict returned a {type(victims).__name__}, not a list")
            return []
        assert self.space is not None
        resident = self.space.objects
        if len(set(victims)) < len(victims):
            self._wrong("evict named a key twice")
        unknown = sum(1 for key in victims if resident.get(getattr(key, "chunk_hash", b"")) is not key)
        if unknown:
            self._wrong(f"evict named {unknown:,} keys that are not resident")
        return victims

    def __len__(self) -> int:
        return len(self._policy)

    def _call(self, what: str, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except Exception as error:
            self._wrong(f"{what} raised {type(error).__name__}: {error}")
            raise

    def _wrong(self, text: str) -> None:
        self.fault = self.fault or text
