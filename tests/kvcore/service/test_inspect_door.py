"""Open caches can be asked by their own user, and by nobody else; nothing of it outlives them or hurts them."""

import http.client
import json
import logging
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served import until

from kvcore.engine import CacheEngine
from kvcore.observe import Asked, Decision
from kvcore.observe.history import History
from kvcore.observe.metrics import Metrics
from kvcore.service import open_engine, open_store
from kvcore.service.inspect import Cache, NoAnswer, Refusal, ask, at_url, caches, door
from kvcore.service.inspect import folder as place
from kvcore.service.inspect.hot import _prefixes
from kvcore.testing.chunks import contents, hashes, put, spec
from kvcore.testing.servers.kvcore import KVCoreServer

PATIENCE_S = 60.0


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of sockets, which no other test uses."""
    run = folder / "run"
    monkeypatch.setenv("KVCORE_RUN_DIR", str(run))
    return run


@pytest.fixture
def config(folder: Path) -> Path:
    path = folder / "kvcore.yaml"
    path.write_text("l1: {size: 8MiB}\nl2: [{storage: memory}]\nmin_object_size: 128KiB\nlookup_timeout: 20s\n")
    return path


@pytest.fixture
def engine(run: Path, config: Path) -> Iterator[CacheEngine]:
    engine = open_engine(str(config), name="test/engine 1")
    assert isinstance(engine, CacheEngine)
    yield engine
    engine.close()


def only() -> Cache:
    (cache,) = caches()
    return cache


def test_an_open_cache_is_found_and_asked(engine: CacheEngine, run: Path) -> None:
    space = engine.register(spec())
    put(engine, space, hashes(4))
    assert contents(engine, space, hashes(6)) == [1, 2, 3, 4]
    cache = only()
    assert (cache.name, cache.pid, cache.label) == ("test_engine_1", os.getpid(), f"test_engine_1-{os.getpid()}")
    status = ask(cache, "/status")
    assert (status["kind"], status["pid"], status["name"]) == ("engine", os.getpid(), "test/engine 1")
    assert status["l1"]["objects"] == 4
    (tier,) = status["tiers"]
    assert (tier["name"], tier["state"], tier["usage"]["objects"]) == ("memory", "open", 4)
    text = ask(cache, "/metrics")
    assert 'kvcore_hit_chunks_total{source="l1"} 4.0' in text
    history = ask(cache, "/history")
    assert history["series"]["hit_chunks/l1"][-1] == 4
    assert len(history["times"]) == len(history["series"]["lookups"])


def test_requests_are_told_in_order_with_what_was_found(engine: CacheEngine) -> None:
    space = engine.register(spec(), tenant="alice")
    put(engine, space, hashes(4))
    contents(engine, space, hashes(6))
    contents(engine, space, hashes(2))
    found = ask(only(), "/requests?hashes=1")
    first, second = found["requests"]
    assert (first["chunks"], first["answer"], first["sources"], first["misses"]) == (6, 4, {"l1": 4}, {"absent": 2})
    assert (first["broke"], first["tenant"], first["model"]) == ("absent", "#cc419f21", "m")
    assert first["hashes"] == [h.hex() for h in hashes(6)]
    assert (second["answer"], second["broke"], second["retrieved"]) == (2, "", 2 * space.chunk_tokens)
    assert (found["next"], found["newest"], found["oldest"]) == (second["seq"], second["seq"], first["seq"])
    assert ask(only(), f"/requests?since={first['seq']}")["requests"] == [{**second, "hashes": None}]
    assert ask(only(), "/requests?limit=1")["requests"][0]["seq"] == second["seq"]
    nothing = ask(only(), f"/requests?since={second['seq']}")
    assert (nothing["requests"], nothing["next"]) == ([], second["seq"])


def test_the_hottest_prefixes_are_where_requests_part(engine: CacheEngine) -> None:
    space = engine.register(spec(), tenant="alice")
    system, tail = hashes(3), hashes(2, 100)
    put(engine, space, system)
    for i in range(4):
        contents(engine, space, [*system, *hashes(2, 10 * i + 10)])
    for _ in range(2):
        contents(engine, space, [*system, *tail])
    contents(engine, space, hashes(1, 500))  # of one request alone
    hot = ask(only(), "/hot")
    shown = [(p["hash"], p["chunks"], p["requests"], p["hits"], p["resident"]) for p in hot["prefixes"]]
    assert shown == [(system[-1].hex(), 3, 6, 6, True), (tail[-1].hex(), 5, 2, 0, False)]
    assert hot["prefixes"][0]["tokens"] == 3 * space.chunk_tokens
    assert (hot["requests"], hot["chunks"], hot["own"], hot["found"]) == (7, 31, 0, 18)
    (tenant,) = hot["tenants"]
    assert (tenant["tenant"], tenant["requests"], tenant["chunks"], tenant["found"]) == ("#cc419f21", 7, 31, 18)


def test_what_cannot_be_asked_is_refused_with_what_can(engine: CacheEngine) -> None:
    cache = only()
    with pytest.raises(Refusal, match="there is no GET /nothing: there are GET /metrics, GET /status") as refused:
        ask(cache, "/nothing")
    assert refused.value.status == 404
    with pytest.raises(Refusal, match="limit: Input should be less than or equal to 1000"):
        ask(cache, "/requests?limit=1001")
    with pytest.raises(Refusal, match="there is no POST /status"):
        ask(cache, "/status", {})
    assert ask(cache, "/status")["kind"] == "engine"


def test_whoever_sends_nonsense_or_nothing_is_let_go_and_others_are_answered(
    engine: CacheEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door, "ASK_S", 0.2)
    cache = only()
    for sent in (
        b"",
        b"\r\n\r\n",
        b"GET",
        b"\x00\xff" * 100,
        b"GET /status HTTP/9.9\r\n\r\n",
        b"POST /status HTTP/1.1\r\n\r\n",
        b"POST /explain HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
    ):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(cache.path)
            asking.sendall(sent)
            asking.settimeout(PATIENCE_S)
            while asking.recv(4096):  # until it is let go
                pass
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(cache.path)
    asking.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    asking.close()  # before the answer
    assert ask(cache, "/status")["kind"] == "engine"
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "head", [b"GET /status HTTP/1.1\r\nX: ", b"POST /diff HTTP/1.1\r\nContent-Length: 60000\r\n\r\n"]
)
def test_who_asks_byte_by_byte_is_let_go_in_time(
    engine: CacheEngine, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(door, "ASK_S", 0.5)
    cache = only()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(cache.path)
        slow.sendall(head)
        begun = time.monotonic()
        slow.settimeout(0.05)
        while True:
            try:
                slow.sendall(b"x")
                if not slow.recv(4096):
                    break
            except TimeoutError:
                assert time.monotonic() - begun < PATIENCE_S, "it is still listened to"
            except OSError:
                break
    assert ask(cache, "/status")["kind"] == "engine"


def test_for_want_of_files_it_answers_later(
    engine: CacheEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door, "LACK_S", 0.05)
    path = only().path
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(PATIENCE_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            asking.connect(path)
            asking.sendall(b"GET /status HTTP/1.1\r\n\r\n")
            until(lambda: "Too many open files" in caplog.text, "it is seen", PATIENCE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert asking.recv(4096).startswith(b"HTTP/1.1 200")
    assert ask(only(), "/status")["kind"] == "engine"


def test_a_folder_that_is_gone_does_not_keep_a_cache_open(
    run: Path, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And is a file by now: there is nothing to remove."""
    engine = open_engine(str(config), name="test")
    opened = [t for t in threading.enumerate() if t.name == "kvcore-inspect"]
    shutil.rmtree(run)
    run.write_text("")
    engine.close()
    until(lambda: not any(t.is_alive() for t in opened), "its door is closed", PATIENCE_S)
    assert not [record for record in caplog.records if record.exc_info]


def test_for_want_of_a_thread_there_is_no_door_and_all_else_goes_on(
    run: Path, config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Lacking(threading.Thread):
        def start(self) -> None:
            if self.name == "kvcore-inspect":
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(door.threading, "Thread", Lacking)
    engine = open_engine(str(config), name="test")
    try:
        assert "cannot ask this cache: can't start new thread" in caplog.text
        assert not list(run.iterdir())
    finally:
        engine.close()


def test_one_request_that_cannot_be_told_takes_no_other_with_it(engine: CacheEngine) -> None:
    space = engine.register(spec())
    engine.release(engine.lookup(space, hashes(), 0, Asked("req\ud800", adapter="\udfff" * 1000)))
    engine.release(engine.lookup(space, hashes(), 0, Asked("x" * 1000)))
    engine.release(engine.lookup(space, hashes(), 0, Asked("good")))
    told = ask(only(), "/requests")["requests"]
    assert [(r["id"], r["adapter"]) for r in told] == [("req?", "?" * 256), ("x" * 256, ""), ("good", "")]
    assert ask(only(), f"/explain?request={'x' * 400}")["explanations"][0]["request"] == "x" * 256


def test_the_folder_is_the_users_alone(engine: CacheEngine, run: Path) -> None:
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    (path,) = run.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    run.chmod(0o755)
    assert caches() == []  # others could have put something there
    run.chmod(0o700)
    assert only().path == str(path)


def test_closing_ends_it(run: Path, config: Path) -> None:
    opened = [open_engine(str(config), name="one"), open_engine(str(config), name="one"), open_store(str(config))]
    found = caches()
    assert [c.label for c in found] == [f"kvcore-{os.getpid()}", f"one-{os.getpid()}", f"one-{os.getpid()}.2"]
    assert ask(found[0], "/status")["kind"] == "store"
    assert ask(found[0], "/status")["l1"] is None
    assert ask(found[0], "/hot")["prefixes"] == []
    threads = [t for t in threading.enumerate() if t.name == "kvcore-inspect"]
    for cache in opened:
        cache.close()
    assert list(run.iterdir()) == []
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    with pytest.raises(NoAnswer, match=r"one-\d+ was closed"):
        ask(found[1], "/status")


def test_nobody_is_shown_where_nothing_is_remembered(run: Path, config: Path) -> None:
    engine = open_engine(str(config), flags={"inspect.requests": 0})
    assert caches() == []
    assert not run.exists()
    engine.close()


def test_a_cache_that_cannot_be_shown_serves(
    run: Path, config: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run.mkdir(mode=0o755)
    faults = {
        str(run): "is open to other users: chmod 700",
        str(folder / "kvcore.yaml"): f"{folder}/kvcore.yaml: File exists",
        str(folder / "none" / "run"): f"{folder}/none/run: No such file or directory",
        "run": "a place that differs by process: give a path from / on",
        str(folder / ("x" * 90)): "would be too long: set KVCORE_RUN_DIR to a shorter one",
    }
    for where, why in faults.items():
        monkeypatch.setenv("KVCORE_RUN_DIR", where)
        caplog.clear()
        engine = open_engine(str(config))
        (line,) = [r.getMessage() for r in caplog.records if "cannot ask this cache" in r.getMessage()]
        assert why in line
        assert isinstance(engine, CacheEngine)
        space = engine.register(spec())
        put(engine, space, hashes(2))
        assert contents(engine, space, hashes(2)) == [1, 2]
        engine.close()


def test_without_the_variable_the_sessions_folder_is_tried_before_tmp(
    folder: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVCORE_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert place.folders() == [folder / "kvcore", Path(f"/tmp/kvcore-{os.geteuid()}")]
    engine = open_engine(str(config), name="here")
    assert [c.path for c in caches() if c.name == "here"] == [f"{folder}/kvcore/here-{os.getpid()}.sock"]
    engine.close()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "gone"))
    assert place.made() == Path(f"/tmp/kvcore-{os.geteuid()}")


def test_what_a_killed_process_left_is_told_from_what_was_closed_and_removed_later(
    run: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
import os, time
from kvcore.service import open_engine
engine = open_engine({str(config)!r}, name="killed")
child = os.fork()
if child == 0:  # it has the socket, too, and must not keep it
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            watched = only()
            assert ask(watched, "/status")["pid"] == process.pid
            process.kill()
            process.wait(PATIENCE_S)
            for _ in range(2):
                assert until(lambda: not caches(), "its socket is seen to be dead", PATIENCE_S)
                with pytest.raises(NoAnswer, match="is gone: its process has ended without closing it"):
                    ask(watched, "/status")
            monkeypatch.setattr(place, "DEAD_S", 0.0)
            assert caches() == []
            assert list(run.iterdir()) == []
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_socket_that_refuses_is_never_that_of_one_that_was_closed(
    engine: CacheEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(path: Path, missing_ok: bool = False) -> None:
        assert not path.name.endswith(".sock") or place.alive(path)
        os.unlink(path)

    assert caches()
    monkeypatch.setattr(Path, "unlink", unlink)
    engine.close()
    assert caches() == []


def test_a_process_that_ends_without_closing_leaves_nothing(run: Path, config: Path) -> None:
    code = f"from kvcore.service import open_engine\nengine = open_engine({str(config)!r})\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
    assert list(run.iterdir()) == []


def test_a_fork_neither_answers_nor_ends_it(engine: CacheEngine, run: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            engine.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert ask(only(), "/status")["kind"] == "engine"


def test_a_server_and_its_client_are_shown_each_as_what_it_is(run: Path, folder: Path) -> None:
    config = {"l1": {"size": "8MiB"}, "l2": [], "min_object_size": "128KiB"}
    with KVCoreServer(folder, config, name="s") as server:
        engine = open_engine(str(server.config), flags={"server.timeout": "10s"}, name="client")
        space = engine.register(spec())
        until(engine.descriptor, "a connection", PATIENCE_S)
        lookup = engine.lookup(space, hashes(3))
        assert lookup.wait(PATIENCE_S)
        by_kind = {ask(c, "/status")["kind"]: c for c in caches()}
        assert sorted(by_kind) == ["client", "server"]
        client, served = ask(by_kind["client"], "/status"), ask(by_kind["server"], "/status")
        assert (client["address"], client["connected"], client["l1"]) == (server.url, True, None)
        assert (served["address"], served["connected"]) == (server.url, None)
        assert [s["name"] for s in served["sessions"]] == ["client"]
        assert ask(by_kind["client"], "/history")["series"]["lookup_chunks"] == [3]
        engine.close()
        until(lambda: [c.name for c in caches()] == ["server"], "the client's door is closed", PATIENCE_S)
    assert caches() == []


def test_an_address_of_a_server_is_checked() -> None:
    assert at_url("127.0.0.1:7601").url == "http://127.0.0.1:7601"
    assert at_url("https://host:1/").label == "https://host:1"
    for wrong in ("http://", "127.0.0.1", "http://host:port", "ftp://host:1", "http://host:1/status", "http://[:1"):
        with pytest.raises(Refusal, match="is no address of a server: write one such as http://127"):
            at_url(wrong)
    with pytest.raises(Refusal, match="--url has no user and no password: set KVCORE_SERVER__HTTP__TOKEN") as refused:
        at_url("http://me:pepper@host:1")
    assert "pepper" not in str(refused.value)


def test_a_history_is_bounded_and_knows_what_it_does_not_know() -> None:
    now = 0.0
    metrics = Metrics()
    history = History(metrics, lambda: None, lambda: now)
    history.tick()
    metrics.add("hit_chunks", 3, "l1")
    history.tick()  # too early
    for _ in range(3000):
        now += 5.0
        history.tick()
    points = history.since()
    assert points.every_s == 20.0
    assert 500 < len(points.times) <= 1026
    assert points.series["hit_chunks/l1"][:2] == [None, 3.0]
    steps = {round(b - a) for a, b in zip(points.times[1:-2], points.times[2:-1], strict=True)}
    assert steps == {20}
    later = history.since(points.times[-3])
    assert len(later.times) in (2, 3)
    assert later.times[-1] == pytest.approx(points.times[-1], abs=5)


def test_numbers_and_questions_have_a_size(engine: CacheEngine) -> None:
    with pytest.raises(Refusal, match="since") as refused:
        ask(only(), f"/requests?since={10**30}")
    assert refused.value.status == 422
    assert ask(only(), f"/requests?since={(1 << 62) - 1}")["requests"] == []
    with pytest.raises(Refusal, match=r"the question has [0-9,]+ bytes, of 16,777,216: give a shorter prompt"):
        ask(only(), "/explain", {"tokens": [100_000] * (3 << 20)})


def test_errors_have_the_shape_of_the_other_http(engine: CacheEngine) -> None:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(only().path)
    connection.request("GET", "/nothing")
    answer = connection.getresponse()
    body: Any = json.loads(answer.read())
    connection.close()
    assert (answer.status, answer.headers["Content-Type"]) == (404, "application/problem+json")
    assert (body["status"], body["title"]) == (404, "Not Found")


def test_prefixes_of_a_server_count_what_was_asked_for_in_the_middle() -> None:
    def decision(begin: int, keys: list[bytes], answer: int) -> Decision:
        return Decision(Asked(), b"n", keys, begin, 32, begin, 1.0, answer=answer)

    keys, other = hashes(6), hashes(2, 50)
    found = _prefixes([decision(0, keys, 4), decision(3, [*keys[3:], *other], 6), decision(5, [keys[5]], 5)], 10)
    shown = [(p.chunk_hash, p.chunks, p.requests, p.hits, p.found) for p in found]
    assert shown == [(keys[5], 6, 3, 1, 4 + 6 + 5)]
    found = _prefixes([decision(0, [*keys, *other], 6), decision(0, keys, 6), decision(0, keys[:2], 0)], 10)
    shown = [(p.chunk_hash, p.chunks, p.requests, p.hits, p.found) for p in found]
    assert shown == [(keys[5], 6, 2, 2, 12), (keys[1], 2, 3, 2, 4)]


def test_the_client_of_several_servers_shows_its_own_record(run: Path, folder: Path) -> None:
    urls = [f"unix://{folder}/{name}.sock" for name in ("a", "b")]
    path = folder / "several.yaml"
    path.write_text(f"server: {urls}\nmin_object_size: 128KiB\n")
    engine = open_engine(str(path), name="several")
    model = replace(spec(), ranks=2)
    lookup = engine.lookup(engine.register(model), hashes(3), asked=Asked("r1", 100))
    assert lookup.poll() == 0
    cache = only()
    status = ask(cache, "/status")
    assert (status["kind"], status["address"], status["connected"]) == ("client", ", ".join(urls), False)
    (request,) = ask(cache, "/requests?hashes=1")["requests"]
    assert (request["id"], request["tokens"], request["broke"]) == ("r1", 100, "no_server")
    assert request["hashes"] == [h.hex() for h in hashes(3)]
    engine.close()
    assert caches() == []


def test_another_users_process_is_not_answered(engine: CacheEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    assert door._uid(theirs) == os.geteuid()
    ours.close()
    theirs.close()
    monkeypatch.setattr(door, "_uid", lambda asking: os.geteuid() + 1)
    with pytest.raises(NoAnswer, match="is gone"):
        ask(only(), "/status")
    monkeypatch.setattr(door, "_uid", lambda asking: 0)
    assert ask(only(), "/status")["kind"] == "engine"


def test_one_that_is_being_closed_says_so(engine: CacheEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "closed", True)
        with pytest.raises(Refusal, match="it is being closed") as refused:
            ask(only(), "/status")
        assert refused.value.status == 503
    assert ask(only(), "/status")["kind"] == "engine"
