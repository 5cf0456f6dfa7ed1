"""`kvcore clear` and `kvcore pin`: what this user does to open caches, over their sockets and over HTTP."""

import json
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from served import until

from kvcore.api import KVCoreError, ObjectKey
from kvcore.builtin.memory import MemoryStorage
from kvcore.cli import main
from kvcore.engine import Asked, CacheEngine, Space
from kvcore.service import open_engine, open_store
from kvcore.service.inspect import Refusal, answer, ask, caches
from kvcore.testing.chunks import contents, hashes, put, spec
from kvcore.testing.servers.kvcore import KVCoreServer

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of sockets, which no other test uses."""
    run = folder / "run"
    monkeypatch.setenv("KVCORE_RUN_DIR", str(run))
    monkeypatch.delenv("KVCORE_CONFIG", raising=False)
    return run


@pytest.fixture
def engine(folder: Path) -> Iterator[CacheEngine]:
    path = folder / "kvcore.yaml"
    path.write_text(
        "l1: {size: 8MiB}\nl2: [{storage: memory}]\nmin_object_size: 128KiB\nlookup_timeout: 20s\nkeys: tokens\n"
    )
    engine = open_engine(str(path), name="vllm")
    assert isinstance(engine, CacheEngine)
    yield engine
    engine.close()


def there(engine: CacheEngine, space: Space, keys: list[bytes]) -> int:
    """How many of these L1 has."""
    return sum(h in engine.object_space(space, 0).objects for h in keys)


def told(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    assert main(list(words)) == status, capsys.readouterr()
    return capsys.readouterr()


def as_json(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    (one,) = json.loads(told(capsys, *words, "--json", status=status)[0])["caches"]
    assert isinstance(one, dict)
    return one


# -- clearing ----------------------------------------------------------------------------------------------------------


def test_l1_is_cleared_and_a_tier_where_that_is_said(engine: CacheEngine, capsys: pytest.CaptureFixture[str]) -> None:
    space, other = engine.register(spec()), engine.register(spec("other"), "alice")
    put(engine, space, hashes(4))
    put(engine, other, hashes(2))
    _, err = told(capsys, "clear", "--all", status=1)
    assert "--all forgets what every model has: say --yes" in err
    assert there(engine, space, hashes(4)) == 4
    out, _ = told(capsys, "clear", "--tenant", "alice")
    assert re.fullmatch(r"vllm-\d+: forgotten: 2 objects of l1\n", out)
    assert (there(engine, space, hashes(4)), there(engine, other, hashes(2))) == (4, 0)
    assert contents(engine, other, hashes(2)) == [1, 2]  # from the tier
    found = as_json(capsys, "clear", "--namespace", space.namespace.hex(), "--tier", "memory")
    assert (found["l1"], found["tiers"], found["complete"], found["problems"]) == (4, {"memory": 4}, True, {})
    assert contents(engine, space, hashes(4)) == []
    found = as_json(capsys, "clear", "--all", "--yes", "--tiers")
    assert (found["l1"], found["tiers"]) == (2, {"memory": 2})
    assert contents(engine, other, hashes(2)) == []


def test_a_tier_is_listed_once_for_all_that_a_tenant_has(
    engine: CacheEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = [engine.register(spec(name), "alice") for name in ("one", "two", "three")]
    for space in [*spaces, engine.register(spec())]:
        put(engine, space, hashes(2))
    engine.drain()
    lists, listed = MemoryStorage.list, list[None]()

    def list_(self: MemoryStorage) -> Any:
        listed.append(None)
        return lists(self)

    monkeypatch.setattr(MemoryStorage, "list", list_)
    found = as_json(capsys, "clear", "--tenant", "alice", "--tiers")
    assert (found["l1"], found["tiers"], len(listed)) == (6, {"memory": 6}, 1)


def test_what_was_cleared_from_a_tier_is_explained_so(engine: CacheEngine, capsys: pytest.CaptureFixture[str]) -> None:
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.clear(space)
    engine.journal.clear()  # as after a restart: the tier has it, and nobody has heard of it
    told(capsys, "clear", "--all", "--yes", "--tiers")
    lookup = engine.lookup(space, tuple(hashes()), asked=Asked("again", 8 * space.chunk_tokens))
    assert lookup.wait(PATIENCE_S)
    engine.release(lookup)
    out, _ = told(capsys, "explain", "again")
    assert re.search(r"chunk 1 .*was deleted from tier memory .* before, on request", out), out


def test_a_namespace_is_cleared_by_how_it_begins(
    engine: CacheEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    space, other = engine.register(spec()), engine.register(spec("other"))
    put(engine, space, hashes(4))
    put(engine, other, hashes(2))
    names = [space.namespace.hex(), other.namespace.hex()]
    begin = next(names[0][:n] for n in range(6, 32) if not names[1].startswith(names[0][:n]))
    found = as_json(capsys, "clear", "--namespace", begin, "--tiers")
    assert (found["l1"], found["tiers"]) == (4, {"memory": 4})
    assert there(engine, other, hashes(2)) == 2
    alike = [bytes.fromhex("abcdef" + f"{n:026x}") for n in range(2)]
    monkeypatch.setattr("kvcore.service.inspect.clearing.spaces_of", lambda engine: dict.fromkeys(alike))
    _, err = told(capsys, "clear", "--namespace", "abcdef", "--tiers", status=1)
    assert f"2 namespaces known here begin with abcdef: choose one: {alike[0].hex()}, {alike[1].hex()}" in err


def test_what_is_read_is_forgotten_too(engine: CacheEngine, capsys: pytest.CaptureFixture[str]) -> None:
    space = engine.register(spec())
    put(engine, space, hashes(4))
    lookup = engine.lookup(space, hashes(1))
    assert lookup.wait(PATIENCE_S)
    assert as_json(capsys, "clear", "--all", "--yes")["l1"] == 4
    engine.release(lookup)
    assert as_json(capsys, "clear", "--all", "--yes")["l1"] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tenant", "nobody"], "nothing in L1 is the tenant 'nobody''s"),
        (["--all", "--yes", "--tier", "dsik"], "no tier is named 'dsik': there are memory"),
        (["--namespace", "abc"], "'abc' is no namespace: 32 characters of [0-9a-f], or the first 6 or more"),
        (["--namespace", "abcdef"], "no namespaces known here begin with abcdef: `kvcore store ls` shows whole ones"),
        (["--all", "--yes", "--cache", "sglang"], "--cache sglang: there are vllm-"),
    ],
    ids=["tenant", "tier", "namespace", "no-namespace", "cache"],
)
def test_what_cannot_be_cleared_is_said(
    engine: CacheEngine, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["clear", *words]) in (1, 2)
    assert says in capsys.readouterr().err


def test_of_a_server_and_its_engine_the_server_is_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"l1": {"size": "8MiB"}, "l2": [], "min_object_size": "128KiB", "lookup_timeout": "20s"}
    with KVCoreServer(folder, config, name="s") as server:
        engine = open_engine(str(server.config), flags={"server.timeout": "10s"}, name="client")
        space = engine.register(spec())
        until(engine.descriptor, "a connection", PATIENCE_S)
        put(engine, space, hashes(3))  # type: ignore[arg-type]
        lookup = engine.lookup(space, hashes(3))
        assert lookup.wait(PATIENCE_S)
        engine.release(lookup)
        pinned = as_json(capsys, "pin", hashes(3)[2].hex()[:12], "--for", "1h")
        assert (pinned["cache"][:7], pinned["pinned"]) == ("server-", 3)
        found = as_json(capsys, "clear", "--all", "--yes")
        assert (found["cache"][:7], found["l1"]) == ("server-", 3)
        _, err = told(capsys, "clear", "--all", "--yes", "--cache", "client", status=1)
        assert "client uses the cache of a server: ask that one" in err
        engine.close()


def test_a_store_without_l1_says_what_clears_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "store.yaml"
    path.write_text("l2: [{storage: memory}]\n")
    store = open_store(str(path), name="sglang")
    try:
        _, err = told(capsys, "clear", "--all", "--yes", status=1)
        assert "sglang has no L1: `kvcore store rm` deletes what tiers hold" in err
    finally:
        store.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The tier deletes for as long as the second is not set; the first is when it has begun."""
    begun, go_on = threading.Event(), threading.Event()
    deletes = MemoryStorage.delete

    def delete(self: MemoryStorage, keys: Sequence[ObjectKey]) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        deletes(self, keys)

    monkeypatch.setattr(MemoryStorage, "delete", delete)
    yield begun, go_on
    go_on.set()


def test_others_are_answered_while_a_slow_tier_is_cleared(
    engine: CacheEngine, slow: tuple[threading.Event, threading.Event], capsys: pytest.CaptureFixture[str]
) -> None:
    begun, go_on = slow
    put(engine, engine.register(spec()), hashes(4))
    (cache,) = caches()
    status = list[int]()
    command = threading.Thread(target=lambda: status.append(main(["clear", "--all", "--yes", "--tiers"])))
    command.start()
    assert begun.wait(PATIENCE_S)
    assert ask(cache, "/status", timeout_s=PATIENCE_S)["kind"] == "engine"
    assert not status
    go_on.set()
    command.join(PATIENCE_S)
    assert status == [0]
    assert "forgotten: 4 objects of l1, 4 objects of memory" in capsys.readouterr().out


def test_no_more_than_a_few_clear_at_once(
    engine: CacheEngine, slow: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = slow
    monkeypatch.setattr(answer, "MAX_BESIDE", 1)
    put(engine, engine.register(spec()), hashes(1))
    (cache,) = caches()
    everything = {"all": True, "tiers": True}
    first = threading.Thread(target=ask, args=(cache, "/clear", everything), kwargs={"timeout_s": PATIENCE_S})
    first.start()
    assert begun.wait(PATIENCE_S)
    with pytest.raises(Refusal, match="it is at work for 1 others: ask again") as refused:
        ask(cache, "/clear", everything)
    assert refused.value.status == 503
    go_on.set()
    first.join(PATIENCE_S)

    def again() -> bool:
        try:
            return bool(ask(cache, "/clear", everything)["complete"])
        except Refusal:  # its answer comes a moment before its end
            return False

    until(again, "the place is free again", PATIENCE_S)


def test_a_cache_that_is_closed_while_it_clears_says_so_and_nothing_worse(
    engine: CacheEngine, slow: tuple[threading.Event, threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = slow
    put(engine, engine.register(spec()), hashes(1))
    (cache,) = caches()
    faults = list[str]()

    def clear() -> None:
        try:
            ask(cache, "/clear", {"all": True, "tiers": True}, timeout_s=PATIENCE_S)
        except KVCoreError as fault:
            faults.append(str(fault))

    asking = threading.Thread(target=clear)
    asking.start()
    assert begun.wait(PATIENCE_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: engine.manager.closed, "it is being closed", PATIENCE_S)
    go_on.set()
    asking.join(PATIENCE_S)
    closing.join(PATIENCE_S)
    assert not any("is gone" in fault for fault in faults)
    assert not [r for r in caplog.records if r.exc_info]


def test_what_was_asked_by_somebody_who_has_left_is_not_done(engine: CacheEngine, run: Path) -> None:
    """As of a process that was stopped meanwhile: its questions are still there when it goes on."""
    space = engine.register(spec())
    put(engine, space, hashes(2))
    (cache,) = caches()
    body = b'{"all": true}'
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.connect(cache.path)  # it is waited for, and nobody else is answered
        second.connect(cache.path)
        second.sendall(b"POST /clear HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert ask(cache, "/status")["kind"] == "engine"  # it was behind it
    assert there(engine, space, hashes(2)) == 2


# -- pinning -----------------------------------------------------------------------------------------------------------


def crowd(engine: CacheEngine, space: Space) -> None:
    """Other objects, more than L1 can hold."""
    for i in range(8):
        put(engine, space, hashes(16, 1000 + 16 * i))


def test_a_prefix_that_top_shows_is_kept_for_a_time(engine: CacheEngine, capsys: pytest.CaptureFixture[str]) -> None:
    space, keys = engine.register(spec(), "alice"), hashes(5)
    put(engine, space, keys)
    for more in (hashes(1, 50), hashes(1, 60)):
        contents(engine, space, [*keys[:3], *more])  # three chunks are what both have
    assert main(["top", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["caches"][0]["hot"]["prefixes"]
    prefix = shown["hash"][:13]  # also in the midst of a byte
    assert shown["hash"] == keys[2].hex()
    out, _ = told(capsys, "pin", prefix, "--for", "1h")
    assert re.search(r"vllm-\d+: 3 of 3 chunks of 32 tokens stay in L1 until 20\d\d-\S+Z, of m, #cc419f21\n", out)
    crowd(engine, space)
    assert (there(engine, space, keys[:3]), there(engine, space, keys[3:])) == (3, 0)
    found = as_json(capsys, "pin", prefix, "--end")
    assert (found["chunks"], found["ended"], found["until"]) == (3, 3, None)
    assert (
        "none of 3 chunks of m, #cc419f21 was pinned: there was no pin, or it has ended, with its time or because it "
        in (told(capsys, "pin", prefix, "--end")[0])
    )
    crowd(engine, space)
    assert there(engine, space, keys) == 0
    out, _ = told(capsys, "pin", prefix, "--for", "1h", status=1)
    assert "0 of 3 chunks of 32 tokens stay in L1, of m, #cc419f21: the others are not there (ask for the prompt" in out


def test_a_prompt_is_kept(engine: CacheEngine, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvcore.api import KeySource

    space, tokens = engine.register(spec()), list(range(100))
    keys = space.hashes(KeySource(space.chunk_tokens, 32, tokens))
    put(engine, space, keys)
    file = folder / "prompt.json"
    file.write_text(json.dumps(tokens))
    found = as_json(capsys, "pin", "--prompt-file", str(file), "--for", "30min")
    assert (found["chunks"], found["pinned"], found["namespace"]) == (3, 3, space.namespace.hex())
    crowd(engine, space)
    assert there(engine, space, keys) == 3
    file.write_text(json.dumps(tokens[:31]))
    _, err = told(capsys, "pin", "--prompt-file", str(file), "--for", "30min", status=1)
    assert "the prompt is shorter than a chunk, which has 32 tokens" in err


def test_what_cannot_be_pinned_is_said(engine: CacheEngine, capsys: pytest.CaptureFixture[str]) -> None:
    space, other = engine.register(spec()), engine.register(spec("other"))
    for each in (space, other):
        contents(engine, each, hashes(2))
    name = hashes(1)[0].hex()[:12]
    cases = {
        ("pin", "--for", "1h"): "give a PREFIX, as `kvcore top` shows it, or a prompt",
        ("pin", "0" * 12, "--for", "1h"): f"no request on record has a chunk whose hash begins with {'0' * 12}",
        ("pin", name, "--for", "1h"): "2 prefixes on record have a hash that begins with",
    }
    for words, says in cases.items():
        _, err = told(capsys, *words, status=1)
        assert says in err, err
    assert main(["pin", name]) == 2
    found = as_json(capsys, "pin", name, "--namespace", other.namespace.hex(), "--for", "1h", status=1)
    assert (found["chunks"], found["pinned"]) == (1, 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["pin", "96", "--for", "1h"], "'96' is no prefix: 8 characters of [0-9a-f] or more, as `kvcore top` shows it"),
        (["pin", "", "--for", "1h"], "'' is no prefix"),
        (["pin", "0" * 8, "--for", "0s"], "0s is no time to keep it: write one above 0s, of at most 30d; --end ends"),
        (["pin", "0" * 8, "--for", "31d"], "31d is no time to keep it"),
        (["pin", "0" * 8, "--for", "1h", "--namespace", "zz"], "'zz' is no namespace"),
        (["pin", "0" * 8, "--for", "1h", "--tenant", "\udcff"], r"'\udcff' is no text in UTF-8"),
        (["clear", "--tenant", "\udcff"], r"'\udcff' is no text in UTF-8"),
        (["clear", "--tenant", ""], "the name is empty: what requests without a tenant have, --namespace clears"),
        (["explain", "--prompt", "x", "--salt", "\udcff"], r"'\udcff' is no text in UTF-8"),
    ],
    ids=["short", "empty", "no-time", "long", "namespace", "tenant", "clear-tenant", "clear-nobody", "salt"],
)
def test_what_is_written_wrongly_is_said_before_anybody_is_asked(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_a_model_of_another_name_is_noted(
    engine: CacheEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space, file = engine.register(spec()), folder / "prompt.json"
    assert space is not None
    file.write_text(json.dumps(list(range(40))))
    _, err = told(capsys, "pin", "--prompt-file", str(file), "--model", "nosuch", "--for", "1h", status=1)
    assert "the cache has one model, 'm': taken for 'nosuch'" in err


def test_a_door_says_what_is_wrong_in_its_own_words(engine: CacheEngine) -> None:
    (cache,) = caches()
    with pytest.raises(Refusal, match=r"^vllm-\d+: give either the tokens of a prompt or the prefix$"):
        ask(cache, "/pin", {"seconds": 1})


def test_nothing_is_pinned_for_a_model_that_nobody_uses(engine: CacheEngine) -> None:
    space = engine.register(spec())
    contents(engine, space, hashes(1))
    del space
    (cache,) = caches()
    with pytest.raises(Refusal, match="no engine uses the model just now"):
        ask(cache, "/pin", {"prefix": hashes(1)[0].hex(), "seconds": 5})
