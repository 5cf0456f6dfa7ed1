"""What is shown, each a function of the cache: its state, its requests, its history."""

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kvcore import __version__
from kvcore.observe import Decision
from kvcore.observe.history import SERIES
from kvcore.service.inspect import models as m
from kvcore.service.inspect.subject import Subject
from kvcore.service.inspect.tiers import TierViews


def tiers(subject: Subject) -> TierViews | None:
    """The tiers of a cache in this process, with what is known of their storages."""
    if subject.manager is None:
        return None
    views: TierViews = subject.kept.setdefault("tiers", TierViews(subject.manager))
    return views


def metrics(subject: Subject, _: Any = None) -> str:
    """All metrics in the Prometheus text format."""
    return subject.cache.metrics_text()


def status(subject: Subject, _: Any = None) -> m.StatusModel:
    """The whole cache at one glance."""
    manager, shown = subject.manager, tiers(subject)
    l1 = None
    if manager is not None and manager.arena is not None:
        usage = manager.l1.usage()
        l1 = m.L1Model(**{name: usage[name] for name in m.L1Model.model_fields})
    clients = subject.clients
    return m.StatusModel(
        version=__version__,
        name=subject.name,
        kind=subject.kind,
        pid=os.getpid(),
        address=", ".join(str(c.address) for c in clients) if manager is None else subject.address,
        connected=all(c.wait_ready(0) for c in clients) if manager is None else None,
        started=m.when(subject.began),
        uptime_s=round(time.monotonic() - subject.began, 3),
        models=subject.models,
        l1=l1,
        tiers=shown.all() if shown is not None else [],
        sessions=[m.SessionModel.model_validate(s) for s in subject.sessions()],
        helpers=[m.HelperModel.model_validate(h) for h in subject.helpers()],
    )


def requests(subject: Subject, query: m.RequestsQuery) -> m.RequestsModel:
    """Requests on record: those after `since`, or without it the newest."""
    decisions, spaces, sizes = subject.decisions, subject.spaces, subject.token_bytes
    since = max(0, decisions.last - query.limit) if query.since is None else query.since
    found = decisions.since(since, query.limit)
    oldest = decisions.since(0, 1)
    if query.follow and len(found) < query.limit:  # it has all of them
        subject.read_at = time.monotonic()
    return m.RequestsModel(
        requests=[request(d, spaces, sizes, hashes=query.hashes) for d in found],
        next=found[-1].seq if found else since,
        oldest=oldest[0].seq if oldest else 0,
        newest=decisions.last,
    )


def request(
    decision: Decision, spaces: Mapping[bytes, tuple[str, str]], sizes: Mapping[bytes, int], *, hashes: bool = False
) -> m.RequestModel:
    """One of them."""
    model, tenant = spaces.get(decision.namespace, ("", ""))
    asked = decision.asked
    return m.RequestModel(
        seq=decision.seq,
        at=datetime.fromtimestamp(decision.at, UTC),
        id=asked.id,
        namespace=decision.namespace.hex(),
        model=model,
        tenant=tenant,
        adapter=asked.adapter,
        salt=asked.salt,
        tokens=asked.tokens,
        chunk_tokens=decision.chunk_tokens,
        chunks=decision.chunks,
        first=decision.first,
        answer=decision.answer,
        sources=dict(decision.sources),
        misses=dict(decision.misses),
        broke=decision.broke,
        blame=decision.blame,
        seconds=decision.seconds,
        retrieved=decision.retrieved,
        stored=decision.stored,
        begin=decision.begin,
        token_bytes=sizes.get(decision.namespace),
        hashes=[h.hex() for h in decision.hashes] if hashes else None,
    )


def history(subject: Subject, query: m.HistoryQuery) -> m.HistoryModel:
    """Numbers since the cache was opened. A client's is not kept, as nothing wakes for it: its only point is now."""
    if subject.manager is None:
        now = subject.metrics.numbers(SERIES)
        return m.HistoryModel(every_s=0.0, times=[time.time()], series={k: [v] for k, v in now.items()})
    kept = subject.manager.history.since(query.since)
    return m.HistoryModel(every_s=kept.every_s, times=kept.times, series=kept.series)
