"""`/healthz` and `/readyz`: what is stuck, and since when; what is only degraded."""

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from http_client import Answer, Client

from kvcore.config import Address
from kvcore.service.address import Listener
from kvcore.service.http import health
from kvcore.service.server import Server
from kvcore.testing.chunks import contents, hashes, publish, put, spec
from kvcore.testing.fault_config import Faults

FAULTY = "[{name: far, timeout: 300ms, storage: {plugin: faulty, storage: memory}}]"


def until(client: Client, path: str, wanted: Callable[[Answer], bool]) -> Answer:
    deadline = time.monotonic() + 15
    while not wanted(answer := client.get(path)):
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
    return answer


def bad(answer: Answer) -> dict[str, Any]:
    """The checks that are not ok, by name."""
    return {c["name"]: c for c in answer.body["checks"] if c["status"] != "ok"}


def age_s(check: dict[str, Any]) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(check["since"])).total_seconds()


def test_all_is_well(serve: Any) -> None:
    _, client = serve(FAULTY)
    for path, names in (("/healthz", {"loop tiers", "reaper", "tier far"}), ("/readyz", {"loop tiers", "reaper"})):
        answer = client.get(path)
        assert (answer.status, answer.body["status"]) == (200, "ok")
        assert {c["name"] for c in answer.body["checks"]} == names


def test_who_asks_may_have_stood_still_as_well() -> None:
    """A process that is frozen in the midst of a question: that nobody answered meanwhile says nothing."""
    asked: list[Callable[[], None]] = []

    async def thawed() -> float | None:
        asking = asyncio.ensure_future(health.Pulse(asked.append).since())
        await asyncio.sleep(0)
        time.sleep(1.5 * health.PATIENCE_S)
        asyncio.get_running_loop().call_later(0.01, asked[0])
        return await asking

    assert asyncio.run(thawed()) is None


def test_a_tier_that_fails_is_degraded(serve: Any) -> None:
    engine, client = serve(FAULTY)
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.manager.tiers[0].storage.faults = Faults(error_rate=1)
    while engine.manager.tiers[0].breaker.closed:
        engine.clear(space)
        assert contents(engine, space, hashes()) == []
    answer = client.get("/healthz")
    assert (answer.status, answer.body["status"]) == (200, "degraded")
    assert bad(answer)["tier far"]["since"]
    assert client.get("/readyz").body["status"] == "ok"
    (tier,) = client.get("/tiers").body["tiers"]
    assert tier["state"] == "down"
    assert "injected" in tier["cause"]
    engine.manager.tiers[0].storage.faults = Faults()
    until(client, "/healthz", lambda a: a.body["status"] == "ok")


def test_a_tier_that_hangs_is_stuck_until_it_lets_go(serve: Any) -> None:
    engine, client = serve(FAULTY)
    space = engine.register(spec())
    engine.manager.tiers[0].storage.faults = Faults(hang_rate=1, operations=("store",))
    publish(engine, space, hashes())
    answer = until(client, "/healthz", lambda a: a.status == 503)
    check = bad(answer)["tier far"]
    assert answer.body["status"] == check["status"] == "stuck"
    assert "hang beyond their deadline" in check["detail"]
    time.sleep(0.5)
    again = bad(client.get("/healthz"))["tier far"]
    assert 0.5 < age_s(again) < 15
    assert abs(age_s(again) - age_s(check)) < 0.2  # the same moment
    assert client.get("/readyz").status == 200  # engines are served
    assert client.get("/tiers").body["tiers"][0]["state"] == "stuck"
    assert contents(engine, space, hashes()) == list(range(1, 9))
    engine.manager.tiers[0].storage.faults = Faults()
    until(client, "/healthz", lambda a: a.status == 200)


def test_a_loop_that_something_blocks_is_stuck(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PATIENCE_S", 0.3)
    engine, client = serve(FAULTY)
    let_go = threading.Event()
    engine.manager.loop.post(let_go.wait, 30)
    try:
        for path in ("/healthz", "/readyz"):
            answer = client.get(path)
            assert (answer.status, answer.body["status"]) == (503, "stuck"), path
            assert "its loop does not turn" in bad(answer)["loop tiers"]["detail"]
        time.sleep(0.5)
        assert age_s(bad(client.get("/healthz"))["loop tiers"]) > 0.5  # since the first question
        assert client.get("/status").status == 200
        assert client.get("/metrics").status == 200
    finally:
        let_go.set()
    until(client, "/healthz", lambda a: a.status == 200)


def test_a_reaper_that_has_ended_is_stuck(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "REAPER_S", 2.0)
    engine, client = serve()

    def broken() -> None:
        raise RuntimeError("a bug")

    engine.l1.reap = broken
    answer = until(client, "/readyz", lambda a: a.status == 503)
    assert list(bad(answer)) == ["reaper"]
    assert age_s(bad(answer)["reaper"]) > 2


def test_any_loop_can_be_watched(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PATIENCE_S", 0.3)
    calls: list[Callable[[], None]] = []
    _, client = serve(node={"loops": {"serve": calls.append}})
    assert list(bad(client.get("/readyz"))) == ["loop serve"]
    assert len(calls) == 1
    assert client.get("/readyz").status == 503
    assert len(calls) == 1  # one question at a time
    over = threading.Event()

    def turn() -> None:
        while not over.wait(0.01):
            while calls:
                calls.pop()()

    turning = threading.Thread(target=turn)
    turning.start()
    until(client, "/readyz", lambda a: a.status == 200)
    over.set()
    turning.join()


def test_the_thread_that_serves_engines_is_watched(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PATIENCE_S", 0.5)
    listener = Listener(Address(path=str(tmp_path / "kvcore.sock")))
    posts: list[Callable[[Callable[[], None]], None]] = []
    engine, client = serve(node={"loops": {"serve": lambda call: posts[0](call)}})
    server = Server(engine, [listener])
    posts.append(server.post)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert client.get("/readyz").status == 200
        let_go = threading.Event()
        server.post(lambda: let_go.wait(30) and None)
        answer = client.get("/readyz")
        let_go.set()
        assert (answer.status, list(bad(answer))) == (503, ["loop serve"])
        until(client, "/readyz", lambda a: a.status == 200)
    finally:
        server.stop()
        thread.join()
        server.close()
        listener.close()
    assert client.get("/healthz").status == 503  # it has ended
