"""A tenant that the configuration does not name may be a request's cache salt: it is shown and logged as a short hash,
and who knows its name uses that."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcore.api import ConfigError
from kvcore.cli import main
from kvcore.engine import CacheEngine
from kvcore.observe.decisions import salt_word
from kvcore.service import open_engine
from kvcore.service.inspect import ask, caches
from kvcore.testing.chunks import contents, hashes, put, spec

SALT = "pw-of-nobody-7f3a"
SHOWN = f"#{salt_word(SALT)}"
Open = Callable[[], CacheEngine]


@pytest.fixture
def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the cache, and closes it first where it is open."""
    monkeypatch.setenv("KVCORE_RUN_DIR", str(folder / "run"))
    monkeypatch.delenv("KVCORE_CONFIG", raising=False)
    path = folder / "kvcore.yaml"
    path.write_text(
        f"l1: {{size: 8MiB}}\nl2: [{{storage: {{plugin: disk, path: {folder / 'disk'}, capacity: 64MiB}}}}]\n"
        "min_object_size: 128KiB\nlookup_timeout: 20s\ntenants: {alice: {l1: 4MiB}}\n"
    )
    opened: list[CacheEngine] = []

    def again() -> CacheEngine:
        for engine in opened:
            engine.close()
        engine = open_engine(str(path), name="vllm")
        assert isinstance(engine, CacheEngine)
        opened[:] = [engine]
        return engine

    yield again
    for engine in opened:
        engine.close()


def test_no_view_and_no_line_of_the_log_shows_a_salt(
    opened: Open, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = opened()
    for tenant in ("alice", SALT):
        space = engine.register(spec(), tenant)
        put(engine, space, hashes(3))
        for more in (50, 60):
            contents(engine, space, [*hashes(3), *hashes(1, more)])
    (cache,) = caches()
    for path in ("/status", "/requests", "/hot", "/metrics", "/history", "/explain?request=no.4"):
        said = str(ask(cache, path))
        assert said
        assert SALT not in said
    assert {t["tenant"] for t in ask(cache, "/hot")["tenants"]} == {"alice", SHOWN}
    assert {p["tenant"] for p in ask(cache, "/hot")["prefixes"]} == {"alice", SHOWN}
    assert {r["tenant"] for r in ask(cache, "/requests")["requests"]} == {"alice", SHOWN}
    assert main(["pin", "--for", "1h", hashes(3)[2].hex(), "--namespace", space.namespace.hex(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["caches"][0]["tenant"] == SHOWN
    assert main(["clear", "--tenant", SHOWN]) == 0  # as it is shown
    assert ": forgotten: 3 objects of l1" in capsys.readouterr().out
    put(engine, space, hashes(2))
    assert main(["clear", "--tenant", SALT]) == 0  # or by the name, which its owner knows
    assert ": forgotten: 2 objects of l1" in capsys.readouterr().out
    assert f"tenant {SHOWN}: namespace" in caplog.text
    assert f"'tenant': '{SHOWN}'" in caplog.text
    assert SALT not in caplog.text


def test_a_tenant_that_is_given_a_quota_is_named_by_that_and_in_no_log(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = opened()
    space = engine.register(spec(), "bob")
    put(engine, space, hashes(3))
    contents(engine, space, hashes(3))
    (cache,) = caches()
    hidden = f"#{salt_word('bob')}"

    def shown() -> set[str]:
        return {r["tenant"] for r in ask(cache, "/requests")["requests"]}

    assert shown() == {hidden}
    with pytest.raises(ConfigError, match="there is no place 'tape'"):
        engine.set_quotas("bob", {"l1": 1 << 20, "tape": 1})
    assert shown() == {hidden}
    engine.set_quotas("bob", {"l1": 1 << 20})
    engine.set_quotas("bob", {})
    assert shown() == {"bob"}
    engine.register(spec("another"), "bob")
    assert main(["clear", "--tenant", hidden]) == 0  # as it is in the log
    assert hidden in caplog.text
    assert "bob" not in caplog.text
    assert "bob" not in ask(cache, "/metrics")
    engine.set_quotas("bob", {"l1": None})  # none of its own any more
    engine.set_quotas("alice", {"l1": None})  # the configuration names it all the same
    assert shown() == {hidden}
    assert engine.manager.named_tenants == {"alice"}


def test_after_a_restart_tiers_are_cleared_of_a_tenant_that_has_not_come_again(
    opened: Open, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert main(["clear", "--tenant", *words]) == 1
        return capsys.readouterr().err

    engine = opened()
    assert "no model is known here yet; ask again when an engine has come, or clear what" in refused(SALT, "--tiers")
    put(engine, engine.register(spec(), SALT), hashes(3))
    base = engine.register(spec())
    put(engine, base, hashes(2))
    engine = opened()
    assert "what tiers may have of it is forgotten with --tiers" in refused(SALT)
    assert "a hash tells only tenants that engines have named here" in refused(SHOWN, "--tiers")
    assert main(["clear", "--tenant", SALT, "--tiers"]) == 0  # what its namespace was, the catalog knows
    assert "forgotten: 0 objects of l1, 3 objects of disk" in capsys.readouterr().out
    assert contents(engine, engine.register(spec(), SALT), hashes(3)) == []
    assert contents(engine, engine.register(spec()), hashes(2)) == [1, 2]


def test_store_ls_says_whose_a_namespace_is_as_far_as_caches_here_know(
    opened: Open, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed(*words: str) -> str:
        assert main(["store", "ls", "--config", str(folder / "kvcore.yaml"), *words]) == 0
        return capsys.readouterr().out

    def known() -> dict[str, tuple[str | None, str | None]]:
        (tier,) = json.loads(listed("--json"))["tiers"]
        return {n["namespace"]: (n["model"], n["tenant"]) for n in tier["namespaces"]}

    engine = opened()
    nobodys, alices, salted = (engine.register(spec(), tenant) for tenant in ("", "alice", SALT))
    for space in (nobodys, alices, salted):
        put(engine, space, hashes(2))
    assert engine.drain() == 0
    for space in (alices, salted):
        assert contents(engine, space, hashes(2)) == [1, 2]
    names = [space.namespace.hex() for space in (nobodys, alices, salted)]
    assert known() == dict(zip(names, [("m", ""), ("m", "alice"), ("m", SHOWN)], strict=True))
    assert sorted(line.split("  ")[-1] for line in listed().splitlines()[2:5]) == ["m", f"m, {SHOWN}", "m, alice"]
    engine.close()
    assert known() == dict(zip(names, [("m", ""), (None, None), (None, None)], strict=True))
    assert [line.split("  ")[-1] for line in listed().splitlines()[2:5]].count("-") == 2
    (folder / "run" / "namespaces.jsonl").unlink()
    assert set(known().values()) == {(None, None)}
