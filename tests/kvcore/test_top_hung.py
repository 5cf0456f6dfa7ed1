"""`kvcore top` where a cache hangs: the others are shown all the same, and of it since when it says nothing."""

import os
import pty
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from terminal import read_until

from kvcore.cli import main
from kvcore.cli.top import looks
from kvcore.cli.top.looks import Looks
from kvcore.cli.top.sample import Watch
from kvcore.engine import CacheEngine
from kvcore.service import open_engine
from kvcore.service.inspect import caches

PATIENCE_S = 60.0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of sockets; its path is short."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        run = Path(folder) / "run"
        monkeypatch.setenv("KVCORE_RUN_DIR", str(run))
        monkeypatch.delenv("KVCORE_CONFIG", raising=False)
        yield run


@pytest.fixture
def engine(run: Path) -> Iterator[CacheEngine]:
    path = run.parent / "kvcore.yaml"
    path.write_text("l1: {size: 8MiB}\nl2: []\nmin_object_size: 128KiB\n")
    engine = open_engine(str(path), name="well")
    assert isinstance(engine, CacheEngine)
    yield engine
    engine.close()


@pytest.fixture
def hung(engine: CacheEngine, run: Path) -> Iterator[socket.socket]:
    """The socket of a process that hangs: it listens, and nobody accepts."""
    with closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(str(run / "hung-1.sock"))
        made.listen(8)
        yield made


def test_one_look_waits_a_little_for_it(
    hung: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(looks, "LATE_S", 0.2)
    assert main(["top", "--once"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"hung-1\n  hung-1 has not answered for \d+ s: see what its process is doing", text)
    assert re.search(rf"well-{os.getpid()}  engine .*HIT RATE", text, re.S)


def test_again_and_again_it_is_asked_once_and_shown_as_it_was(
    engine: CacheEngine, hung: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches = [Watch(cache) for cache in caches()]
    assert [w.cache.name for w in watches] == ["hung", "well"]
    looking = Looks()
    monkeypatch.setattr(looks, "PATIENCE_S", 0.2)
    for _ in range(3):
        silent, well = looking.again(watches)
        assert (silent.status, "has not answered for" in silent.fault) == (None, True)
    give_up = time.monotonic() + PATIENCE_S
    while well.fault:  # on a busy machine it may not answer in time, either
        assert time.monotonic() < give_up
        silent, well = looking.again(watches)
    assert well.status is not None
    hung.settimeout(0.5)
    questions = 0
    with pytest.raises(TimeoutError):
        while True:
            asking, _ = hung.accept()
            questions += bool(asking.recv(1))  # others only look whether it lives
            asking.close()
    assert questions == 1
    while True:  # now it has been answered: by the end of its connection
        silent, _ = looking.again(watches)
        if "is gone" in silent.fault:
            break
        assert time.monotonic() < give_up
    assert looking.again(watches[1:])[0].label == watches[1].cache.label


def test_live_the_others_are_shown_at_once(engine: CacheEngine, hung: socket.socket) -> None:
    main_end, other_end = pty.openpty()
    command = [sys.executable, "-m", "kvcore", "top", "--interval", "200ms"]
    environment = {**os.environ, "COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
    with subprocess.Popen(command, stdin=other_end, stdout=other_end, stderr=other_end, env=environment) as process:
        os.close(other_end)
        try:
            shown = read_until(main_end, lambda text: "HIT RATE" in text and "hung-1 has not answered for" in text)
            waited = max(int(n) for n in re.findall(r"has not answered for (\d+) s", shown))
            assert waited < 15, "the screen was not drawn before the question was given up"
            os.write(main_end, b"q")
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            os.close(main_end)
