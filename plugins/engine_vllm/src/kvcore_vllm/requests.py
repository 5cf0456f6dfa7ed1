"""What the scheduler's half remembers of one request."""

from collections.abc import Mapping
from typing import Any

from kvcore.api import KeySource
from kvcore.engine import Lookup, Space
from kvcore_vllm import _compat

MAX_SAVE_FAILURES = 3


class RequestState:
    """One request from its arrival to its end, preemptions included."""

    __slots__ = (
        "base", "hashes", "hit_sources", "load_failed", "loaded", "lookup", "request", "save_failures", "saved",
        "saves", "space",
    )  # fmt: skip

    def __init__(self, request: Any, space: Space) -> None:
        self.request = request
        self.space = space
        self.hashes: list[bytes] = []
        self.lookup: Lookup | None = None
        self.base = 0
        """Tokens that vLLM held itself when the lookup was last answered."""
        self.loaded = False
        """Some of its tokens were promised to vLLM."""
        self.load_failed = False
        """A load has failed: never offer a hit again, or vLLM may spin for ever."""
        self.saved = 0
        """Chunks for which a save was planned."""
        self.saves: set[int] = set()
        """Plans under way that read this request's blocks."""
        self.save_failures = 0
        self.hit_sources: dict[str, int] = {}

    @property
    def saving(self) -> bool:
        """May its KV be saved?"""
        return self.save_failures < MAX_SAVE_FAILURES

    def stop_saving(self) -> None:
        """Its KV is not to be kept any more."""
        self.save_failures = MAX_SAVE_FAILURES

    def extend_hashes(self, hash_tokens: int) -> list[bytes]:
        """The hashes of all full chunks of the tokens so far. `hash_tokens`: tokens per block hash of vLLM."""
        request, space = self.request, self.space
        block = space.spec.block_tokens
        full = request.num_tokens // space.chunk_tokens
        known = len(self.hashes)
        if full > known:
            ratio = block // hash_tokens
            hashes = request.block_hashes
            extras: Mapping[int, bytes] = {}
            if _compat.has_extras(request):
                extras = _compat.chunk_extras(request, space.chunk_tokens, range(known, full))
            source = KeySource(
                chunk_tokens=space.chunk_tokens,
                block_tokens=block,
                tokens=_compat.token_ids(request),
                block_hashes=hashes if ratio == 1 else hashes[ratio - 1 :: ratio],
                chunk_extra=extras,
            )
            self.hashes += space.hashes(source, self.hashes)
        return self.hashes
