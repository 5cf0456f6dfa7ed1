"""`kvcore clear` and `kvcore pin`: what this user does to open caches, over their sockets and over HTTP."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import until

from kvcore.cli import main
from kvcore.engine import CacheEngine, Space
from kvcore.service import open_engine, open_store
from kvcore.service.inspect import Refusal, ask, caches
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


def test_what_is_read_stays(engine: CacheEngine, capsys: pytest.CaptureFixture[str]) -> None:
    space = engine.register(spec())
    put(engine, space, hashes(4))
    lookup = engine.lookup(space, hashes(1))
    assert lookup.wait(PATIENCE_S)
    assert as_json(capsys, "clear", "--all", "--yes")["l1"] == 3
    engine.release(lookup)
    assert as_json(capsys, "clear", "--all", "--yes")["l1"] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tenant", "nobody"], "nothing in L1 is the tenant 'nobody''s"),
        (["--all", "--yes", "--tier", "dsik"], "no tier is named 'dsik': there are memory"),
        (["--namespace", "abc"], "'abc' is no namespace: 32 characters of [0-9a-f]"),
        (["--all", "--yes", "--cache", "sglang"], "--cache sglang: there are vllm-"),
    ],
    ids=["tenant", "tier", "namespace", "cache"],
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
    prefix = shown["hash"][:12]
    assert shown["hash"] == keys[2].hex()
    out, _ = told(capsys, "pin", prefix, "--for", "1h")
    assert re.search(r"vllm-\d+: 3 of 3 chunks of 32 tokens stay in L1 until 20\d\d-\S+Z, of m, alice\n", out)
    crowd(engine, space)
    assert (there(engine, space, keys[:3]), there(engine, space, keys[3:])) == (3, 0)
    found = as_json(capsys, "pin", prefix, "--end")
    assert (found["chunks"], found["ended"], found["until"]) == (3, 3, None)
    assert "0 of 3 chunks were pinned, and are no longer" in told(capsys, "pin", prefix, "--end")[0]
    crowd(engine, space)
    assert there(engine, space, keys) == 0
    out, _ = told(capsys, "pin", prefix, "--for", "1h", status=1)
    assert "0 of 3 chunks of 32 tokens stay in L1, of m, alice: the others are not there (ask for the prompt" in out


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
        ("pin", "ab", "--for", "1h"): "a prefix has at least 8 characters",
        ("pin", "0" * 12, "--for", "1h"): f"no request on record has a chunk whose hash begins with {'0' * 12}",
        ("pin", name, "--for", "1h"): "2 prefixes on record have a hash that begins with",
        ("pin", name, "--for", "90d"): "seconds: Input should be less than or equal to",
    }
    for words, says in cases.items():
        _, err = told(capsys, *words, status=1)
        assert says in err, err
    assert main(["pin", name]) == 2
    found = as_json(capsys, "pin", name, "--namespace", other.namespace.hex(), "--for", "1h", status=1)
    assert (found["chunks"], found["pinned"]) == (1, 0)


def test_nothing_is_pinned_for_a_model_that_nobody_uses(engine: CacheEngine) -> None:
    space = engine.register(spec())
    contents(engine, space, hashes(1))
    del space
    (cache,) = caches()
    with pytest.raises(Refusal, match="no engine uses the model just now"):
        ask(cache, "/pin", {"prefix": hashes(1)[0].hex(), "seconds": 5})
