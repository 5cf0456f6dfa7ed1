"""The prefixes that requests on record have in common, as a tree: worked out when somebody asks, from the hashes that
the record keeps as they came.

A chunk's hash stands for all that is before it too, so where two requests have the same hash they have the same prefix.
Requests are sorted by their hashes, and neighbours compared, in C: what it costs depends on how many there are, hardly
on how long they are.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from pydantic import Field

from kvcore.engine import CacheEngine
from kvcore.observe.decisions import Decision, tenant_shown
from kvcore.service.http.models import MAX_PAGE
from kvcore.service.inspect.clearing import spaces_of
from kvcore.service.inspect.models import Hex, Model, Namespace


class PrefixesQuery(Model):
    """Of which namespace, and how much of it."""

    namespace: Namespace | None = None
    """Hexadecimal. Default: the one with most requests on record."""
    limit: int = Field(default=400, ge=1, le=MAX_PAGE)
    """Most branches of the answer: those that most requests have come first."""


class BranchModel(Model):
    """A run of chunks that the same requests have."""

    parent: int | None
    """The branch that it goes on from, as an index into the list; None: it begins a prompt, or what the engine itself
    held of it is not on record."""
    hash: Hex
    """Of its last chunk: it stands for the whole prefix."""
    first: int
    """Its first chunk, counted from the front of the prompt."""
    chunks: int
    requests: int
    """Requests on record that have all of it."""
    last: datetime
    """When the last of them was asked for."""
    resident: int
    """Chunks of it that are in L1, in any group."""
    nbytes: int
    """Bytes of L1 that these take."""


class RecordedModel(Model):
    """A namespace with requests on record."""

    namespace: Namespace
    model: str
    """Empty: no engine uses it just now."""
    tenant: str
    requests: int


class PrefixTreeModel(Model):
    """What the requests on record of a namespace have in common."""

    namespace: str
    """Hexadecimal; empty when nothing is on record."""
    chunk_tokens: int
    requests: int | None
    """On record, of this namespace; None: the record is off (`inspect.requests: 0`)."""
    since: datetime | None
    """When the oldest of them was asked for."""
    nodes: list[BranchModel]
    """Parents before their children."""
    cut: int
    """Branches beyond `limit`."""
    other_objects: int
    """Objects of the namespace in L1 that are of no request on record."""
    other_bytes: int
    namespaces: list[RecordedModel]
    """All that have requests on record; those with most come first."""


class _Request(NamedTuple):
    begin: int
    hashes: Sequence[bytes]
    at: float


class _Branch:
    """Chunks `[first, end)` of the requests `[low, high)` in sorted order."""

    __slots__ = ("end", "first", "high", "low", "parent")

    def __init__(self, parent: "_Branch | None", first: int, end: int, low: int) -> None:
        self.parent, self.first, self.end, self.low, self.high = parent, first, end, low, low


def prefixes(engine: CacheEngine, query: PrefixesQuery) -> PrefixTreeModel:
    """The tree of one namespace. From any thread; a tenth of a second at most, for all that a record can hold."""
    decisions = [d for d in engine.decisions.since() if d.hashes and d.namespace]
    counted = Counter(d.namespace for d in decisions)
    most = counted.most_common(1)
    namespace = bytes.fromhex(query.namespace) if query.namespace is not None else most[0][0] if most else b""
    mine = [d for d in decisions if d.namespace == namespace]
    requests = sorted(joined(mine), key=lambda r: (r.begin, r.hashes))
    branches = tree(requests)
    kept = sorted(branches, key=lambda b: (b.low - b.high, b.first))[: query.limit]  # parents before children
    tables = [s for s in list(engine.manager.layouts) if s.namespace == namespace]
    shown: dict[int, int] = {}
    nodes: list[BranchModel] = []
    for branch in kept:
        some = _hashes(requests[branch.low], branch)
        here = [[h for h in some if h in table.objects] for table in tables]
        shown[id(branch)] = len(nodes)
        nodes.append(
            BranchModel(
                parent=None if branch.parent is None else shown[id(branch.parent)],
                hash=some[-1].hex(),
                first=branch.first,
                chunks=branch.end - branch.first,
                requests=branch.high - branch.low,
                last=_when(max(r.at for r in requests[branch.low : branch.high])),
                resident=len(set().union(*here)),
                nbytes=sum(len(found) * table.slot_bytes for found, table in zip(here, tables, strict=True)),
            )
        )
    known = set().union(*(r.hashes for r in requests))
    other = [sum(1 for h in list(table.objects) if h not in known) for table in tables]
    return PrefixTreeModel(
        namespace=namespace.hex(),
        chunk_tokens=mine[-1].chunk_tokens if mine else 0,
        requests=len(mine) if engine.decisions.most else None,
        since=_when(mine[0].at) if mine else None,
        nodes=nodes,
        cut=len(branches) - len(nodes),
        other_objects=sum(other),
        other_bytes=sum(n * table.slot_bytes for n, table in zip(other, tables, strict=True)),
        namespaces=_recorded(engine, counted),
    )


def joined(decisions: Iterable[Decision]) -> list[_Request]:
    """The requests with as much of their front as is on record: of what an engine held itself, a server is not told,
    but another request may have been looked up with it."""
    found: list[_Request] = []
    for d in sorted(decisions, key=lambda d: d.begin):
        begin, hashes = d.begin, d.hashes
        if begin:
            for other in found:
                at = begin - other.begin
                if 0 < at < len(other.hashes) and other.hashes[at] == hashes[0]:
                    begin, hashes = other.begin, [*other.hashes[:at], *hashes]
                    break
        found.append(_Request(begin, hashes if isinstance(hashes, list) else list(hashes), d.at))
    return found


def tree(requests: Sequence[_Request]) -> list[_Branch]:
    """The branches of sorted requests, parents before children."""
    found: list[_Branch] = []
    path: list[_Branch] = []  # to the request before
    for i, request in enumerate(requests):
        end = request.begin + len(request.hashes)
        common = request.begin + _common(requests[i - 1], request) if i else request.begin
        while path and path[-1].first >= common:
            path.pop()
        if path and path[-1].end > common:  # it forks here
            _split(found, path, common)
        if common < end:
            path.append(_Branch(path[-1] if path else None, max(common, request.begin), end, i))
            found.append(path[-1])
        for branch in path:
            branch.high = i + 1
    return found


def _split(found: list[_Branch], path: list[_Branch], at: int) -> None:
    """Let the last branch of `path` end at chunk `at`, and what was behind it go on from there."""
    head = path[-1]
    tail = _Branch(head, at, head.end, head.low)
    tail.high, head.end = head.high, at
    place = found.index(head)
    for branch in found[place + 1 :]:
        if branch.parent is head:
            branch.parent = tail
    found.insert(place + 1, tail)


def _common(a: _Request, b: _Request) -> int:
    """How many chunks the two have in common from their front on."""
    if a.begin != b.begin:
        return 0
    low, high = 0, min(len(a.hashes), len(b.hashes))
    while low < high:  # slices are compared in C
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a.hashes[low:middle] == b.hashes[low:middle] else (low, middle - 1)
    return low


def _hashes(request: _Request, branch: _Branch) -> Sequence[bytes]:
    return request.hashes[branch.first - request.begin : branch.end - request.begin]


def _recorded(engine: CacheEngine, counted: "Counter[bytes]") -> list[RecordedModel]:
    known, tenants = spaces_of(engine), engine.manager.tenancy.bound()
    return [
        RecordedModel(
            namespace=ns.hex(),
            model=known[ns].spec.model if ns in known else "",
            tenant=tenant_shown(tenants.get(ns, ""), engine.manager.named_tenants),
            requests=requests,
        )
        for ns, requests in counted.most_common(MAX_PAGE)
    ]


def _when(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
