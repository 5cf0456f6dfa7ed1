"""The base of the server helpers, with Python's own HTTP server: killed, frozen, restarted, never left behind."""

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.testing.servers import Server, ServerError, free_port, listens, process

PATIENCE_S = 20.0


class Http(Server):
    """Serves the files of its folder."""

    def __init__(self, folder: Path, port: int, **kwargs: object) -> None:
        self.port = port
        command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", port]
        super().__init__("http", [str(c) for c in command], ready=lambda: listens(port), folder=folder, **kwargs)  # type: ignore[arg-type]

    def get(self, timeout_s: float = PATIENCE_S) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/object", timeout=timeout_s) as answer:
            return answer.read()


@pytest.fixture
def http(tmp_path: Path) -> Iterator[Http]:
    (tmp_path / "object").write_bytes(b"bytes")
    with Http(tmp_path, free_port()) as server:
        yield server


def script(folder: Path, source: str, **kwargs: object) -> Server:
    """A process that runs `source` and counts as started once there is a file `ready` in its folder."""
    ready = (folder / "ready").exists
    return Server("script", [sys.executable, "-c", source], ready=ready, folder=folder, **kwargs)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    """Is it there, and no zombie that only waits to be reaped?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait(condition: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.02)
    return condition()


def test_start_returns_when_it_answers(http: Http) -> None:
    assert http.get() == b"bytes"
    assert http.running
    assert "GET /object" in http.log.read_text()


def test_killed_it_refuses_and_started_again_it_is_the_same_server(http: Http) -> None:
    first = http.pid
    http.kill()
    assert not alive(first)
    assert not http.running
    with pytest.raises(ConnectionRefusedError):
        open_connection(http)
    with pytest.raises(ServerError, match="http is not running"):
        http.pid  # noqa: B018
    http.kill()  # harmless
    http.start()
    assert http.get() == b"bytes"
    assert http.pid != first


def open_connection(http: Http) -> None:
    try:
        http.get()
    except urllib.request.URLError as error:
        raise error.reason from None  # type: ignore[misc]


def test_frozen_it_holds_connections_and_answers_nothing(http: Http) -> None:
    http.freeze()
    with pytest.raises(TimeoutError):
        http.get(timeout_s=0.3)
    assert http.running
    http.thaw()
    assert http.get() == b"bytes"


def test_a_frozen_server_stops_politely(tmp_path: Path) -> None:
    server = script(
        tmp_path,
        "import pathlib, signal, sys, time\n"
        "def end(*_): pathlib.Path('ended').touch(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(600)\n",
    ).start()
    server.freeze()
    server.stop()
    assert (tmp_path / "ended").exists()
    assert not server.running
    server.stop()  # harmless


def test_it_runs_once(http: Http) -> None:
    first = http.pid
    with pytest.raises(ServerError, match="http is running already"):
        http.start()
    with http:
        assert http.pid == first
    assert not http.running


def test_what_it_started_is_killed_with_it(tmp_path: Path) -> None:
    server = script(
        tmp_path,
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(600)\n",
    ).start()
    child = int((tmp_path / "child").read_text())
    assert alive(child)
    server.kill()
    assert wait(lambda: not alive(child))


def test_one_that_does_not_start_reports_its_last_lines(tmp_path: Path) -> None:
    server = script(tmp_path, "for i in range(40): print('line', i, flush=True)\nraise SystemExit('no such licence')")
    with pytest.raises(ServerError) as caught:
        server.start()
    text = str(caught.value)
    assert text.startswith("script ended with 1; its last lines:\nline 26\n")
    assert text.endswith("line 39\nno such licence")
    assert not server.running


def test_one_that_never_answers_is_not_left_behind(tmp_path: Path) -> None:
    source = (
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\nprint('dreaming', flush=True)\n"
    )
    server = script(tmp_path, source + "time.sleep(600)")
    with pytest.raises(ServerError, match="script did not answer within 2 s; its last lines:\ndreaming"):
        server.start(timeout_s=2.0)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_command_that_is_not_there_says_so(tmp_path: Path) -> None:
    server = Server("ghost", ["kvcore-no-such-server"], ready=lambda: True, folder=tmp_path)
    with pytest.raises(ServerError, match="ghost: kvcore-no-such-server cannot be run: No such file or directory"):
        server.start()


def test_env_and_prefix(tmp_path: Path) -> None:
    source = "import os, pathlib, time\npathlib.Path('seen').write_text(os.environ['A'] + os.environ['B'])\n"
    source += "pathlib.Path('ready').touch()\ntime.sleep(600)\n"
    with script(tmp_path, source, env={"A": "1"}, prefix=["env", "B=2"]):
        assert (tmp_path / "seen").read_text() == "12"


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    port = free_port()
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom pathlib import Path\nfrom kvcore.testing.servers import Server, listens\n"
            "port, folder = sys.argv[1:]\n"
            "command = [sys.executable, '-m', 'http.server', '--bind', '127.0.0.1', port]\n"
            "server = Server('http', command, ready=lambda: listens(int(port)), folder=Path(folder)).start()\n"
            "print(server.pid, flush=True)\ntime.sleep(600)\n",
            str(port),
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()  # no time to clean up
    parent.communicate()
    assert wait(lambda: not alive(pid) and not listens(port))


def test_free_ports_are_free(tmp_path: Path) -> None:
    port = free_port()
    assert not listens(port)
    assert 1024 < port < 65536


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    given = free_port()
    chosen = [given, given, 1]  # by the system, which may choose one again

    class Probe(contextlib.nullcontext[Any]):
        def __enter__(self) -> "Probe":
            return self

        def bind(self, address: tuple[str, int]) -> None:
            assert address == ("127.0.0.1", 0)

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", chosen.pop(0)

    monkeypatch.setattr(process, "socket", SimpleNamespace(socket=Probe))
    assert free_port() == 1
