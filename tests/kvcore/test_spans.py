"""Spans: what observers of `kvcore_spans` are told of requests, and that nobody else pays for it."""

import importlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.api import Span
from kvcore.engine import Asked, CacheEngine, LocalStore, Space
from kvcore.engine.traced import TracedEngine
from kvcore.l2 import Tier
from kvcore.observe import spans as module
from kvcore.observe.decisions import tenant_shown
from kvcore.observe.spans import CURRENT, Spans
from kvcore.service import open_store
from kvcore.testing import dist
from kvcore.testing.chunks import hashes, put, spec

WAIT_S = 60.0
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
OBSERVER = """
from kvcore.api import hookimpl
seen, batches = [], []
@hookimpl
def kvcore_spans(spans):
    seen.extend(spans)
    batches.append(len(spans))
"""


class Heard:
    """What a hooks plugin `watch` has been told."""

    def __init__(self, plugin: Any) -> None:
        self.spans: list[Span] = plugin.seen
        self.batches: list[int] = plugin.batches

    def until(self, enough: Callable[[list[Span]], object]) -> list[Span]:
        deadline = time.monotonic() + WAIT_S
        while not enough(self.spans):
            assert time.monotonic() < deadline, f"only {[s.name for s in self.spans]} were told"
            time.sleep(0.01)
        return list(self.spans)

    def named(self, name: str, count: int = 1) -> list[Span]:
        self.until(lambda spans: sum(s.name == name for s in spans) >= count)
        return [s for s in self.spans if s.name == name]


@pytest.fixture
def heard(site: Path, monkeypatch: pytest.MonkeyPatch) -> Heard:
    monkeypatch.setattr(module, "TELL_S", 0.02)
    dist(site, "kvcore-watch", {"kvcore.hooks": {"watch": "fake_watch"}}, {"fake_watch": OBSERVER})
    return Heard(importlib.import_module("fake_watch"))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., CacheEngine]]:
    engines = []

    def make(l2: str = "[{storage: memory}]", hooks: str = "[watch]") -> CacheEngine:
        path = tmp_path / "kvcore.yaml"
        path.write_text(f"l1: {{size: 8MiB}}\nmin_object_size: 128KiB\nlookup_timeout: 20s\nl2: {l2}\nhooks: {hooks}\n")
        engines.append(CacheEngine.open(str(path)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def ask(engine: CacheEngine, space: Space, keys: list[bytes], asked: Asked | None) -> int:
    """Look chunks up and read them; how many there were."""
    lookup = engine.lookup(space, keys, 0, asked)
    assert lookup.wait(WAIT_S)
    engine.retrieve(lookup, 0, [list(range(1000))])
    engine.release(lookup)
    return lookup.answer or 0


def store(engine: CacheEngine, space: Space, keys: list[bytes], request: str) -> None:
    plan = engine.reserve(space, keys, 0, len(keys), [list(range(len(keys) * space.chunk_blocks))], request)
    engine.publish(plan.id)


def total(spans: list[Span], call: str, above: Span, what: str) -> int:
    """Of a tier's calls: they are cut into pieces."""
    ours = [s for s in spans if (s.name, s.parent) == (f"kvcore.tier.{call}", above.id)]
    return sum(int(s.attributes[f"kvcore.{what}"]) for s in ours)


def test_of_an_id_so_much_is_told_as_is_on_record(heard: Heard, opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec())
    for request in ("x" * 10_000, "\ud800"):
        ask(engine, space, hashes(2), Asked(request))
        store(engine, space, hashes(2), request)
    engine.close()
    for kept in ("x" * 256, "?"):
        told = [s for s in heard.spans if s.request == kept]
        assert len({s.root for s in told}) == 1
        assert {"kvcore.request", "kvcore.lookup", "kvcore.store"} <= {s.name for s in told}


def test_a_request_is_one_tree(heard: Heard, opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec(), "acme")
    put(engine, space, hashes(4))
    engine.clear(space)
    before = time.time_ns()
    assert ask(engine, space, hashes(6), Asked("req", 200, adapter="french", trace=TRACE)) == 4
    store(engine, space, hashes(6), "req")
    assert engine.drain() == 0
    engine.close()  # which tells the root, too
    told = [s for s in heard.spans if s.request == "req"]
    (root,) = [s for s in told if s.name == "kvcore.request"]
    (lookup,), (retrieve,), (stored,) = (
        [s for s in told if s.name == f"kvcore.{what}"] for what in ("lookup", "retrieve", "store")
    )
    assert (root.id, root.parent, root.trace) == (root.root, 0, TRACE)
    assert root.attributes == {"kvcore.prompt_tokens": 200, "kvcore.adapter": "french"}
    assert {s.root for s in told} == {root.id}
    assert {s.parent for s in (lookup, retrieve, stored)} == {root.id}
    assert lookup.attributes == {
        "kvcore.model": "m",
        "kvcore.namespace": space.namespace.hex(),
        "kvcore.tenant": tenant_shown("acme", ()),  # it may be a salt
        "kvcore.chunks": 6,
        "kvcore.chunks.first": 0,
        "kvcore.chunks.found": 4,
        "kvcore.sources.memory": 4,
        "kvcore.misses.absent": 2,
        "kvcore.broke": "absent",
    }
    assert retrieve.attributes == {"kvcore.tokens": 4 * space.chunk_tokens}
    assert (stored.attributes["kvcore.chunks"], stored.attributes["kvcore.skipped.known"]) == (2, 4)
    tier = [s for s in told if s.name.startswith("kvcore.tier.")]
    assert all(s.attributes["kvcore.tier"] == "memory" for s in tier)
    assert total(tier, "exists", lookup, "objects.found") == 4
    assert total(tier, "exists", stored, "objects") == 2
    assert total(tier, "exists", stored, "objects.found") == 0
    assert total(tier, "store", stored, "objects.ok") == 2
    assert total(tier, "store", stored, "bytes") == 2 * space.groups[0].nbytes
    loads = [s for s in tier if s.name == "kvcore.tier.load"]
    assert {s.parent for s in loads} == {lookup.id}
    assert total(tier, "load", lookup, "objects.ok") == 4
    assert total(tier, "load", lookup, "bytes") == 4 * space.groups[0].nbytes
    for span in told:
        assert before <= root.begin_ns <= span.begin_ns <= span.end_ns <= root.end_ns <= time.time_ns()
        assert not span.error
    assert retrieve.begin_ns >= lookup.end_ns
    assert max(s.end_ns for s in loads) <= lookup.end_ns
    assert len({s.id for s in heard.spans}) == len(heard.spans)


def test_it_is_told_in_batches_while_the_cache_serves(
    heard: Heard, opened: Callable[..., CacheEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_S", 0.1)
    monkeypatch.setattr(module, "TELL_S", 0.3)
    engine = opened("[]")
    space = engine.register(spec())
    for i in range(100):
        ask(engine, space, hashes(2), Asked(f"req-{i}"))
    heard.named("kvcore.request", 100)
    assert len(heard.spans) == 200
    assert len(heard.batches) < 100
    store(engine, space, hashes(2), "req-7")  # late, and of the same tree
    (late,) = heard.named("kvcore.store")
    (root,) = [s for s in heard.spans if (s.name, s.request) == ("kvcore.request", "req-7")]
    assert (late.parent, late.root) == (root.id, root.id)
    assert late.begin_ns > root.end_ns


def test_without_a_request_each_call_is_a_tree(heard: Heard, opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec())
    put(engine, space, hashes(1))
    ask(engine, space, hashes(1), None)
    engine.close()
    roots = [s for s in heard.spans if not s.parent]
    assert [s.name for s in sorted(roots)] == ["kvcore.lookup", "kvcore.store"]
    assert all(s.root == s.id and s.request == "" for s in roots)
    (retrieve,) = heard.named("kvcore.retrieve")
    assert retrieve.parent == retrieve.root == next(s.id for s in roots if s.name == "kvcore.lookup")


FAULTY = "[{storage: {plugin: disk, path: DIR}, timeout: 20s}]"


def test_what_failed_says_so(heard: Heard, opened: Callable[..., CacheEngine], tmp_path: Path) -> None:
    engine = opened(FAULTY.replace("DIR", str(tmp_path / "disk")))
    space = engine.register(spec())
    put(engine, space, hashes(2))
    engine.clear(space)
    (victim, *_) = sorted(p for p in (tmp_path / "disk").rglob("*") if p.is_file() and p.stat().st_size > 100 << 10)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    ask(engine, space, hashes(2), Asked("torn"))
    (tier,) = engine.manager.tiers

    async def down() -> None:
        tier.breaker.open("by hand")

    engine.manager.loop.submit(down()).result(WAIT_S)
    ask(engine, space, hashes(4)[2:], Asked("down"))
    engine.close()
    bad = {(s.request, s.name): s for s in heard.spans if s.error}
    assert "checksum" in bad["torn", "kvcore.tier.load"].error
    assert bad["torn", "kvcore.tier.load"].attributes["kvcore.objects.corrupt"] == 1
    assert bad["down", "kvcore.tier.exists"].error == "tier_down"


def test_a_tier_that_does_not_answer(heard: Heard, opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec())
    (tier,) = engine.manager.tiers

    def broken(*_: object) -> None:
        raise OSError("the network is down")

    tier.storage.exists = broken  # type: ignore[method-assign, assignment]
    ask(engine, space, hashes(2), Asked("r"))
    (span,) = heard.named("kvcore.tier.exists")
    assert span.error == "the network is down"
    assert span.attributes["kvcore.objects.found"] == 0


def test_writes_belong_to_whoever_stored(heard: Heard, opened: Callable[..., CacheEngine]) -> None:
    """One task writes for many requests."""
    engine = opened()
    space = engine.register(spec())
    for i in range(20):
        store(engine, space, hashes(1, start=i), f"req-{i}")
    put(engine, space, hashes(1, start=100))  # nobody's, and still no one else's
    engine.close()
    stores = {s.id: s.request for s in heard.spans if s.name == "kvcore.store"}
    writes = [s for s in heard.spans if s.name == "kvcore.tier.store"]
    assert len(stores) == 21
    assert {stores[s.parent] for s in writes} == set(stores.values())
    assert sum(int(s.attributes["kvcore.objects"]) for s in writes) == 21
    assert all(stores[s.parent] == s.request for s in writes)


def test_copies_to_other_tiers_and_loads_ahead(heard: Heard, opened: Callable[..., CacheEngine]) -> None:
    engine = opened("[{storage: memory, name: fast, write: reused}, {storage: memory, name: slow}]")
    space = engine.register(spec())
    put(engine, space, hashes(3))
    engine.clear(space)
    assert engine.prefetcher.bring(space.namespace, hashes(3), "foreseen")
    (span,) = heard.named("kvcore.prefetch")
    assert span.attributes == {"kvcore.cause": "foreseen", "kvcore.chunks": 3}
    assert span.root == span.id  # it is nobody's request
    assert engine.drain() == 0
    engine.close()
    assert total(heard.spans, "load", span, "objects.ok") == 3
    assert total(heard.spans, "store", span, "objects.ok") == 3  # copied to the tier before
    assert {
        s.attributes["kvcore.tier"] for s in heard.spans if s.name == "kvcore.tier.store" and s.parent == span.id
    } == {"fast"}


def test_what_waits_for_its_turn(heard: Heard, opened: Callable[..., CacheEngine]) -> None:
    """What a hook brings while it does belongs to it."""
    engine = opened()
    space = engine.register(spec())
    put(engine, space, hashes(3))
    engine.clear(space)

    class Bringer:
        def queued(self, namespace: bytes, hashes: list[bytes]) -> None:
            engine.prefetcher.bring(namespace, hashes, "queued")

    engine.observe("bringer", Bringer())
    engine.queued(space, hashes(3), Asked("req", trace=TRACE))
    engine.queued(space, hashes(3, start=50), Asked("never looked up"))
    heard.named("kvcore.prefetch", 2)
    ask(engine, space, hashes(3), Asked("req", trace=TRACE))
    engine.close()
    told = {s.name: s for s in heard.spans if s.request == "req"}
    assert {"kvcore.queued", "kvcore.prefetch", "kvcore.lookup", "kvcore.retrieve", "kvcore.request"} <= set(told)
    waited, brought, lookup = told["kvcore.queued"], told["kvcore.prefetch"], told["kvcore.lookup"]
    assert waited.parent == brought.parent == lookup.parent == told["kvcore.request"].id
    assert waited.begin_ns <= brought.begin_ns
    assert brought.end_ns <= lookup.begin_ns <= waited.end_ns
    assert lookup.attributes["kvcore.sources.l1"] == 3
    assert {s.trace["traceparent"] for s in told.values() if s.trace} == set(TRACE.values())
    assert [s.name for s in heard.spans if s.request == "never looked up"][-2:] == ["kvcore.prefetch", "kvcore.request"]


def test_an_object_stores_calls(heard: Heard, tmp_path: Path) -> None:
    path = tmp_path / "kvcore.yaml"
    path.write_text("hooks: [watch]\nl2: [{storage: memory}]\nlookup_timeout: 20s\n")
    kept = open_store(str(path))
    assert isinstance(kept, LocalStore)
    space = kept.register(spec(), "test/1")
    size = space.layouts[0].nbytes
    memory = [[memoryview(bytearray(size))] for _ in range(3)]
    assert kept.store(space, hashes(2), memory[:2]) == [True, True]
    assert kept.prefix(space, hashes(3)) == 2
    assert kept.load(space, iter(hashes(3)), memory) == [True, True, False]
    assert kept.exists(space, hashes(2), asked=Asked("named")) == [True, True]
    assert kept.load(space, hashes(2), memory[:2], request="named") == [True, True]
    kept.close()
    (root,) = [s for s in heard.spans if s.name == "kvcore.request"]
    named = [s.name for s in heard.spans if s.request == "named" and s.parent == root.id]
    assert named == ["kvcore.lookup", "kvcore.retrieve"]
    trees = {s.name: s for s in heard.spans if not s.request and not s.parent}
    assert list(trees) == ["kvcore.store", "kvcore.lookup", "kvcore.retrieve"]
    assert trees["kvcore.store"].attributes == {
        "kvcore.model": "m",
        "kvcore.chunks": 2,
        "kvcore.chunks.stored": 2,
    }
    assert [trees[n].attributes["kvcore.chunks.found"] for n in ("kvcore.lookup", "kvcore.retrieve")] == [2, 2]
    below = {(s.name, s.parent) for s in heard.spans if s.parent}
    assert ("kvcore.tier.store", trees["kvcore.store"].id) in below
    assert ("kvcore.tier.exists", trees["kvcore.lookup"].id) in below
    assert ("kvcore.tier.load", trees["kvcore.retrieve"].id) in below


def test_who_does_not_listen_pays_nothing(heard: Heard, opened: Callable[..., CacheEngine]) -> None:
    engine = opened(hooks="[]")
    assert type(engine) is CacheEngine
    assert [type(t) for t in engine.manager.tiers] == [Tier]
    assert engine.manager.spans is None
    space = engine.register(spec())
    ask(engine, space, hashes(2), Asked("r"))
    put(engine, space, hashes(2))
    assert CURRENT.get() is None
    assert heard.spans == []


def test_a_fork_neither_hangs_nor_tells(heard: Heard, opened: Callable[..., CacheEngine]) -> None:
    engine = opened()
    space = engine.register(spec())
    assert isinstance(engine, TracedEngine)
    assert engine.manager.spans is not None
    with engine.manager.spans._lock:  # as another thread may hold it
        pid = os.fork()
        if not pid:
            try:
                engine.release(engine.lookup(space, hashes(2), 0, Asked("child")))
                engine.close()
            finally:
                os._exit(0 if not heard.spans else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "MAX_ENDED", 10)
    monkeypatch.setattr(module, "MAX_REQUESTS", 5)
    told: list[Span] = []
    kept = Spans(told.extend, lambda callback: None)  # a loop that does not run
    for i in range(30):
        kept.begin("kvcore.lookup", Asked(str(i)), {}).end({})
    assert len(kept._requests) == 5
    assert len(kept._ended) <= 10 + 5
    kept.close()
    assert sum(s.name == "kvcore.lookup" for s in told) <= 10
    assert len(told) <= 10 + 5
    assert any("spans were dropped" in r.getMessage() for r in caplog.records)


def test_an_id_that_comes_again_much_later_is_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Span] = []
    kept = Spans(told.extend, lambda callback: None)
    kept.begin("kvcore.lookup", Asked("7"), {}).end({})
    kept.begin("kvcore.lookup", Asked("7"), {}).end({})
    monkeypatch.setattr(module, "KEPT_S", -1.0)
    kept.begin("kvcore.lookup", Asked("7"), {}).end({})
    kept.close()
    roots = [s.root for s in told if s.name == "kvcore.lookup"]
    assert roots[0] == roots[1] != roots[2]
    assert {s.id for s in told if s.name == "kvcore.request"} == set(roots)
