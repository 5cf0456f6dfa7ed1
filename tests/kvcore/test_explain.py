"""Why a request missed: each cause brought about in a real cache, and named with its place, policy and remedy."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from explain_told import MEMORY, SIZE, Told, missed, opening
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.api import MISSING, ConfigError, Failed, KeySource
from kvcore.engine import Asked, CacheEngine, Space
from kvcore.engine.identity import Identity
from kvcore.explain.catalog import Catalog
from kvcore.explain.compare import compare
from kvcore.explain.explain import NotOnRecord, explain_prompt, explain_request
from kvcore.explain.models import Comparison, Question, Side
from kvcore.explain.nearest import nearest, shared, shared_tokens
from kvcore.explain.tell import diff, explanation
from kvcore.observe.decisions import Decision, salt_word
from kvcore.service import open_store
from kvcore.testing import chunks


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Told]]:
    with opening(tmp_path) as made:
        yield made


# -- found -------------------------------------------------------------------------------------------------------------


def test_a_hit_says_where_it_was_and_what_it_saved(make: Any) -> None:
    told = make()
    keys = chunks.hashes(6)
    told.put(keys)
    for _ in range(8):
        told.engine.prefilled(told.space, 100, 0.1)
    said = told.ask("whole", keys, range(6 * SIZE + 5))
    assert said.broke is None
    assert said.found.places == {"l1": 6}
    assert (said.saved.tokens, said.saved.seconds) == (192, pytest.approx(0.192))
    lines = dict(explanation(said))
    assert "197 tokens: 6 chunks of 32 tokens and 5 more, m in kvcore" in lines["request"]
    assert lines["found"].startswith("6 of 6 chunks (6 in l1)")
    assert lines["saved"] == "192 tokens, about 0.19 s of computing"
    assert "missed" not in lines


def test_what_the_engine_had_itself_is_told_apart(make: Any) -> None:
    told = make()
    keys = chunks.hashes(6)
    told.put(keys[:5])
    said = told.ask("some", keys, first=2)
    assert (said.found.held, said.found.chunks) == (2, 3)
    missed(said, "never_stored", chunk=5)
    assert dict(explanation(said))["found"].startswith("2 chunks that the engine had itself; 3 of 4 chunks (3 in l1)")


# -- never there -------------------------------------------------------------------------------------------------------


def test_a_prompt_shorter_than_a_chunk(make: Any) -> None:
    missed(make().ask("short", [], range(20)), "short_prompt", "20 tokens, less than one chunk of 32")


def test_never_stored_and_stored_by_itself_since(make: Any) -> None:
    told = make()
    keys = chunks.hashes(4)
    first = told.ask("first", keys)
    missed(first, "never_stored", "no earlier request on record began with the same 32 tokens", "kvcore diff @A.txt")
    told.put(keys)
    missed(told.explain("first"), "never_stored", "it was stored in l1")
    said = told.explain("first")
    assert said.now is not None
    assert said.now.chunks == 4
    assert said.broke is not None
    assert "`inspect: {tokens: true}` in the engine's kvcore.yaml and a restart of it" in said.broke.remedy
    told.ask("other", chunks.hashes(2, 50), space=told.engine.register(chunks.spec(), "pepper"))
    second = told.ask("second", chunks.hashes(2, 100))
    missed(second, "never_stored", "no earlier request on record of the same model, adapter and salt began with")


def test_another_was_computing_it(make: Any) -> None:
    told = make()
    keys = chunks.hashes(4)
    told.ask("earlier", keys)
    told.ask("later", keys)
    missed(told.explain("later"), "never_stored", "request earlier had asked for it", "kv_role")
    told.put(keys)
    missed(told.explain("later"), "computed_since", "request earlier had asked for it", "stored in l1")


def test_where_prompts_part_by_hashes_alone(make: Any) -> None:
    told = make()
    keys = chunks.hashes(6)
    told.put(keys)
    told.ask("one", keys)
    said = told.ask("two", [*keys[:3], *chunks.hashes(3, 100)])
    missed(said, "differs", "request one shares the 3 chunks before it, and has other tokens in it", chunk=3)
    told.ask("tail", keys[:3])
    said = told.ask("three", [*keys[:3], *chunks.hashes(1, 200)])
    assert said.nearest is not None
    assert said.nearest.request == "tail"
    missed(said, "differs", "and ended in it", chunk=3)


def test_where_prompts_part_by_tokens_and_as_text(make: Any) -> None:
    told = make(tokens=True)
    keys, ids = chunks.hashes(4), list(range(4 * SIZE))
    told.put(keys)
    told.ask("one", keys, ids)
    other = [*ids[:70], 999, *ids[71:]]
    said = told.ask("two", [*keys[:2], *chunks.hashes(2, 100)], other)
    missed(said, "differs", "token 70 is another than in request one", chunk=2)
    assert said.nearest is not None
    assert (said.nearest.here[said.nearest.at_here], said.nearest.there[said.nearest.at_here]) == (999, 70)
    lines = dict(explanation(said, lambda ids: " ".join(f"w{i}" for i in ids)))
    assert lines["here"] == "'w62 w63 w64 w65 w66 w67 w68 w69' then 'w999' then 'w71 w72 w73 w74 w75 w76 w77'"
    assert lines["there"].endswith("then 'w70' then 'w71 w72 w73 w74 w75 w76 w77'")
    assert told.engine.decisions.tokens


def test_a_shared_prefix_shorter_than_a_chunk(make: Any) -> None:
    told = make(tokens=True)
    ids = list(range(3 * SIZE))
    told.ask("one", chunks.hashes(3), ids)
    said = told.ask("two", chunks.hashes(3, 100), [*ids[:20], *range(500, 576)])
    missed(said, "short_prefix", "the 20 tokens that both share are less than one chunk of 32", "put what varies last")


@pytest.mark.parametrize("mine", [True, False])
def test_what_stands_in_front_changes_all(make: Any, mine: bool) -> None:
    told = make(tokens=True)
    ids = list(range(100, 100 + 3 * SIZE))
    front = [1, 2, 3, 4, 5, 6, 7, 8, 9, *ids[2:]]  # of which the last two were joined with what follows
    one, two = (ids, front) if mine else (front, ids)
    told.ask("one", chunks.hashes(3), one)
    said = told.ask("two", chunks.hashes(3, 100), two)
    if mine:
        missed(said, "short_prefix", "begins with 7 tokens that request one does not have, and goes on as that does")
    else:
        missed(said, "short_prefix", "is what request one has behind its first 7 tokens")
    missed(told.ask("three", chunks.hashes(3, 200), range(900, 1000)), "never_stored")


def test_ids_may_be_any_numbers(make: Any) -> None:
    told = make(tokens=True)
    ids = [-7, 1 << 40, *range(3 * SIZE - 2)]
    told.ask("one", chunks.hashes(3), ids)
    said = told.ask("two", chunks.hashes(3, 100), [5, 6, *ids])
    missed(said, "short_prefix", "begins with 2 tokens that request one does not have")


def test_tokens_are_not_on_record_unless_wanted(make: Any) -> None:
    told = make()
    told.ask("one", chunks.hashes(2), range(64))
    assert told.engine.decisions.since()[0].asked.ids is None
    assert not told.explain("one").record.tokens


# -- no longer there ---------------------------------------------------------------------------------------------------


def test_evicted_from_l1_and_nothing_behind_it(make: Any) -> None:
    told = make()
    keys = chunks.hashes(4)
    told.put(keys)
    for i in range(1, 16):
        told.put(chunks.hashes(8, 100 * i))
    said = told.ask("late", keys)
    missed(said, "evicted", "was evicted from l1", "by `lru`", "no tier is configured", "a tier in `l2`")
    assert said.broke is not None
    assert [e.what for e in said.broke.events] == ["evicted", "stored"]


def test_evicted_from_a_tier_by_its_capacity(make: Any) -> None:
    told = make("l2: [{name: small, storage: {plugin: memory, capacity: 1MiB, eviction: fifo}}]\n")
    keys = chunks.hashes(4)
    told.put(keys)
    for i in range(1, 3):
        told.put(chunks.hashes(8, 100 * i))
    told.engine.clear(told.space)
    said = told.ask("late", keys)
    missed(
        said, "cleared", "was deleted from l1", "evicted from tier small", "`fifo`", "a larger `capacity` of tier small"
    )


def test_its_time_was_over(make: Any) -> None:
    told = make()
    told.engine.journal.note("l1", "evicted", "expired", [_key(told, chunks.hashes(1)[0])])
    missed(told.ask("late", chunks.hashes(1)), "expired", "its `ttl` was over", "a longer `ttl`")


def test_its_time_was_over_and_the_question_was_the_first_to_see_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_L1__TTL", "50ms")
    told = make()
    told.put(chunks.hashes(2))
    time.sleep(0.1)
    missed(told.ask("late", chunks.hashes(2)), "expired", "its `ttl` was over", "a longer `ttl`")


@pytest.mark.parametrize("again", [False, True])
def test_its_time_was_over_and_it_was_deleted_later(make: Any, again: bool) -> None:
    told = make(MEMORY)
    key = _key(told, chunks.hashes(1)[0])
    told.engine.journal.note("near", "stored", "", [key])
    told.ask("late", chunks.hashes(1))
    if again:  # then it was another copy whose time was over
        told.engine.journal.note("near", "stored", "", [key])
    told.engine.journal.note("near", "evicted", "expired", [key])
    missed(told.explain("late"), "unknown" if again else "expired", "another process" if again else "a longer `ttl`")


@pytest.mark.parametrize(
    ("event", "cause", "words"),
    [
        (None, "unknown", "deleted there by somebody else | "),
        (("evicted", "room"), "evicted", "a larger `capacity` of tier near"),
        (("evicted", "cleared"), "unknown", "deleted there by somebody else | "),
    ],
)
def test_a_tier_no_longer_has_what_it_said_it_had(
    make: Any, event: "tuple[str, str] | None", cause: str, words: str
) -> None:
    told = make(MEMORY)
    keys = chunks.hashes(1)
    told.put(keys)
    told.engine.clear(told.space)
    storage = told.engine.manager.tiers[0].storage
    storage.load = lambda items: [MISSING for _ in items]
    told.ask("late", keys)
    if event is not None:
        told.engine.journal.note("near", *event, [_key(told, keys[0])])
    missed(told.explain("late"), cause, "was in near when it was asked", words)


@pytest.mark.parametrize(
    ("what", "reason", "detail", "cause", "words"),
    [
        ("dropped", "queue_full", "", "dropped", ("was not written to tier near", "`queue_size`")),
        ("dropped", "evicted_first", "", "dropped", ("L1 needed the room before it could be written",)),
        ("held_back", "", "", "held_back", ("`write: reused`", "`write: all` of tier near")),
        ("failed", "io", "store", "failed", ("could not be stored in tier near", "(io)", "kvcore doctor")),
        ("failed", "corrupt", "load", "corrupt", ("could not be loaded from tier near", "kvcore store verify")),
    ],
)
def test_what_became_of_it_on_its_way_to_a_tier(
    make: Any, what: str, reason: str, detail: str, cause: str, words: tuple[str, ...]
) -> None:
    told = make(MEMORY)
    key = _key(told, chunks.hashes(1)[0])
    told.engine.journal.note("l1", "evicted", "room", [key], "lru")
    told.engine.journal.note("near", what, reason, [key], detail)
    missed(told.ask("late", chunks.hashes(1)), cause, "was evicted from l1", *words)


def test_no_room_in_l1_when_it_was_computed(make: Any) -> None:
    told = make()
    told.engine.journal.note("l1", "skipped", "l1_full", [_key(told, chunks.hashes(1)[0])])
    missed(told.ask("late", chunks.hashes(1)), "skipped", "was not stored in l1", "a larger `l1.size`")


def test_it_left_without_a_word(make: Any) -> None:
    told = make(MEMORY)
    keys = chunks.hashes(2)
    told.put(keys)
    told.engine.manager.tiers[0].storage._objects.clear()
    told.engine.clear(told.space)
    said = told.ask("late", keys)
    missed(said, "cleared", "was deleted from l1", "on request")
    told.engine.journal.clear()
    told.engine.journal.note("near", "stored", "", [_key(told, k) for k in keys])
    missed(told.ask("again", keys), "unknown", "was last heard of in near", "another process")


# -- there, and not usable ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "cause", "words"),
    [
        ("corrupt", "corrupt", ("was in near, but damaged", "kvcore store verify")),
        ("io", "failed", ("was in near, which failed to deliver it (io)", "kvcore doctor")),
        ("version", "unreadable", ("in the format of another release", "kvcore store gc --versions")),
        ("unknown_serde", "unreadable", ("a serde that is not installed", "--serdes")),
    ],
)
def test_a_tier_does_not_deliver(make: Any, kind: str, cause: str, words: tuple[str, ...]) -> None:
    told = make(MEMORY)
    keys = chunks.hashes(4)
    told.put(keys)
    told.engine.clear(told.space)
    storage = told.engine.manager.tiers[0].storage
    real = storage.load
    storage.load = lambda items: [
        Failed("planted", kind) if i.key.chunk_hash == keys[2] else o for i, o in zip(items, real(items), strict=True)
    ]
    said = told.ask("torn", keys)
    assert said.found.places == {"near": 3}
    assert "2 of 4 chunks (objects loaded: 3 in near; what lies behind the gap" in explanation(said)[1][1]
    missed(said, cause, *words, chunk=2)


def test_a_tier_that_is_down(make: Any) -> None:
    told = make(MEMORY)
    keys = chunks.hashes(2)
    told.put(keys)
    told.engine.clear(told.space)
    tier = told.engine.manager.tiers[0]
    tier.storage.ping = _fails
    told.engine.manager.loop.submit(_opened(tier)).result(10)
    said = told.ask("down", keys)
    missed(said, "tier_down", "may be in near, which was left alone", "kvcore doctor")
    assert said.now is not None
    assert said.now.silent == {"near": "planted"}
    assert any("could not be asked" in text for about, text in explanation(said) if about == "note")


def test_a_tier_is_too_slow(make: Any) -> None:
    told = make("l2: [{name: far, storage: {plugin: faulty, operations: [load], latency: 8s, storage: memory}}]\n")
    keys = chunks.hashes(1)
    told.put(keys)
    told.engine.clear(told.space)
    told.engine.manager.config.__dict__["lookup_timeout"] = 0.2
    missed(told.ask("slow", keys), "timeout", "had not come within `lookup_timeout`", "kvcore bench l2")


# -- another namespace -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weights": "v"}, "weights"),
        ({"dtype": "float16"}, "dtype"),
        ({"layout": "HND"}, "layout"),
        ({"isa": "amx"}, "instruction set"),
        ({"extra": {"lora": "sql:1f2e"}}, "lora"),
    ],
)
def test_the_same_chunk_under_another_namespace(make: Any, change: dict[str, Any], field: str) -> None:
    told = make()
    other = told.engine.register(replace(chunks.spec(), **change))
    keys = chunks.hashes(3)
    told.put(keys, other)
    said = told.ask("other", keys)
    missed(said, "other_namespace", "in l1 under another namespace", field)
    assert said.broke is not None
    assert [d.field for d in said.broke.differences] == [field]


def test_another_tenants_chunks(make: Any) -> None:
    """A tenant that the configuration does not name may be a salt, which is shown to nobody."""
    told = make("l2: []\ntenants: {alice: {l1: 2MiB}}\n")
    keys = chunks.hashes(2)
    told.put(keys[:1], told.engine.register(chunks.spec(), "alice"))
    told.put(keys[1:], told.engine.register(chunks.spec(), "a secret salt"))
    missed(told.ask("one", keys[:1]), "other_namespace", "tenant (none here, alice there)")
    said = told.ask("two", keys[1:])
    missed(said, "other_namespace", "tenant (none here, #")
    assert "secret" not in said.model_dump_json()


@pytest.mark.parametrize(("salt", "field"), [("ab12", "tenant"), (salt_word("pepper"), "cache salt")])
def test_the_same_tokens_with_another_salt(make: Any, salt: str, field: str) -> None:
    """Its hashes are others, too: only the tokens tell. Engines take a salt for the tenant, where none is named."""
    told = make(tokens=True)
    ids = list(range(3 * SIZE))
    salted = told.engine.register(chunks.spec(), "pepper")
    told.put(chunks.hashes(3, 50), salted)
    told.ask("one", chunks.hashes(3, 50), ids, space=salted, salt=salt)
    said = told.ask("two", chunks.hashes(3), ids)
    missed(said, "other_namespace", f"request one has the same tokens, but differs in {field} (none here, #")


def test_what_an_earlier_process_has_stored_under_another_namespace(tmp_path: Path) -> None:
    """As after a new checkpoint or another release of the engine. Tenants of it are not on record, but are found."""
    path, keys = tmp_path / "kvcore.yaml", chunks.hashes(2)
    path.write_text(
        f"l1: {{size: 8MiB}}\nmin_object_size: 128KiB\nlookup_timeout: 20s\nl2: [{{storage: {{plugin: disk, path: "
        f"{tmp_path}/kv}}}}]\n"
    )
    for tenant in ("", "pepper"):
        engine = CacheEngine.open(str(path))
        engine.identities.keep(Catalog(tmp_path))
        chunks.put(engine, engine.register(chunks.spec("old"), tenant), keys)
        engine.close()
    assert "pepper" not in Catalog(tmp_path).path.read_text()
    told = Told(CacheEngine.open(str(path)))
    told.engine.identities.keep(Catalog(tmp_path))
    for n, tenant in enumerate(("", "pepper")):
        said = told.ask(f"new{n}", keys, space=told.engine.register(chunks.spec("new"), tenant))
        missed(said, "other_namespace", "it is in disk under another namespace", "weights (new here, old there)")
    told.put(keys, told.engine.register(chunks.spec("new"), "pepper"))  # as the request's engine does
    missed(told.explain("new1"), "other_namespace", "it is in disk")
    told.engine.close()


def test_the_catalog_keeps_no_line_twice_and_bears_with_torn_ones(tmp_path: Path) -> None:
    identity = Identity(chunks.spec(), 32, "engine/1", "", "", ["quant/1"])
    for _ in range(2):
        Catalog(tmp_path).note(b"n" * 16, identity)
    Catalog(tmp_path).note(b"m" * 16, identity._replace(tenant="alice"))
    catalog = Catalog(tmp_path)
    assert len(catalog.path.read_text().splitlines()) == 1
    assert catalog.path.stat().st_mode & 0o777 == 0o600
    with catalog.path.open("a") as file:
        file.write('{"namespace": "00"}\n[1]\n{"namespace": "6d6d", "spec"')
    assert catalog.all() == {b"n" * 16: identity}
    Catalog(tmp_path / "nowhere").note(b"n" * 16, identity)
    assert Catalog(tmp_path / "nowhere").all() == {}


def test_the_catalog_takes_a_spec_as_it_may_be(tmp_path: Path) -> None:
    class Number:  # as numpy's: nothing that JSON knows
        def __index__(self) -> int:
            return 2

    spec = replace(chunks.spec(), ranks=Number(), parallel=MappingProxyType({"tp": Number()}))
    Catalog(tmp_path).note(b"n" * 16, Identity(spec, 32, "engine/1"))
    assert Catalog(tmp_path).all()[b"n" * 16].spec == replace(chunks.spec(), ranks=2, parallel={"tp": 2})


def test_the_catalog_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.explain.catalog.MAX_BYTES", 4000)
    catalog = Catalog(tmp_path)
    for n in range(40):
        catalog.note(bytes([n]) * 16, Identity(chunks.spec(str(n)), 32, "engine/1"))
    found = catalog.all()
    assert bytes([39]) * 16 in found
    assert bytes([0]) * 16 not in found
    assert catalog.path.stat().st_size < 5000


def test_a_full_disk_leaves_the_catalog_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.explain.catalog.MAX_BYTES", 0)
    catalog = Catalog(tmp_path)
    catalog.note(b"a" * 16, Identity(chunks.spec("a"), 32, "engine/1"))

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    catalog.note(b"b" * 16, Identity(chunks.spec("b"), 32, "engine/1"))
    assert [path.name for path in tmp_path.iterdir()] == ["namespaces.jsonl"]
    assert list(catalog.all()) == [b"a" * 16]


def test_requests_to_an_object_store(tmp_path: Path) -> None:
    """Of an engine that owns its memory, as SGLang: it asks block by block, for tiers alone."""
    path, keys = tmp_path / "kvcore.yaml", chunks.hashes(4)
    path.write_text("lookup_timeout: 20s\nl2: [{name: near, storage: memory}]\n")
    store = open_store(str(path), name="sglang")
    space = store.register(chunks.spec(), "acme-page/1")
    old = store.register(chunks.spec("old"), "acme-page/1")
    payloads = [[memoryview(bytearray(space.layouts[0].nbytes))] for _ in keys]
    assert all(store.store(space, keys[:2], payloads[:2]))
    assert all(store.store(old, keys[2:], payloads[2:]))
    assert store.prefix(space, keys, asked=Asked("page", 4 * SIZE)) == 2
    said = explain_request(store, "page", "sglang").explanations[0]
    assert (said.model, said.found.chunks, said.chunk_tokens) == ("m", 2, SIZE)
    missed(said, "other_namespace", "it is in near under another namespace", "weights (w here, old there)", chunk=2)
    assert said.now is not None
    assert said.now.places == {"near": 2}
    store.close()


# -- who asks for what -------------------------------------------------------------------------------------------------


def test_a_part_of_an_id_is_enough_and_others_are_named(make: Any) -> None:
    told = make()
    for n in range(3):
        told.ask(f"cmpl-{n}-0-abcdef", chunks.hashes(1))
    found = explain_request(told.engine, "cmpl-1")
    assert found.explanations[0].request == "cmpl-1-0-abcdef"
    found = explain_request(told.engine, "cmpl-")
    assert found.explanations[0].request == "cmpl-2-0-abcdef"
    assert found.more == ["cmpl-1-0-abcdef", "cmpl-0-0-abcdef"]
    told.ask("cmpl-22-0-abcdef", chunks.hashes(1))
    assert explain_request(told.engine, "cmpl-2").explanations[0].request == "cmpl-2-0-abcdef"
    assert explain_request(told.engine, "22").explanations[0].request == "cmpl-22-0-abcdef"
    for letters in ("pl", "b"):  # parts of words: chance finds them
        with pytest.raises(NotOnRecord, match="no request"):
            explain_request(told.engine, letters)
    assert explain_request(told.engine, "abc").explanations[0].request == "cmpl-22-0-abcdef"


def test_every_lookup_of_a_request_is_explained_and_is_not_its_own_neighbour(make: Any) -> None:
    told = make()
    keys = chunks.hashes(2)
    told.ask("twice", keys)
    told.put(keys)
    told.ask("twice", keys)
    last, first = explain_request(told.engine, "twice").explanations
    assert (last.broke, last.nearest) == (None, None)
    missed(first, "never_stored")


def test_an_unknown_request_is_said_to_be_so(make: Any) -> None:
    told = make()
    told.ask("known", chunks.hashes(1))
    with pytest.raises(NotOnRecord, match="no request 'other' is among the 1 lookups on record"):
        explain_request(told.engine, "other")


def test_without_a_record_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "kvcore.yaml"
    path.write_text("l1: {size: 8MiB}\nl2: []\ninspect: {requests: 0}\n")
    engine = CacheEngine.open(str(path))
    with pytest.raises(NotOnRecord, match=r"`inspect.requests` is 0"):
        explain_request(engine, "any")
    engine.close()


# -- prompts -----------------------------------------------------------------------------------------------------------


def of_tokens(told: Told, space: Space, ids: Sequence[int]) -> list[bytes]:
    return space.hashes(KeySource(space.chunk_tokens, space.spec.block_tokens, ids))


def test_a_prompt_is_looked_for_now(make: Any) -> None:
    told = make(f"keys: tokens\n{MEMORY}")
    ids = list(range(5 * SIZE + 3))
    told.put(of_tokens(told, told.space, ids)[:4])
    said = explain_prompt(told.engine, Question(tokens=ids, model="m")).explanations[0]
    assert (said.found.chunks, said.chunks, said.request) == (4, 5, "")
    assert said.now is not None
    assert said.now.places == {"l1": 4, "near": 4}
    missed(said, "never_stored", chunk=4)
    told.engine.clear(told.space)
    said = explain_prompt(told.engine, Question(tokens=ids)).explanations[0]
    assert said.found.chunks == 4  # the tier still has them
    assert dict(explanation(said))["found"] == "4 of 5 chunks; there now: 4 in near"


def test_a_prompt_of_another_tenant_is_told_of(make: Any) -> None:
    told = make("keys: tokens\nl2: []\n")
    ids = list(range(2 * SIZE))
    salted = told.engine.register(chunks.spec(), "pepper")
    told.put(of_tokens(told, salted, ids), salted)
    said = explain_prompt(told.engine, Question(tokens=ids)).explanations[0]
    assert any(
        "the first 2 chunks of the same tokens are in l1 under another namespace: tenant" in n for n in said.notes
    )
    assert explain_prompt(told.engine, Question(tokens=ids, salt="pepper")).explanations[0].found.chunks == 2
    with pytest.raises(
        ConfigError, match=r"nobody has asked for this model as the tenant .* #\w+ .*tenants: #\w+, none"
    ):
        explain_prompt(told.engine, Question(tokens=ids, salt="mustard"))


def test_a_prompt_by_its_hashes(make: Any) -> None:
    told = make()
    keys = chunks.hashes(3)
    told.put(keys[:2])
    question = Question(hashes=[k.hex() for k in keys], namespace=told.space.namespace.hex())
    assert explain_prompt(told.engine, question).explanations[0].found.chunks == 2
    with pytest.raises(ValueError, match="give `namespace`, too"):
        Question(hashes=["00"])


@pytest.mark.parametrize("tier", [True, False])
def test_nothing_is_said_of_what_tiers_were_not_asked_for(
    make: Any, monkeypatch: pytest.MonkeyPatch, tier: bool
) -> None:
    monkeypatch.setattr("kvcore.explain.cache.MAX_ASKED", 4)
    told = make(MEMORY if tier else "l2: []\n")
    keys = chunks.hashes(6)
    told.put(keys)
    question = Question(hashes=[k.hex() for k in [*keys, *chunks.hashes(2, 100)]], namespace=told.space.namespace.hex())
    said = explain_prompt(told.engine, question).explanations[0]
    assert said.found.chunks == 6
    if tier:
        assert said.broke is None
        assert said.notes == ["tiers are asked for the first 4 chunks only: what they have behind these is not known"]
        told.engine.clear(told.space)
        said = explain_prompt(told.engine, question).explanations[0]
        assert (said.found.chunks, said.broke) == (4, None)
    else:
        missed(said, "never_stored", chunk=6)
        assert said.notes == []


def test_hashes_that_only_the_engine_can_make_are_refused(make: Any) -> None:
    told = make()  # keys: engine, of an engine that is no plugin
    with pytest.raises(ConfigError, match="how test names the chunks of a prompt is not known here"):
        explain_prompt(told.engine, Question(tokens=list(range(64))))
    told.engine.register(replace(chunks.spec(), model="n"))
    with pytest.raises(ConfigError, match="no model 'x' is registered with this cache: m, n"):
        explain_prompt(told.engine, Question(tokens=[1], model="x"))


def test_a_model_by_another_name_is_taken_for_the_only_one_there_is(make: Any) -> None:
    said = explain_prompt(make("keys: tokens\nl2: []\n").engine, Question(tokens=[1], model="x")).explanations[0]
    assert said.notes[0] == "the cache has one model, 'm': taken for 'x'"
    missed(said, "short_prompt", "1 token, less than one chunk")


# -- two prompts -------------------------------------------------------------------------------------------------------


def test_two_requests_are_compared(make: Any) -> None:
    told = make("keys: tokens\nl2: []\n", tokens=True)
    ids = list(range(3 * SIZE))
    other = [*ids[:50], 7, *ids[51:]]
    told.ask("a", of_tokens(told, told.space, ids), ids)
    told.ask("b", of_tokens(told, told.space, other), other)
    said = compare(told.engine, Comparison(a=Side(request="a"), b=Side(request="b")))
    assert (said.chunks, said.tokens) == (1, 50)
    assert said.text == "the first 50 tokens: 1 whole chunk of 32, so 32 are reused"
    assert dict(diff(said))["b"] == "token 7 (its text: give --model DIR)"
    said = compare(told.engine, Comparison(a=Side(request="a"), b=Side(tokens=other)))
    assert (said.chunks, said.tokens, said.differences) == (1, 50, [])


def test_a_request_is_not_compared_with_itself(make: Any) -> None:
    told = make()
    told.ask("cmpl-1-abcdef", chunks.hashes(3))
    for a, b, named in (("cmpl-1", "1", "'cmpl-1' and '1'"), ("abcdef", "abcdef", "'abcdef'")):
        with pytest.raises(ConfigError, match=f"^{named}: A and B are one request, cmpl-1-abcdef: name two"):
            compare(told.engine, Comparison(a=Side(request=a), b=Side(request=b)))


def test_two_requests_without_tokens_are_compared_by_chunks(make: Any) -> None:
    told = make()
    keys = chunks.hashes(3)
    told.ask("a", keys)
    told.ask("b", [*keys[:2], *chunks.hashes(1, 9)])
    told.ask("c", keys, space=told.engine.register(chunks.spec("v")))
    said = compare(told.engine, Comparison(a=Side(request="a"), b=Side(request="b")))
    assert (said.chunks, said.tokens) == (2, None)
    said = compare(told.engine, Comparison(a=Side(request="a"), b=Side(request="c")))
    assert [d.field for d in said.differences] == ["weights"]
    assert said.text.startswith("nothing: their namespaces differ in weights (w here, v there)")


# -- the longest common prefix -----------------------------------------------------------------------------------------


def decision(hashes: Sequence[bytes], begin: int = 0, ids: "Sequence[int] | None" = None) -> Decision:
    return Decision(Asked("", 0, ids), b"n", hashes, begin, 4, begin, 0.0)


@given(
    a=st.lists(st.integers(0, 1), max_size=9),
    b=st.lists(st.integers(0, 1), max_size=9),
    begins=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
@settings(max_examples=200, deadline=None)
def test_common_chunks_are_those_of_a_chain(a: list[int], b: list[int], begins: tuple[int, int]) -> None:
    """Hashes of a chain: each covers all before it. A server does not have those that an engine held itself."""
    chains = [[repr(x[: i + 1]).encode() for i in range(len(x))] for x in (a, b)]
    one, two = (decision(c[n:], min(n, len(c))) for c, n in zip(chains, begins, strict=True))
    same = shared_tokens(a, b)
    seen = max(one.begin, two.begin)
    assert shared(one, two) == (same if same > seen else 0)


@given(a=st.lists(st.integers(0, 1), max_size=300), cut=st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_common_tokens(a: list[int], cut: int) -> None:
    b = [*a[:cut], 2, *a[cut:]]
    assert shared_tokens(a, b) == shared_tokens(b, a) == min(cut, len(a))


def test_looking_for_the_nearest_of_a_full_record_is_quick() -> None:
    """1,024 requests of 128 chunks each that share all but the last, with their tokens."""
    front = [b"%032d" % i for i in range(127)]
    ids = list(range(2000))
    others = [decision([*front, b"%032d" % (1000 + i)], 0, [*ids, 5000 + i]) for i in range(1024)]
    begun = time.perf_counter()
    found = nearest(decision([*front, b"x" * 32], 0, [*ids, 1]), others)
    assert found is not None
    assert (found.chunks, found.tokens) == (127, 2000)
    assert time.perf_counter() - begun < 5  # some 30 ms


def _key(told: Told, chunk_hash: bytes) -> Any:
    from kvcore.api import ObjectKey

    return ObjectKey(told.space.namespace, chunk_hash)


def _fails() -> None:
    raise OSError("planted")


async def _opened(tier: Any) -> None:
    tier.breaker.open("planted")
