"""What the requests on record have in common, worked out when somebody asks."""

import heapq
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from kvcore.observe import Decision
from kvcore.service.inspect import models as m
from kvcore.service.inspect.subject import Subject

KEPT_S = 2.0
"""So long an answer is good for whoever asks next."""
SLICE = 64
"""Requests that are looked at in one go, some 0.5 ms; then whoever waits for the interpreter has it."""


class _Prefix:
    """What some requests begin with: so many `chunks`, of which so many were `found` for all of them together."""

    __slots__ = ("chunk_hash", "chunk_tokens", "chunks", "found", "hits", "last", "namespace", "requests")

    def __init__(self, namespace: bytes, chunk_hash: bytes, chunks: int, chunk_tokens: int, requests: int) -> None:
        self.namespace = namespace
        self.chunk_hash = chunk_hash
        self.chunks = chunks
        self.chunk_tokens = chunk_tokens
        self.requests = requests
        self.found = self.hits = 0
        self.last = 0.0

    @property
    def saving(self) -> int:
        """Tokens that reuse of it can save."""
        return self.chunks * self.chunk_tokens * (self.requests - 1)


def hot(subject: Subject, query: m.HotQuery) -> m.HotModel:
    """The prefixes whose reuse saves most, and the tenants with most requests."""
    kept = subject.kept.get("hot")
    if kept is None or time.monotonic() - kept[0] > KEPT_S or kept[1] < query.limit:
        limit = max(query.limit, m.HotQuery().limit)
        kept = subject.kept["hot"] = (time.monotonic(), limit, _hot(subject, limit))
    found: m.HotModel = kept[2]
    return found.model_copy(update={"prefixes": found.prefixes[: query.limit], "tenants": found.tenants[: query.limit]})


def _hot(subject: Subject, limit: int) -> m.HotModel:
    decisions = subject.decisions.since()
    spaces = subject.spaces
    prefixes = _prefixes(decisions, limit)
    return m.HotModel(
        requests=len(decisions),
        since=datetime.fromtimestamp(decisions[0].at, UTC) if decisions else None,
        chunks=sum(d.chunks for d in decisions),
        own=sum(d.first for d in decisions),
        found=sum(max(0, (d.answer or 0) - d.first) for d in decisions),
        prefixes=[_shown(subject, spaces, found) for found in prefixes],
        tenants=_tenants(decisions, spaces, limit),
    )


def _prefixes(decisions: Sequence[Decision], limit: int) -> list[_Prefix]:
    """The shared prefixes: where fewer requests go on than came.

    A hash stands for all that is before it, so requests with a chunk in common have the same way to it. What is counted
    are hashes that were asked for: a server does not hear of those that an engine held itself.
    """
    counts: dict[bytes, Counter[bytes]] = {}
    for n, d in enumerate(decisions):
        counts.setdefault(d.namespace, Counter()).update(d.hashes)
        if n % SLICE == 0:
            time.sleep(0)
    known: dict[tuple[bytes, bytes], _Prefix] = {}
    headless = any(d.begin for d in decisions)
    for n, d in enumerate(decisions):
        count, answer = counts[d.namespace], d.answer or 0
        for at in _ends(d.hashes, count, grow=headless):
            chunk_hash = d.hashes[at]
            here = known.get((d.namespace, chunk_hash))
            if here is None:
                here = _Prefix(d.namespace, chunk_hash, d.begin + at + 1, d.chunk_tokens, count[chunk_hash])
                known[d.namespace, chunk_hash] = here
            here.found += min(here.chunks, answer)
            here.hits += answer >= here.chunks
            here.last = d.at
        if n % SLICE == 0:
            time.sleep(0)
    return heapq.nlargest(limit, known.values(), key=lambda prefix: prefix.saving)


def _ends(hashes: Sequence[bytes], count: Mapping[bytes, int], *, grow: bool) -> Iterator[int]:
    """The chunks behind which fewer requests go on, of those that several have. Along a request the counts get smaller,
    so each step is looked for by halves; unless they `grow` where others begin, whose fronts were not asked for."""
    at, last = 0, len(hashes) - 1
    if grow:
        numbers = [*(count[chunk_hash] for chunk_hash in hashes), 0]
        yield from (i for i in range(len(hashes)) if numbers[i] >= 2 and numbers[i + 1] < numbers[i])
        return
    while at <= last and (here := count[hashes[at]]) >= 2:
        low, high = at, last
        while low < high:
            middle = (low + high + 1) // 2
            if count[hashes[middle]] >= here:
                low = middle
            else:
                high = middle - 1
        yield low
        at = low + 1


def _shown(subject: Subject, spaces: Mapping[bytes, tuple[str, str]], found: _Prefix) -> m.PrefixModel:
    model, tenant = spaces.get(found.namespace, ("", ""))
    return m.PrefixModel(
        hash=found.chunk_hash.hex(),
        namespace=found.namespace.hex(),
        model=model,
        tenant=tenant,
        chunks=found.chunks,
        tokens=found.chunks * found.chunk_tokens,
        requests=found.requests,
        hits=found.hits,
        found=found.found / (found.requests * found.chunks),
        last=datetime.fromtimestamp(found.last, UTC),
        resident=_resident(subject, found.namespace, found.chunk_hash),
    )


def _resident(subject: Subject, namespace: bytes, chunk_hash: bytes) -> bool | None:
    if subject.manager is None or subject.manager.arena is None:
        return None
    tables = [s for s in list(subject.manager.layouts) if s.namespace == namespace]
    return any(chunk_hash in table.objects for table in tables)


def _tenants(
    decisions: Sequence[Decision], spaces: Mapping[bytes, tuple[str, str]], limit: int
) -> list[m.TenantTrafficModel]:
    sums: dict[str, list[int]] = {}
    for d in decisions:
        tenant = spaces.get(d.namespace, ("", ""))[1]
        counts = sums.setdefault(tenant, [0, 0, 0, 0])
        for i, value in enumerate((1, d.chunks, d.answer or 0, d.retrieved)):
            counts[i] += value
    most = heapq.nlargest(limit, sums.items(), key=lambda item: item[1][0])
    return [
        m.TenantTrafficModel(tenant=t, requests=n, chunks=chunks, found=found, retrieved=retrieved)
        for t, (n, chunks, found, retrieved) in most
    ]
