"""What answers behind a socket may be anything: no command shows a traceback, waits for ever or fills the memory."""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import clear, main
from kvcore.engine import Asked, CacheEngine
from kvcore.service import open_engine
from kvcore.service.inspect import NoAnswer, Refusal, ask, caches, client, door
from kvcore.testing.chunks import hashes, put, spec

pytestmark = pytest.mark.usefixtures("alone")
PATIENCE_S = 60.0
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
PINNED = {
    "namespace": "", "model": "\x1b[2J\ud800", "tenant": "", "chunks": 1, "chunk_tokens": 32, "pinned": 1, "ended": 0,
    "until": "2026",
}  # fmt: skip


@contextmanager
def stranger(folder: Path, answers: Callable[[socket.socket], object]) -> Iterator[None]:
    """Something that listens as a cache does."""
    with socket.socket(socket.AF_UNIX) as listening:
        (folder / "run").mkdir(mode=0o700, exist_ok=True)
        listening.bind(str(folder / "run" / "aaa-1.sock"))
        listening.listen(8)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=one, args=(listening.accept()[0],), daemon=True).start()

        def one(asking: socket.socket) -> None:
            with asking, suppress(OSError), asking.makefile("rb") as asked:
                head = b""
                while (line := asked.readline()) not in (b"", b"\r\n"):
                    head += line
                if sent := re.search(rb"Content-Length: (\d+)", head):
                    asked.read(int(sent[1]))
                if head:  # else it was looked whether anybody listens
                    answers(asking)

        threading.Thread(target=serve, daemon=True).start()
        yield
        listening.shutdown(socket.SHUT_RDWR)


def says(data: bytes) -> Callable[[socket.socket], object]:
    return lambda asking: asking.sendall(data)


def endless(first: bytes, then: bytes, pause_s: float = 0.0) -> Callable[[socket.socket], object]:
    def answers(asking: socket.socket) -> None:
        asking.sendall(first)
        while True:
            asking.sendall(then)
            time.sleep(pause_s)

    return answers


@pytest.fixture
def engine(folder: Path) -> Iterator[CacheEngine]:
    path = folder / "kvcore.yaml"
    path.write_text("l1: {size: 8MiB}\nl2: []\nmin_object_size: 128KiB\nlookup_timeout: 20s\n")
    engine = open_engine(str(path), name="vllm")
    assert isinstance(engine, CacheEngine)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (endless(JSON + b"\r\n", b" " * (1 << 16)), "its answer has more than 1 MiB: it is no kvcore"),
        (says(JSON + b"Content-Length: 99999999999999\r\n\r\n{"), "is gone: IncompleteRead"),
        (says(JSON + b"\r\n" + b"[" * 100_000), "its answer is no JSON: it is no kvcore"),
        (says(b"HTTP/1.1 422 x\r\nContent-Type: application/json\r\n\r\n" + b"[" * 100_000), "422 [[["),
    ],
    ids=["flood", "length", "deep", "deep-refusal"],
)
def test_an_answer_is_bounded_and_what_cannot_be_read_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answers: Callable[[socket.socket], object], said: str
) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1 << 20)
    with stranger(folder, answers), pytest.raises((NoAnswer, Refusal)) as fault:
        ask(caches()[0], "/status")
    assert said in str(fault.value)


@pytest.mark.parametrize(
    "answers",
    [
        endless(JSON + b"\r\n", b" ", 0.02),
        endless(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", 0.02),
        endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02),
    ],
    ids=["body", "headers", "continue"],
)
def test_an_answer_has_its_time_however_it_is_cut(folder: Path, answers: Callable[[socket.socket], object]) -> None:
    with stranger(folder, answers), pytest.raises(NoAnswer, match=r"aaa-1 has not answered for 0\.5 s") as fault:
        ask(caches()[0], "/status", timeout_s=0.5)
    assert fault.value.late


def test_words_of_others_do_not_reach_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stranger(folder, says(JSON + b"\r\n" + json.dumps(PINNED).encode())):
        assert main(["pin", "0" * 8, "--for", "1h"]) == 0
    assert capsys.readouterr().out.endswith("of ?[2J?\n")


def test_a_clearing_that_gets_no_further_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    never = {"l1": 0, "tiers": {"t\x1b[2J": 0}, "complete": False, "problems": {}}
    with stranger(folder, says(JSON + b"\r\n" + json.dumps(never).encode())):
        assert main(["clear", "--all", "--yes"]) == 1
    out, err = capsys.readouterr()
    assert out == "aaa-1: forgotten: 0 objects of l1, 0 objects of t?[2J\n"
    assert "a turn found no more of it, and did not come to its end" in err


def test_caches_are_cleared_side_by_side(
    engine: CacheEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first by name hangs until the other one has been cleared."""
    space = engine.register(spec())
    put(engine, space, hashes(3))
    cleared = threading.Event()

    def answers(asking: socket.socket) -> None:
        if cleared.wait(PATIENCE_S):
            asking.sendall(JSON + b'\r\n{"l1": 7, "tiers": {}, "complete": true, "problems": {}}')

    told = clear._tell

    def tell(said: dict[str, Any]) -> None:
        told(said)
        cleared.set()

    monkeypatch.setattr(clear, "_tell", tell)
    with stranger(folder, answers):
        assert main(["clear", "--all", "--yes"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"vllm-\d+: forgotten: 3 objects of l1", first)
    assert second == "aaa-1: forgotten: 7 objects of l1"


def test_of_one_that_hangs_it_is_said_what_it_may_still_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clear, "TURN_S", 0.5)
    over = threading.Event()
    with stranger(folder, lambda asking: over.wait(PATIENCE_S)):
        assert main(["clear", "--all", "--yes"]) == 1
        over.set()
    err = capsys.readouterr().err
    assert "aaa-1 has not answered for 0.5 s: see what its process is doing; left out. What it may have begun" in err


def test_a_recording_that_cannot_begin_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a cache that closes before it is followed."""
    said = iter([JSON + b'\r\n{"kind": "engine", "address": ""}', b""])
    with stranger(folder, lambda asking: asking.sendall(next(said))):
        assert main(["record", str(folder / "t.jsonl")]) == 1
    assert "aaa-1 is gone" in capsys.readouterr().err
    assert not (folder / "t.jsonl").exists()


def test_a_prompt_of_nothing_but_brackets_is_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "p.json").write_text("[" * 200_000)
    assert main(["pin", "--prompt-file", str(folder / "p.json"), "--for", "1h"]) == 1
    assert "--model is missing" in capsys.readouterr().err


def test_one_without_room_is_busy_and_asked_again(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, ExitStack() as waiting:
        (folder / "run").mkdir(mode=0o700)
        listening.bind(str(folder / "run" / "aaa-1.sock"))
        listening.listen(0)
        (cache,) = caches()
        with pytest.raises(BlockingIOError):
            while True:
                other = waiting.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                other.connect(cache.path)
        with pytest.raises(NoAnswer, match=r"aaa-1 is busy: for 0\.3 s it had no room") as fault:
            ask(cache, "/status", timeout_s=0.3)
        assert not fault.value.late  # it has begun nothing
        waiting.close()
        with ThreadPoolExecutor() as pool:
            said = pool.submit(ask, cache, "/status", timeout_s=PATIENCE_S)
            while not said.done():
                asking, _ = listening.accept()
                with asking:
                    asking.settimeout(PATIENCE_S)
                    if asking.recv(4096):
                        asking.sendall(JSON + b"Content-Length: 2\r\n\r\n{}")
                        assert said.result(PATIENCE_S) == {}


def test_many_may_ask_at_once(engine: CacheEngine) -> None:
    (cache,) = caches()
    with ThreadPoolExecutor(60) as pool:
        assert {said["kind"] for said in pool.map(ask, [cache] * 60, ["/status"] * 60)} == {"engine"}


def test_a_recording_has_the_end_of_one_beside_one_that_hangs(
    engine: CacheEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(door, "LAST_S", PATIENCE_S)
    out = folder / "t.jsonl"
    hung, let_go = threading.Event(), threading.Event()
    space = engine.register(spec())

    def asked(count: int) -> None:
        lookup = engine.lookup(space, hashes(count), asked=Asked("r", 1))
        assert lookup.wait(PATIENCE_S)
        engine.release(lookup)

    def answers(asking: socket.socket) -> None:
        if out.exists() and out.stat().st_size:
            hung.set()
            let_go.wait(PATIENCE_S)
        else:
            nothing = {"kind": "engine", "address": "", "oldest": 1, "newest": 0, "requests": []}
            asking.sendall(JSON + b"\r\n" + json.dumps(nothing).encode())

    def end() -> None:
        assert hung.wait(PATIENCE_S)
        asked(7)
        engine.close()
        let_go.set()

    asked(1)
    with stranger(folder, answers), ThreadPoolExecutor() as pool:
        ended = pool.submit(end)
        assert main(["record", str(out), "--past"]) == 0
        ended.result()
    lengths = [len(json.loads(line)["hash_ids"]) for line in out.read_text().splitlines()]
    assert lengths == [1, 7]
    assert "aaa-1 " in capsys.readouterr().err


def test_a_recording_ends_while_one_hangs_and_says_so(
    engine: CacheEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcore.service.inspect.ask", partial(ask, timeout_s=0.3))
    out = folder / "t.jsonl"
    hangs, over = threading.Event(), threading.Event()
    space = engine.register(spec())

    def answers(asking: socket.socket) -> None:
        if hangs.is_set():
            over.wait(PATIENCE_S)
        nothing = {"kind": "engine", "address": "", "oldest": 1, "newest": 0, "requests": []}
        asking.sendall(JSON + b"\r\n" + json.dumps(nothing).encode())

    def lines(count: int) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while not out.exists() or len(out.read_text().splitlines()) < count:
            assert time.monotonic() < give_up
            engine.release(engine.lookup(space, hashes(1), asked=Asked("r", 1)))
            time.sleep(0.1)

    def end() -> None:
        try:
            lines(1)
            hangs.set()
            lines(len(out.read_text().splitlines()) + 30)  # of more than two seconds: it holds up nobody
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    with stranger(folder, answers), ThreadPoolExecutor() as pool:
        ended = pool.submit(end)
        assert main(["record", str(out)]) == 0
        ended.result()
        over.set()
    assert re.search(
        r"aaa-1 has not answered for \d+ s: see .*; what it was asked since is not", capsys.readouterr().err
    )
