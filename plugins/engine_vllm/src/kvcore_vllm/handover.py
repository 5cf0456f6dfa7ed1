"""Prefill and decode on different engines: what the one promises, and how the other waits for it.

The engine that computed a prompt returns `{"kvcore": {...}}` in the response's `kv_transfer_params`; a router passes it
on with the request to the engine that decodes. No KV and no address stands in it: both engines use the same server or
the same tiers, and the promise only says what will be there in a moment.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcore.engine import Space

KEY = "kvcore"
FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.05


class Promise(NamedTuple):
    """The first `tokens` of the prompt are, or will soon be, in the cache.

    Args:
        space: the namespace, as hex: another model's, layout's or tenant's KV is of no use.
        tokens: a whole number of chunks.
        hash: of the last of these chunks, as hex: it depends on all tokens before it.
        tenant: whose it is.
    """

    space: str
    tokens: int
    hash: str
    tenant: str = ""


def promise(space: Space, hashes: Sequence[bytes], chunks: int, tenant: str) -> dict[str, Any]:
    """What the producer returns for the first `chunks` of a request. Plain values: it travels as JSON."""
    last = hashes[chunks - 1].hex()
    return {KEY: Promise(space.namespace.hex(), chunks * space.chunk_tokens, last, tenant)._asdict()}


def read(params: Any) -> Promise | None:
    """The promise in a request's `kv_transfer_params`, which come from outside; None where there is no valid one."""
    given = params.get(KEY) if isinstance(params, dict) else None
    if not isinstance(given, dict) or given.keys() - set(Promise._fields):
        return None
    try:
        found = Promise(**given)
    except TypeError:  # a part is missing
        return None
    texts = (found.space, found.hash, found.tenant)
    valid = all(isinstance(text, str) for text in texts) and type(found.tokens) is int and found.tokens > 0
    return found if valid else None


class Awaited:
    """A consumer's patience with one promise: lookups with growing pauses, until all is there or nothing comes.

    Args:
        space: the namespace in which it was given, as hex.
        chunks: how many were promised.
        timeout_s: how long to wait without any progress.
    """

    def __init__(self, space: str, chunks: int, timeout_s: float) -> None:
        self.space = space
        self.chunks = chunks
        self.began = time.monotonic()
        self._timeout_s = timeout_s
        self._until = self.began + timeout_s
        self._best = 0
        self._pause = FIRST_PAUSE_S
        self._next = self.began

    def again(self, found: int) -> bool:
        """A lookup has found this many chunks: is another one worth it, after a pause?"""
        now = time.monotonic()
        if found > self._best:
            self._best = found
            self._pause = FIRST_PAUSE_S
            self._until = now + self._timeout_s
        if found >= self.chunks or now >= self._until:
            return False
        self._next = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        return True

    @property
    def due_s(self) -> float:
        """Seconds until the next lookup; at most 0 when it is time."""
        return self._next - time.monotonic()
