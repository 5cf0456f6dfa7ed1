"""What the scheduler's half remembers of one request."""

from collections.abc import Mapping
from typing import Any

from kvcore.api import KeySource
from kvcore.engine import Asked, EngineLookup, Space
from kvcore_vllm import _compat
from kvcore_vllm.awaited import Awaited

MAX_SAVE_FAILURES = 3


class RequestState:
    """One request from its arrival to its end, preemptions included."""

    __slots__ = (
        "asked", "awaited", "base", "early", "gap", "hashes", "hit_sources", "kept", "load_failed", "loaded", "lookup",
        "noted", "request", "save_failures", "saved", "saved_arena", "saves", "space", "tenant",
    )  # fmt: skip

    def __init__(self, request: Any, space: Space, tenant: str) -> None:
        self.request = request
        self.space = space
        self.tenant = tenant
        self.hashes: list[bytes] = []
        self.lookup: EngineLookup | None = None
        self.awaited: Awaited | None = None
        """What another engine has promised and this one waits for."""
        self.base = 0
        """Tokens that vLLM held itself when the lookup was last answered."""
        self.early = 0
        """The chunks that it said are coming, if tiers still deliver them."""
        self.loaded = False
        """Some of its tokens were promised to vLLM."""
        self.load_failed = False
        """A load has failed: never offer a hit again, or vLLM may spin for ever."""
        self.asked: Asked | None = None
        """What the record says of it."""
        self.noted = False
        """It was noted that there was nothing to look up for it."""
        self.saved = 0
        """Chunks for which a save was planned, in `saved_arena`: in a new one nothing of it is left."""
        self.saved_arena = ""
        self.kept = 0
        """So many chunks from the first on found room in the cache, or were there; before chunk `gap` some of a window
        may be missing."""
        self.gap = 0
        self.saves: set[int] = set()
        """Plans under way that read this request's blocks."""
        self.save_failures = 0
        self.hit_sources: dict[str, int] = {}

    @property
    def saving(self) -> bool:
        """May its KV be saved?"""
        return self.save_failures < MAX_SAVE_FAILURES

    def begin_saving(self, arena: str) -> None:
        """Save all of it, from now on in this arena."""
        self.saved = self.kept = self.gap = 0
        self.saved_arena = arena

    def planned(self, first: int, last: int, skipped: Mapping[str, int]) -> None:
        """A save of the chunks `[first, last)` was planned; `skipped` are those left out, by reason."""
        self.saved = last
        if self.kept == first and not skipped.keys() - {"known", "no_block"}:
            self.kept = last
        if "no_block" in skipped:  # of a window that has moved on
            self.gap = last

    def save_failed(self, first: int) -> None:
        """A save from this chunk on has come to nothing."""
        self.saved = min(self.saved, first)
        self.kept = min(self.kept, first)

    def promisable(self) -> int:
        """Chunks from the first on that the cache has, or will have when the saves under way have ended."""
        window = max((w for w in self.space.windows if w is not None), default=0)
        return self.kept if not self.gap or self.kept - self.gap >= window else 0

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
