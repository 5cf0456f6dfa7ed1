"""The record of what requests were answered: the last of them, in memory, for whoever asks why.

One entry per lookup, written as it happens; all else is worked out when somebody asks. No text of a prompt is kept, and
its token ids only where the configuration says so (`inspect.tokens`). Without them a request that found nothing leaves
a mark of its first chunk: by it a prompt is known again that another salt or adapter keeps apart.
"""

import hashlib
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Container, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

MAX_HASHES = 131_072
"""So many chunk hashes are kept in all, some 10 MB of them, whatever the number of requests."""

MAX_WORD = 256
"""Characters that are kept of a request's id and of its adapter's name: clients choose them."""


class Asked(NamedTuple):
    """What an engine says of a request beside its chunks. All of it may be left out.

    Args:
        id: the engine's name for the request.
        tokens: how many its prompt has.
        ids: the ids of these, which nobody changes any more. They stay in this process.
        adapter: its LoRA's name.
        salt: a short hash of what separates its KV from others', see `salt_word`; never the salt itself.
        trace: the engine's W3C trace context: `traceparent`, `tracestate`.
    """

    id: str = ""
    tokens: int = 0
    ids: Sequence[int] | None = None
    adapter: str = ""
    salt: str = ""
    trace: Mapping[str, str] | None = None


NOBODY = Asked()
_MARK_KEY = os.urandom(32)
"""Of this process alone, and written nowhere: without it nobody can try out which tokens have a mark."""
_NONE: Mapping[str, int] = MappingProxyType({})


def salt_word(salt: str) -> str:
    """What is kept of a salt: eight letters that tell two of them apart; nothing of none."""
    return hashlib.sha256(b"kvcore.salt\0" + salt.encode(errors="surrogatepass")).hexdigest()[:8] if salt else ""


def tenant_shown(tenant: str, named: Container[str]) -> str:
    """A tenant for people: its name, where the configuration names it; else a short hash, for it may be a request's
    cache salt (then it is that of the salt), which nobody is to read from what is shown or logged."""
    return tenant if not tenant or tenant in named else f"#{salt_word(tenant)}"


def mark_of(ids: Sequence[int]) -> bytes:
    """What tells two beginnings of prompts apart, and says nothing else of them; empty for what are no token ids."""
    try:
        return hashlib.blake2b(array("q", ids), digest_size=16, key=_MARK_KEY).digest()
    except (TypeError, ValueError, OverflowError):
        return b""


def kept_word(text: Any, most: int = MAX_WORD) -> str:
    """What is kept of a name: so many characters at most, which can be written as UTF-8."""
    kept: str = text if type(text) is str and len(text) <= most else str(text)[:most]
    return kept if kept.isascii() else kept.encode(errors="replace").decode()


class Answer(NamedTuple):
    """That of a lookup which has no object of its own."""

    answer: int
    sources: Mapping[str, int]
    misses: Mapping[str, int]
    broke: str = ""
    blame: str = ""


class Answered(Protocol):
    """An answered lookup, see `EngineLookup`."""

    @property
    def answer(self) -> int | None: ...
    @property
    def sources(self) -> Mapping[str, int]: ...
    @property
    def misses(self) -> Mapping[str, int]: ...
    @property
    def broke(self) -> str: ...
    @property
    def blame(self) -> str: ...


class Decision(msgspec.Struct, eq=False, gc=False):
    """One lookup and what came of it. Chunks are numbered as in their request.

    Args:
        seq: its number, from 1. at: when it was asked, in seconds since the epoch.
        asked: what the engine said of the request, less its trace context: as long as clients like, and for spans.
        namespace: where its chunks were looked for; empty while no server has said it.
        hashes: of its chunks, from chunk `begin` on: at a server, those that the engine did not hold itself.
        first: the first chunk that the engine did not hold itself. chunk_tokens: of each chunk.
        answer: the chunks `[first, answer)` could be retrieved. None while tiers are asked.
        sources: where found objects were -> how many. misses: why others were not -> how many.
        broke: why chunk `answer` could not be had, when there is such a chunk: a reason of `kvcore_miss_chunks_total`,
            or `window` (the window of a layer before it was not there). blame: the tiers that are the cause, joined by
            commas, where that is known.
        seconds: from the question to the answer.
        retrieved: tokens that were read. stored: objects that were published for this request since.
        ids: the request's token ids until it is answered, where they are not kept. mark: of those of its first chunk,
            where not even that was found.
    """

    asked: Asked
    namespace: bytes
    hashes: Sequence[bytes]
    first: int
    chunk_tokens: int
    begin: int
    at: float
    seq: int = 0
    answer: int | None = None
    sources: Mapping[str, int] = _NONE
    misses: Mapping[str, int] = _NONE
    broke: str = ""
    blame: str = ""
    seconds: float = 0.0
    retrieved: int = 0
    stored: int = 0
    ids: Sequence[int] | None = None
    mark: bytes = b""

    def hash_of(self, chunk: int) -> bytes | None:
        """The hash of a chunk of the request; None where it is not on record."""
        at = chunk - self.begin
        return self.hashes[at] if 0 <= at < len(self.hashes) else None

    @property
    def chunks(self) -> int:
        """Whole chunks of the request, those included that its engine held itself."""
        return self.begin + len(self.hashes)

    def answered(self, lookup: Answered, seconds: float) -> None:
        """The lookup has been answered, in so long."""
        self.sources, self.misses, self.broke, self.blame = lookup.sources, lookup.misses, lookup.broke, lookup.blame
        self.seconds, self.answer = seconds, self.begin + (lookup.answer or 0)
        if self.ids is not None:
            if not self.answer and self.hashes:
                self.mark = mark_of(self.ids[: self.chunk_tokens])
            self.ids = None

    def lost(self, reason: str) -> None:
        """What was found can no longer be had, before it was retrieved."""
        self.answer, self.broke, self.blame = self.first, reason, ""


class Decisions:
    """The last `most` lookups, and no more than `MAX_HASHES` hashes of them. Thread-safe.

    Args:
        most: 0 keeps none.
        tokens: keep token ids, too.
    """

    def __init__(self, most: int, tokens: bool = False) -> None:
        self.most = most
        self.tokens = tokens
        self.last = 0
        """The number of the latest."""
        self.began = time.time()
        self._kept: deque[Decision] = deque()
        self._latest: dict[str, Decision] = {}
        self._hashes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def begin(
        self,
        asked: Asked | None,
        namespace: bytes,
        hashes: Sequence[bytes],
        first: int,
        chunk_tokens: int,
        begin: int = 0,
    ) -> Decision | None:
        """A lookup is being asked, of the chunks of a request from `begin` on, less the `first` of these; what to tell
        of it later. None when nothing is kept. `hashes` are kept as they are: nobody may change them."""
        if not self.most:
            return None
        marked = None
        if asked is None:
            asked = NOBODY
        else:
            name, ids, adapter = kept_word(asked[0]), asked[2], kept_word(asked[3])
            if not self.tokens:
                marked, ids = ids, None
            if name is not asked[0] or ids is not asked[2] or adapter is not asked[3] or asked[5]:
                asked = Asked._make((name, asked[1], ids, adapter, asked[4], None))
        kept, latest = self._kept, self._latest
        with self._lock:
            self.last = seq = self.last + 1
            decision = Decision(
                asked, namespace, hashes, begin + first, chunk_tokens, begin, time.time(), seq, ids=marked
            )
            kept.append(decision)
            latest[asked[0]] = decision
            self._hashes = held = self._hashes + len(hashes)
            while len(kept) > self.most or (held > MAX_HASHES and len(kept) > 1):
                gone = kept.popleft()
                self._hashes = held = held - len(gone.hashes)
                if latest.get(gone.asked[0]) is gone:
                    del latest[gone.asked[0]]
        return decision

    def latest(self, request_id: str) -> Decision | None:
        """The latest lookup of a request."""
        return self._latest.get(kept_word(request_id)) if request_id else None

    def of(self, request_id: str) -> list[Decision]:
        """All lookups of a request that are kept, the latest first.

        Where no id is exactly that one: those of which it is a part between dashes, for an engine adds to the id that
        its user knows (`chatcmpl-7f3a` is `chatcmpl-7f3a-0c1d2e3f` in vLLM).
        """
        if not request_id:
            return []
        request_id, kept = kept_word(request_id), self.since()[::-1]
        exact = [d for d in kept if d.asked.id == request_id]
        return exact or [d for d in kept if f"-{request_id}-" in f"-{d.asked.id}-"]

    def since(self, seq: int = 0, most: int | None = None) -> list[Decision]:
        """What was asked after number `seq`, in order, at most so many. Between `seq` and the first of them there may
        be some that have been forgotten: their numbers are missing."""
        with self._lock:
            skip = max(0, seq - self.last + len(self._kept))
            return list(islice(self._kept, skip, None if most is None else skip + most))
