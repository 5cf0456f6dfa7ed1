"""What a server shows over HTTP is what it shows on its own socket, and as `/openapi.json` promises."""

from typing import Any

import pytest

from kvcore.engine import Asked
from kvcore.service.inspect import ask, caches, show
from kvcore.service.inspect.subject import Subject
from kvcore.testing.chunks import hashes, put, spec

TIERS = "[{storage: memory}]"


def test_both_ways_lead_to_the_same(serve: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_RUN_DIR", str(tmp_path / "run"))
    engine, client = serve(TIERS, "l1: {size: 8MiB}\ntenants: {alice: {l1: 4MiB}}")
    show(Subject(engine, "served", engine.manager))
    space = engine.register(spec(), "alice")
    put(engine, space, hashes(4))
    for i in range(3):
        lookup = engine.lookup(space, hashes(4 + i), asked=Asked(f"r{i}", 1000))
        assert lookup.wait(60)
        engine.release(lookup)
    (cache,) = caches()
    for path in ("/requests", "/requests?since=0&limit=2&hashes=true", "/requests?since=3", "/hot?limit=1"):
        answer = client.get(path)
        assert answer.status == 200
        assert answer.body == ask(cache, path)
    found = client.get("/requests?since=0&limit=2&hashes=true").body
    assert [r["id"] for r in found["requests"]] == ["r0", "r1"]
    assert found["requests"][1]["hashes"] == [h.hex() for h in hashes(5)]
    here, there = client.get("/history").body, ask(cache, "/history")
    assert set(here["series"]) == set(there["series"])
    assert here["series"]["lookups"][-1] == 3
    shown = client.get("/status").body
    assert (shown["kind"], shown["connected"], shown["l1"]["objects"]) == ("engine", None, 4)


def test_what_names_requests_needs_the_token(serve: Any) -> None:
    _, client = serve()
    client.token = None
    assert client.get("/history").status == 200
    for path in ("/requests", "/hot"):
        assert client.get(path).status == 401


def test_a_prefix_is_pinned_with_the_token(serve: Any) -> None:
    engine, client = serve()
    space = engine.register(spec())
    put(engine, space, hashes(4))
    lookup = engine.lookup(space, hashes(4), asked=Asked("r", 128))
    assert lookup.wait(60)
    engine.release(lookup)
    wanted = {"prefix": hashes(3)[2].hex()[:12], "seconds": 60}
    answer = client.post("/pin", wanted)
    assert (answer.status, answer.body["pinned"], answer.body["chunks"]) == (200, 3, 3)
    assert client.post("/pin", {**wanted, "seconds": 0}).body["ended"] == 3
    assert client.post("/pin", wanted).body["pinned"] == 3
    assert client.post("/clear", {"all": True}).body["l1"] == 4  # which ends pins
    answer = client.post("/pin", {"prefix": "00" * 6, "seconds": 60})
    assert (answer.status, answer.body["type"]) == (404, "urn:kvcore:no-prefix")
    answer = client.post("/pin", {"seconds": 60})
    assert answer.status == 422
    assert "give either the tokens of a prompt or the prefix" in answer.body["detail"]
