"""What the requests on record have in common, worked out when somebody asks."""

import heapq
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from kvcore.observe import Decision
from kvcore.service.inspect import models as m
from kvcore.service.inspect.subject import Subject

KEPT_S = 2.0
"""So long an answer is good for whoever asks next."""
SLICE = 1000
"""Hashes that are looked at in one go, some 0.2 ms; then whoever waits for the interpreter has it."""


class _Prefix:
    """One chunk of some requests."""

    __slots__ = ("chunks", "found", "hits", "last", "requests")

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.requests = self.hits = self.found = 0
        self.last = 0.0


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
        prefixes=[_shown(subject, spaces, *found) for found in prefixes],
        tenants=_tenants(decisions, spaces, limit),
    )


def _prefixes(decisions: Sequence[Decision], limit: int) -> list[tuple[bytes, bytes, int, _Prefix]]:
    """Namespace, last hash, tokens of a chunk and counts of the shared prefixes: where fewer requests go on than came.

    A hash stands for all that is before it, so requests with a chunk in common have the same way to it.
    """
    spaces: dict[bytes, dict[bytes, _Prefix]] = {}
    looked = 0
    for d in decisions:
        known, answer = spaces.setdefault(d.namespace, {}), d.answer or 0
        for i, chunk_hash in enumerate(d.hashes, d.begin):
            found = known.get(chunk_hash)
            if found is None:
                found = known[chunk_hash] = _Prefix(i + 1)
            found.requests += 1
            found.hits += i < answer
            found.last = d.at
            looked += 1
            if looked % SLICE == 0:
                time.sleep(0)
    ends: dict[tuple[bytes, bytes], tuple[bytes, bytes, int, _Prefix]] = {}
    for d in decisions:
        known, answer = spaces[d.namespace], d.answer or 0
        for i, chunk_hash in enumerate(d.hashes):
            here = known[chunk_hash]
            if here.requests < 2:
                break
            going_on = known[d.hashes[i + 1]].requests if i + 1 < len(d.hashes) else 0
            if going_on < here.requests:
                here.found += min(here.chunks, answer)
                ends[d.namespace, chunk_hash] = (d.namespace, chunk_hash, d.chunk_tokens, here)
        time.sleep(0)
    return heapq.nlargest(limit, ends.values(), key=lambda e: e[2] * e[3].chunks * (e[3].requests - 1))


def _shown(
    subject: Subject,
    spaces: Mapping[bytes, tuple[str, str]],
    namespace: bytes,
    chunk_hash: bytes,
    chunk_tokens: int,
    found: _Prefix,
) -> m.PrefixModel:
    model, tenant = spaces.get(namespace, ("", ""))
    return m.PrefixModel(
        hash=chunk_hash.hex(),
        namespace=namespace.hex(),
        model=model,
        tenant=tenant,
        chunks=found.chunks,
        tokens=found.chunks * chunk_tokens,
        requests=found.requests,
        hits=found.hits,
        found=found.found / (found.requests * found.chunks),
        last=datetime.fromtimestamp(found.last, UTC),
        resident=_resident(subject, namespace, chunk_hash),
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
