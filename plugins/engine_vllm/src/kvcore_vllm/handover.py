"""Prefill and decode on different engines: what the one promises, and how the other waits for it.

The engine that computed a prompt returns `{"kvcore": {...}}` in the response's `kv_transfer_params`; a router passes it
on with the request to the engine that decodes. No KV and no address stands in it: both engines use the same server or
the same tiers, and the promise only says what will be there in a moment.
"""

import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcore.engine import Engine, Space
from kvcore_vllm.awaited import Awaited
from kvcore_vllm.requests import RequestState

KEY = "kvcore"
_promised: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Requests for which a promise was made: under vLLM's MultiConnector two kvcores may not both answer."""


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


class Handover:
    """Makes promises where `producing`, or when a request asks for one, and waits for those of others.

    Args:
        engine: to know whether there is a server, where it needs one.
        timeout_s: how long to wait without any progress.
        producing: this engine computes prompts for others to decode.
    """

    def __init__(self, engine: Engine, timeout_s: float, producing: bool) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._producing = producing
        self.counts = {f'kvcore_promises_total{{outcome="{x}"}}': 0.0 for x in ("kept", "broken", "foreign")}
        self.counts["kvcore_promise_wait_seconds_total"] = 0.0

    def begin(self, state: RequestState, hashes: Sequence[bytes]) -> None:
        """A request has come: is there something to wait for?"""
        promised = read(state.request.kv_transfer_params)
        if promised is None:
            return
        chunk_tokens = state.space.chunk_tokens
        chunks = promised.tokens // chunk_tokens
        if not 0 < chunks <= len(hashes) or promised.hash != hashes[chunks - 1].hex():
            self._count("foreign")
            return
        if any(window is not None for window in state.space.windows):  # a hit must leave a token to compute
            chunks = min(chunks, (state.request.num_tokens - 1) // chunk_tokens)
        state.awaited = Awaited(promised.space, chunks, self._timeout_s)

    def wait(self, state: RequestState, found: int) -> bool:
        """A lookup has found so many chunks: must the request wait on? Not for what is kept elsewhere, nor without a
        server."""
        awaited = state.awaited
        if awaited is None:
            return False
        foreign = state.space.namespace.hex() not in ("", awaited.space)  # a server may first have had to say it
        if not foreign and self._engine.descriptor() is not None and awaited.again(found):
            return True
        state.awaited = None
        self._count("foreign" if foreign else "kept" if found >= awaited.chunks else "broken")
        self.counts["kvcore_promise_wait_seconds_total"] += time.monotonic() - awaited.began
        return False

    def promise(self, state: RequestState) -> dict[str, Any] | None:
        """What a router passes on for a request that has ended."""
        params = state.request.kv_transfer_params
        asked = isinstance(params, dict) and bool(params.get("do_remote_decode"))
        chunks = state.promisable()
        if not chunks or not (self._producing or asked) or state.request in _promised:
            return None
        descriptor = self._engine.descriptor()
        if descriptor is None or descriptor["token"] != state.saved_arena:
            return None  # the server that had it is gone
        _promised.add(state.request)
        return promise(state.space, state.hashes, chunks, state.tenant)

    def _count(self, outcome: str) -> None:
        self.counts[f'kvcore_promises_total{{outcome="{outcome}"}}'] += 1
