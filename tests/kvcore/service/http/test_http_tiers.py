"""Tiers added and removed over HTTP, and what is shown of them."""

import threading
import time
from pathlib import Path
from typing import Any

from kvcore import __version__
from kvcore.testing.chunks import contents, hashes, publish, put, spec
from kvcore.testing.fault_config import Faults

FAR = {"name": "far", "storage": {"plugin": "faulty", "storage": "memory"}, "timeout": "300ms"}


def test_a_tier_comes_and_goes(serve: Any, tmp_path: Path) -> None:
    engine, client = serve("[{storage: memory}]")
    space = engine.register(spec())
    disk = {"name": "cold", "storage": {"plugin": "disk", "path": str(tmp_path / "cold"), "capacity": "1GiB"}}
    answer = client.post("/tiers?before=memory", disk)
    assert answer.status == 201
    assert (answer.body["name"], answer.body["storage"], answer.body["state"]) == ("cold", "disk", "open")
    assert [t["name"] for t in client.get("/tiers").body["tiers"]] == ["cold", "memory"]
    put(engine, space, hashes())
    usage = {t["name"]: t["usage"]["objects"] for t in client.get("/status").body["tiers"]}
    assert usage == {"cold": 8, "memory": 8}
    assert 'kvcore_tier_open{tier="cold"} 1.0' in client.get("/metrics").body
    answer = client.delete("/tiers/cold")
    assert (answer.status, answer.body) == (200, {"name": "cold", "dropped": 0})
    assert [t["name"] for t in client.get("/tiers").body["tiers"]] == ["memory"]
    assert 'kvcore_tier_open{tier="cold"}' not in client.get("/metrics").body
    assert client.delete("/tiers/cold").status == 404
    assert client.post("/tiers", disk).status == 201
    client.delete("/tiers/memory")
    engine.clear(space)
    assert contents(engine, space, hashes()) == list(range(1, 9))


def test_what_is_refused(serve: Any, tmp_path: Path) -> None:
    engine, client = serve("[{storage: memory}]")
    for given, status, text in (
        ({"name": "memory", "storage": "memory"}, 409, "the name 'memory' is taken"),
        ({"storage": "memroy"}, 422, "no storage plugin is named 'memroy'"),
        ({"storage": {"plugin": "disk", "path": "/proc/none"}}, 422, "did not open"),
        ({"storage": "memory", "write": "sometimes"}, 422, "write: must be 'all'"),
    ):
        answer = client.post("/tiers", given)
        assert (answer.status, text in answer.body["detail"]) == (status, True), answer
    assert client.post("/tiers?before=cold", {"storage": "memory"}).status == 404
    assert client.delete("/tiers/l1").status == 404
    assert client.delete("/tiers/memory?drain_s=9999").status == 422
    assert list(engine.tiers) == ["memory"]


def test_one_that_hangs_is_removed_and_what_it_did_not_take_is_said(serve: Any) -> None:
    engine, client = serve()
    space = engine.register(spec())
    client.post("/tiers", {**FAR, "timeout": "2s"})
    engine.manager.tiers[0].storage.faults = Faults(hang_rate=1, operations=("store",))
    for i in range(4):
        publish(engine, space, hashes(8, 8 * i))
    time.sleep(0.1)
    (tier,) = client.get("/tiers").body["tiers"]
    assert tier["queue_objects"] > 0
    assert tier["queue_bytes"] == tier["queue_objects"] * space.groups[0].nbytes
    answer = client.delete("/tiers/far?drain_s=0")
    assert answer.status == 200
    assert answer.body["dropped"] > 0
    assert client.get("/healthz").body["status"] == "ok"
    assert contents(engine, space, hashes()) == list(range(1, 9))


def test_one_change_at_a_time_and_everything_else_meanwhile(serve: Any) -> None:
    engine, client = serve()
    client.post("/tiers", FAR)
    engine.manager.tiers[0].storage.faults = Faults(latency=0.2, operations=("store",))
    space = engine.register(spec())
    for i in range(4):
        publish(engine, space, hashes(8, 8 * i))
    answers: list[Any] = []
    removing = threading.Thread(target=lambda: answers.append(client.delete("/tiers/far")))
    removing.start()
    time.sleep(0.1)
    answer = client.post("/tiers", {"storage": "memory"})
    assert (answer.status, answer.body["type"]) == (409, "urn:kvcore:conflict")
    assert client.get("/status").status == 200
    assert client.get("/healthz").status == 200
    removing.join(20)
    assert answers[0].body == {"name": "far", "dropped": 0}
    assert client.post("/tiers", {"storage": "memory"}).status == 201


def test_status_and_plugins(serve: Any) -> None:
    session = {"name": "vllm", "pid": 7, "since": 1.5e9, "spaces": 1, "lookups": 2, "plans": 3, "workers": 4}
    engine, client = serve("[{storage: memory}]", node={"address": "unix:///x.sock", "sessions": lambda: [session]})
    space = engine.register(spec())
    put(engine, space, hashes())
    lookup = engine.lookup(space, hashes())
    status = client.get("/status").body
    assert (status["version"], status["name"], status["address"]) == (__version__, "kvcore", "unix:///x.sock")
    assert status["sessions"] == [session | {"since": "2017-07-14T02:40:00Z"}]
    assert (status["l1"]["size"], status["l1"]["objects"], status["l1"]["leases"]) == (8 << 20, 8, 1)
    assert status["l1"]["free"] < 8 << 20
    assert status["uptime_s"] > 0
    engine.release(lookup)
    found = {(p["kind"], p["name"]): p for p in client.get("/plugins").body["plugins"]}
    assert found["storage", "memory"]["builtin"] is True
    assert found["storage", "disk"]["distribution"] == "kvcore-disk"
