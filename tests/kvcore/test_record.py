"""The record of a cache: what requests were answered, why no more of them, and what became of objects."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.api import Failed, Loaded, Missing, ObjectKey
from kvcore.engine import Asked, CacheEngine, LocalStore, Space, objects, salt_word
from kvcore.observe import Decision, Decisions, Journal
from kvcore.observe.decisions import MAX_HASHES, MAX_WORD, Answer
from kvcore.testing.chunks import CHUNKS, hashes, publish, put, spec
from kvcore.testing.fault_config import Faults

Make = Callable[..., CacheEngine]
WAIT_S = 60.0
SPACE = b"n" * 16


def noted(decisions: Decisions, request: str = "", count: int = 1, **options: Any) -> Decision:
    decision = decisions.begin(Asked(request, **options), SPACE, hashes(count), 0, 32)
    assert decision is not None
    return decision


def keys(count: int, start: int = 0) -> list[ObjectKey]:
    return [ObjectKey(SPACE, h) for h in hashes(count, start)]


# -- decisions ---------------------------------------------------------------------------------------------------------


def test_the_last_lookups_are_kept() -> None:
    decisions = Decisions(3)
    for i in range(5):
        noted(decisions, f"r{i}")
    assert [(d.seq, d.asked.id) for d in decisions.since()] == [(3, "r2"), (4, "r3"), (5, "r4")]
    assert [d.seq for d in decisions.since(3)] == [4, 5]
    assert [d.seq for d in decisions.since(1, 2)] == [3, 4]
    assert decisions.since(5) == decisions.since(99) == []
    assert (decisions.last, len(decisions)) == (5, 3)
    assert decisions.of("r0") == []
    assert decisions.latest("r0") is None


def test_hashes_are_bounded_in_all_but_the_latest_lookup_is_kept() -> None:
    decisions = Decisions(100)
    many = [bytes(32)] * (MAX_HASHES // 2)
    for _ in range(3):
        decisions.begin(None, SPACE, many, 0, 32)
    assert len(decisions) == 2
    decisions.begin(None, SPACE, many * 3, 0, 32)
    assert [d.seq for d in decisions.since()] == [4]
    decisions.begin(None, SPACE, (), 0, 32)
    assert [d.seq for d in decisions.since()] == [5]


def test_a_request_is_found_by_the_id_that_its_user_knows() -> None:
    decisions = Decisions(10)
    noted(decisions, "chatcmpl-7f3a-0c1d2e3f")
    noted(decisions, "chatcmpl-7f3a0-11111111")
    again = noted(decisions, "chatcmpl-7f3a-0c1d2e3f")
    for name in ("chatcmpl-7f3a-0c1d2e3f", "chatcmpl-7f3a", "7f3a"):
        assert [d.seq for d in decisions.of(name)] == [3, 1], name
    noted(decisions, "7f3a")
    assert [d.seq for d in decisions.of("7f3a")] == [4]  # exactly that one comes first
    assert decisions.of("7f") == decisions.of("") == []
    assert decisions.latest("chatcmpl-7f3a-0c1d2e3f") is again
    assert decisions.latest("") is None


def test_an_id_is_kept_up_to_so_many_characters_and_found_by_all_of_it() -> None:
    decisions = Decisions(10)
    for request, kept in (("x" * 100_000, "x" * MAX_WORD), ("r\ud800\u00e9", "r?\u00e9"), (7, "7")):
        decision = noted(decisions, request, adapter=request)  # type: ignore[arg-type]
        assert (decision.asked.id, decision.asked.adapter) == (kept, kept)
        assert decisions.latest(request) is decision  # type: ignore[arg-type]
        assert decisions.of(request) == [decision]  # type: ignore[arg-type]


def test_of_a_trace_context_which_clients_choose_nothing_is_kept() -> None:
    decision = noted(Decisions(10, tokens=True), "r", trace={"tracestate": "x" * 100_000})
    assert decision.asked == Asked("r")


def test_token_ids_are_kept_only_where_that_is_wanted() -> None:
    """Without that until the answer alone, for a mark of them."""
    answered = noted(Decisions(1), ids=[1, 2])
    answered.answered(Answer(0, {}, {}), 0.0)
    assert (answered.asked.ids, answered.ids) == (None, None)
    assert noted(Decisions(1, tokens=True), ids=[1, 2]).asked.ids == [1, 2]


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    decisions, journal = Decisions(0), Journal(0)
    assert decisions.begin(Asked("r"), SPACE, hashes(), 0, 32) is None
    journal.note("l1", "stored", "", keys(2))
    journal.outcomes("disk", "load", keys(1), [Failed("no")])
    assert (len(decisions), len(journal), journal.of(hashes(1)[0])) == (0, 0, [])


def test_a_salt_is_kept_as_a_word_that_is_not_it() -> None:
    assert salt_word("") == ""
    assert salt_word("alice") != salt_word("bob")
    assert len(salt_word("alice")) == 8


# -- the journal -------------------------------------------------------------------------------------------------------


def test_what_became_of_an_object_is_told_latest_first() -> None:
    journal = Journal()
    journal.note("l1", "stored", "", keys(3))
    journal.note("disk", "stored", "", keys(2))
    journal.note("l1", "evicted", "room", keys(1), "lru")
    journal.note("l1", "stored", "", [ObjectKey(b"m" * 16, hashes(1)[0], 2)])
    first = journal.of(hashes(1)[0])
    assert [(e.place, e.what, e.reason, e.detail, e.namespace, e.group) for e in first] == [
        ("l1", "stored", "", "", b"m" * 16, 2),
        ("l1", "evicted", "room", "lru", SPACE, 0),
        ("disk", "stored", "", "", SPACE, 0),
        ("l1", "stored", "", "", SPACE, 0),
    ]
    assert [e.what for e in journal.of(hashes(1)[0], SPACE)] == ["evicted", "stored", "stored"]
    assert [e.place for e in journal.of(hashes(1, 2)[0])] == ["l1"]
    assert journal.of(hashes(1, 3)[0]) == []
    assert all(journal.since <= e.at for e in first)


def test_it_is_bounded_by_objects_and_says_since_when_it_knows() -> None:
    journal = Journal(14)
    began = journal.since
    for start in range(0, 16, 4):
        journal.note("l1", "stored", "", keys(4, start))
    assert len(journal) == 8
    assert journal.of(hashes(1, 7)[0]) == []
    assert journal.since > began
    assert journal.since <= journal.of(hashes(1, 8)[0])[0].at
    journal.note("l1", "stored", "", keys(50))  # the latest is kept, however large
    assert len(journal) == 50
    for start in range(100, 120):
        journal.note("l1", "stored", "", keys(1, start))
    assert len(journal) == 4  # small batches take more memory than their objects do
    journal.clear()
    assert (len(journal), journal.of(hashes(1)[0])) == (0, [])


def test_outcomes_are_noted_by_kind() -> None:
    journal = Journal()
    outcomes = [Loaded(1), Failed("x", "corrupt"), Missing(), Failed("x", "corrupt")]
    journal.outcomes("disk", "load", keys(4), outcomes)
    journal.outcomes("disk", "load", keys(1, 2), [Missing()], known=False)
    events = [journal.of(h) for h in hashes(4)]
    assert [[(e.what, e.reason, e.detail) for e in some] for some in events] == [
        [("loaded", "", "")],
        [("failed", "corrupt", "load")],
        [("failed", "evicted_from_tier", "load")],
        [("failed", "corrupt", "load")],
    ]


# -- a cache -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    engines = []

    def made(l2: str = "l2: [{storage: memory}]", more: str = "", l1: str = "8MiB") -> CacheEngine:
        path = tmp_path / "kvcore.yaml"
        path.write_text(f"l1: {{size: {l1}}}\nmin_object_size: 128KiB\nlookup_timeout: 20s\n{more}\n{l2}\n")
        engines.append(CacheEngine.open(str(path)))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


def asked(engine: CacheEngine, space: Space, count: int = CHUNKS, first: int = 0, start: int = 0) -> Decision:
    """Look chunks up and retrieve what is found; the record of it."""
    lookup = engine.lookup(space, tuple(hashes(count, start)), first, Asked("r1", 7, adapter="a"))
    assert lookup.wait(WAIT_S)
    found = lookup.poll()
    engine.retrieve(lookup, first * space.chunk_blocks, [list(range(count * space.chunk_blocks))])
    engine.release(lookup)
    decision = engine.decisions.latest("r1")
    assert decision is not None
    assert decision is lookup.decision
    assert (decision.answer, decision.broke) == (found, lookup.broke)
    return decision


def history(engine: CacheEngine, chunk: int) -> list[tuple[str, ...]]:
    """What became of a chunk, the first first, as words."""
    events = engine.journal.of(hashes(1, chunk)[0])[::-1]
    return [tuple(word for word in (e.place, e.what, e.reason, e.detail) if word) for e in events]


def test_a_request_is_on_record_with_all_that_came_of_it(make: Make) -> None:
    engine = make()
    space = engine.register(spec())
    put(engine, space, hashes(4))
    decision = asked(engine, space)
    assert (decision.namespace, decision.chunk_tokens) == (space.namespace, space.chunk_tokens)
    assert decision.asked[:4] == ("r1", 7, None, "a")
    assert (decision.first, decision.answer, decision.chunks) == (0, 4, CHUNKS)
    assert (dict(decision.sources), dict(decision.misses)) == ({"l1": 4}, {"absent": 4})
    assert (decision.broke, decision.blame) == ("absent", "")
    assert decision.hash_of(4) == hashes(1, 4)[0]
    assert decision.hash_of(8) is decision.hash_of(-1) is None
    assert decision.retrieved == 4 * space.chunk_tokens
    assert 0 < decision.seconds < WAIT_S
    ids = [list(range(CHUNKS * space.chunk_blocks))]
    engine.publish(engine.reserve(space, hashes(), 4, CHUNKS, ids, "r1").id)
    assert decision.stored == 4
    assert engine.drain(WAIT_S) == 0
    assert history(engine, 5) == [("l1", "stored"), ("memory", "stored")]
    assert asked(engine, space, first=2).retrieved == 6 * space.chunk_tokens
    assert asked(engine, space).broke == ""


def test_a_prompt_shorter_than_a_chunk_is_on_record_and_in_no_metric(make: Make) -> None:
    engine = make()
    decision = asked(engine, engine.register(spec()), 0)
    assert (decision.chunks, decision.answer, decision.broke) == (0, 0, "")
    assert engine.stats()["kvcore_lookups_total"] == 0


def test_what_a_tier_brought_and_what_left_l1(make: Make) -> None:
    engine = make()
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.clear(space)
    decision = asked(engine, space)
    assert dict(decision.sources) == {"memory": CHUNKS}
    stored = [("l1", "stored"), ("memory", "stored"), ("l1", "evicted", "cleared")]
    assert history(engine, 3) == [*stored, ("memory", "loaded")]
    engine.clear(space)
    engine.release(lookup := engine.lookup(space, hashes()))
    assert lookup.wait(WAIT_S)
    assert history(engine, 3)[-2:] in (  # it may have been released before its load was over
        [("memory", "loaded"), ("l1", "evicted", "unused")],
        [("l1", "evicted", "cleared"), ("memory", "loaded")],
        [("memory", "loaded"), ("l1", "evicted", "cleared")],
    )


def test_who_was_evicted_by_which_policy(make: Make) -> None:
    engine = make("l2: [{storage: memory, capacity: 4MiB, eviction: fifo}]", l1="4MiB, eviction: s3fifo")
    space = engine.register(spec())
    for start in range(0, 96, CHUNKS):
        put(engine, space, hashes(CHUNKS, start), start)
    assert history(engine, 1)[:1] == [("l1", "stored")]
    assert set(history(engine, 1)[2:]) == {("l1", "evicted", "room", "s3fifo"), ("memory", "evicted", "room", "fifo")}
    decision = asked(engine, space)
    assert (decision.answer, decision.broke) == (0, "absent")


def test_what_was_not_written(make: Make) -> None:
    engine = make(
        "l2:\n- {name: full, storage: memory, queue_size: 128KiB}\n- {name: shy, storage: memory, write: reused}\n"
        "- {name: late, storage: memory, write: evicted}",
        l1="2MiB",
    )
    space = engine.register(spec())
    for start in range(0, 32, CHUNKS):
        publish(engine, space, hashes(CHUNKS, start), start)
    engine.drain(WAIT_S)
    found = {event for chunk in range(32) for event in history(engine, chunk)}
    assert ("full", "dropped", "queue_full") in found
    assert ("shy", "held_back") in found


def test_full_of_what_is_used_l1_takes_nothing(make: Make) -> None:
    engine = make("l2: []", l1="1MiB")
    space = engine.register(spec())
    publish(engine, space, hashes())
    lookup = engine.lookup(space, hashes())
    assert lookup.poll() == CHUNKS
    plan = engine.reserve(space, hashes(2, 100), 0, 2, [list(range(2 * space.chunk_blocks))])
    assert plan.skipped == {"l1_full": 2}
    assert history(engine, 100) == history(engine, 101) == [("l1", "skipped", "l1_full")]
    engine.release(lookup)
    plan = engine.reserve(space, hashes(2, 200), 0, 2, [list(range(2 * space.chunk_blocks))])
    engine.publish(plan.id, ok=False)
    assert history(engine, 200) == [("l1", "failed", "copy", "store")]
    assert engine.reserve(space, hashes(2, 300), 0, 2, [[0, -1]]).skipped == {"no_block": 1}
    assert history(engine, 301) == [("l1", "skipped", "no_block")]


BROKEN = {
    "gone": ("absent", "", {}),
    "corrupt": ("corrupt", "t", {"flip_rate": 1.0}),
    "lost": ("evicted_from_tier", "t", {"lost_rate": 1.0}),
    "unreadable": ("io", "t", {"fail_rate": 1.0}),
    "silent": ("no_answer", "t", {"error_rate": 1.0, "operations": ("exists",)}),
}


@pytest.mark.parametrize("what", BROKEN)
def test_why_a_tier_did_not_deliver(make: Make, what: str) -> None:
    broke, blame, faults = BROKEN[what]
    engine = make("l2: [{name: t, storage: {plugin: faulty, storage: memory}}]")
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.clear(space)
    storage: Any = engine.manager.tiers[0].storage
    if what == "gone":
        storage.inner._objects.clear()
    storage.faults = Faults(**faults)
    decision = asked(engine, space)
    assert (decision.answer, decision.broke, decision.blame) == (0, broke, blame)
    assert dict(decision.misses) == {broke: CHUNKS}
    if broke in ("corrupt", "evicted_from_tier", "io"):
        assert history(engine, 0)[-1] == ("t", "failed", broke, "load")


def test_a_tier_that_is_left_alone_is_named(make: Make) -> None:
    engine = make("l2: [{name: t, storage: memory}, {name: u, storage: memory}]")
    space = engine.register(spec())
    put(engine, space, hashes(4))
    engine.clear(space)
    engine.manager.loop.submit(_open(engine, "t")).result(WAIT_S)
    decision = asked(engine, space)
    assert (decision.answer, decision.broke, decision.blame) == (4, "tier_down", "t")
    assert (dict(decision.sources), dict(decision.misses)) == ({"u": 4}, {"tier_down": 4})
    assert engine.stats()['kvcore_miss_chunks_total{reason="tier_down"}'] == 4


def test_a_question_for_single_objects_counts_them_so_too(make: Make) -> None:
    engine = make("l2: [{name: t, storage: memory}]")
    space = engine.register(spec())
    engine.manager.loop.submit(_open(engine, "t")).result(WAIT_S)
    assert not any(objects.exists(engine, space, hashes()).result(WAIT_S))
    assert engine.stats()['kvcore_miss_chunks_total{reason="tier_down"}'] == CHUNKS


async def _open(engine: CacheEngine, name: str) -> None:
    next(tier for tier in engine.manager.tiers if tier.name == name).breaker.open("test")


def test_a_lookup_that_may_wait_no_longer_says_so(make: Make) -> None:
    engine = make("l2: [{name: t, storage: memory}]", "metrics_port: null")
    engine.manager.config.__dict__["lookup_timeout"] = 0.05
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.clear(space)
    let_go = threading.Event()
    storage: Any = engine.manager.tiers[0].storage
    load = storage.load
    storage.load = lambda items: let_go.wait(WAIT_S) and load(items)
    try:
        decision = asked(engine, space)
    finally:
        let_go.set()
    assert (decision.answer, decision.broke) == (0, "lookup_timeout")
    assert dict(decision.misses) == {"lookup_timeout": CHUNKS}


def test_what_had_not_come_in_time_is_counted_beside_what_had(make: Make) -> None:
    engine = make("l2: [{name: t, storage: memory}]", "metrics_port: null")
    engine.manager.config.__dict__["lookup_timeout"] = 0.2
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.clear(space)
    let_go = threading.Event()
    storage: Any = engine.manager.tiers[0].storage
    load, last = storage.load, hashes()[-1]
    storage.load = lambda items: (items[-1].key.chunk_hash == last and let_go.wait(WAIT_S), load(items))[1]
    try:
        decision = asked(engine, space)
    finally:
        let_go.set()
    came = sum(decision.sources.values())
    assert came < CHUNKS
    assert dict(decision.misses) == {"lookup_timeout": CHUNKS - came}


@pytest.mark.parametrize("here", [0, 1])
def test_what_lies_behind_a_gap_counts_as_the_gap(make: Make, here: int) -> None:
    engine = make("l2: [{name: t, storage: memory}]")
    space = engine.register(spec())
    put(engine, space, hashes(2, 4))
    engine.clear(space)
    put(engine, space, hashes(here))
    decision = asked(engine, space)
    assert (decision.answer, dict(decision.misses)) == (here, {"absent": CHUNKS - here})
    assert engine.stats()["kvcore_lookup_chunks_total"] == CHUNKS


def test_hashes_that_can_name_nothing_and_leases_that_ended(make: Make) -> None:
    engine = make("l2: []")
    space = engine.register(spec())
    put(engine, space, hashes())
    lookup = engine.lookup(space, [*hashes(2), b"short"], 0, Asked("odd"))
    assert (lookup.poll(), lookup.broke) == (0, "refused")
    lookup = engine.lookup(space, hashes(), 0, Asked("slow"))
    engine.l1.reap()
    with engine.l1._lock:
        for lease in engine.l1._leases:
            lease.deadline = 0.0
    engine.l1.reap()
    assert lookup.poll() == 0
    assert [(d.answer, d.broke) for d in engine.decisions.of("slow")] == [(0, "lease_expired")]


def test_without_a_record_everything_works(make: Make) -> None:
    engine = make(more="inspect: {requests: 0}")
    space = engine.register(spec())
    put(engine, space, hashes())
    lookup = engine.lookup(space, hashes(), 0, Asked("r"))
    assert (lookup.poll(), lookup.decision) == (CHUNKS, None)
    engine.retrieve(lookup, 0, [list(range(CHUNKS * space.chunk_blocks))])
    engine.release(lookup)
    assert (len(engine.decisions), len(engine.journal)) == (0, 0)


def test_a_closed_cache_and_the_child_of_a_fork_note_nothing(make: Make) -> None:
    engine = make()
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.journal._lock.acquire()  # as another thread may have at the fork
    pid = os.fork()
    if not pid:
        lookup = engine.lookup(space, hashes(), 0, Asked("child"))
        engine.journal.note("l1", "stored", "", hashes(1))  # type: ignore[arg-type]
        os._exit(lookup.decision is not None or lookup.poll() != 0)
    engine.journal._lock.release()
    assert os.waitpid(pid, 0)[1] == 0
    engine.close()
    assert engine.lookup(space, hashes(), 0, Asked("late")).decision is None
    assert len(engine.journal) == 0


# -- an object store ---------------------------------------------------------------------------------------------------


def test_an_object_store_has_a_record_too(tmp_path: Path) -> None:
    path = tmp_path / "kvcore.yaml"
    path.write_text("l2: [{storage: memory}, {name: shy, storage: memory, write: reused}]\n")
    from kvcore.service import open_store

    store = open_store(str(path))
    assert isinstance(store, LocalStore)
    space = store.register(spec(), "test/1")
    memory = [[memoryview(bytearray(space.layouts[0].nbytes))] for _ in range(4)]
    assert store.store(space, hashes(4), memory) == [True] * 4
    assert store.prefix(space, hashes(6), asked=Asked("r1"), begin=10) == 4
    assert store.exists(space, hashes(6)) == [True] * 4 + [False] * 2  # nobody's
    assert store.load(space, hashes(4), memory, request="r1") == [True] * 4
    assert store.store(space, hashes(2, 4), memory[:2], request="r1") == [True] * 2
    (decision,) = store.decisions.since()
    assert (decision.answer, decision.chunks, decision.broke) == (14, 16, "absent")
    assert dict(decision.sources) == {"memory": 4}
    assert (decision.retrieved, decision.stored) == (4 * 32, 2)
    events = [(e.place, e.what) for e in store.journal.of(hashes(1)[0])[::-1]]
    assert set(events[:2]) == {("memory", "stored"), ("shy", "held_back")}
    assert events[2] == ("memory", "loaded")
    store.close()
