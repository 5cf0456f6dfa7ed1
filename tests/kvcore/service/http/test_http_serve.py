"""`kvcore serve` with HTTP: one process, its engines, its health."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from docs_blocks import lines
from kvcore.service import open_engine
from kvcore.testing.chunks import hashes, put, spec
from kvcore.testing.servers import Server, free_port

TOKEN = "correct horse battery"


@contextmanager
def served(path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`kvcore serve`, once it is ready."""
    env = {**os.environ, "KVCORE_SERVER__HTTP__TOKEN": TOKEN}
    command = [sys.executable, "-m", "kvcore", "serve", "--config", str(path), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    try:
        if "ready" not in (line := process.stdout.readline()):
            raise AssertionError(line + process.communicate(timeout=10)[1])
        yield process
    finally:
        process.kill()
        process.communicate()


def get(port: int, path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def test_a_server_shows_its_engines_and_is_watched(tmp_path: Path) -> None:
    path, port = tmp_path / "kvcore.yaml", free_port()
    path.write_text(f"server: unix://{tmp_path}/kvcore.sock\nl1: {{size: 8MiB}}\nl2: []\n")
    with served(path, "--http", f"127.0.0.1:{port}") as process:
        assert {c["name"] for c in get(port, "/healthz")["checks"]} == {"loop tiers", "loop serve", "reaper"}
        engine = open_engine(str(path), name="one")
        try:
            space = engine.register(spec())
            deadline = time.monotonic() + 10
            while engine.descriptor() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            lookup = engine.lookup(space, hashes())
            assert lookup.wait(10)
            status = get(port, "/status")
            (session,) = status["sessions"]
            assert (session["name"], session["pid"], session["spaces"]) == ("one", os.getpid(), 1)
            assert status["address"] == f"unix://{tmp_path}/kvcore.sock"
            assert [n["model"] for n in get(port, "/namespaces")["namespaces"]] == ["m"]
        finally:
            engine.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_tier_that_is_added_serves_the_engines(tmp_path: Path) -> None:
    path, port = tmp_path / "kvcore.yaml", free_port()
    path.write_text(
        f"server: {{url: unix://{tmp_path}/a.sock, http: 127.0.0.1:{port}}}\n"
        "l1: {size: 8MiB}\nmin_object_size: 128KiB\nl2: []\n"
    )
    with served(path):
        engine = open_engine(str(path), name="one")
        try:
            space = engine.register(spec())
            deadline = time.monotonic() + 10
            while engine.descriptor() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            get(port, "/tiers", {"storage": {"plugin": "disk", "path": str(tmp_path / "disk")}})
            put(engine, space, hashes())
            assert get(port, "/clear", {"namespace": space.namespace.hex()})["l1"] == 8
            lookup = engine.lookup(space, hashes())
            assert lookup.wait(10)
            assert lookup.sources == {"disk": 8}
            engine.release(lookup)
        finally:
            engine.close()


def test_the_configuration_alone_will_do_and_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    path, port = tmp_path / "kvcore.yaml", free_port()
    path.write_text(f"server: {{url: unix://{tmp_path}/a.sock, http: 127.0.0.1:{port}}}\nl1: {{size: 8MiB}}\nl2: []\n")
    other = tmp_path / "other.yaml"
    other.write_text(path.read_text().replace("a.sock", "b.sock"))
    with served(path):
        assert get(port, "/readyz")["status"] == "ok"
        done = subprocess.run(
            [sys.executable, "-m", "kvcore", "serve", "--config", str(other)],
            capture_output=True, text=True, timeout=60,
            env={**os.environ, "KVCORE_SERVER__HTTP__TOKEN": TOKEN}, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert f"server.http: 127.0.0.1 port {port} cannot be had" in done.stderr


def test_a_frozen_process_answers_nobody_and_goes_on_when_thawed(tmp_path: Path) -> None:
    path, port = tmp_path / "kvcore.yaml", free_port()
    path.write_text(f"server: {{url: unix://{tmp_path}/a.sock, http: 127.0.0.1:{port}}}\nl1: {{size: 8MiB}}\nl2: []\n")
    with served(path) as process:
        get(port, "/healthz")
        answers: list[Any] = []
        process.send_signal(signal.SIGSTOP)
        asking = threading.Thread(target=lambda: answers.append(get(port, "/healthz")))
        asking.start()
        time.sleep(1)
        assert not answers
        process.send_signal(signal.SIGCONT)
        asking.join(20)
        assert answers[0]["status"] == "ok"


@pytest.mark.parametrize("page", ["docs/http.md", "docs/ui.md"])
def test_the_pages_command(page: str, tmp_path: Path) -> None:
    """As it stands there, in the folder of its file; only the port is another. What it shows is there."""
    (line,), port = lines(page, "kvcore serve"), free_port()
    (tmp_path / "kvcore.yaml").write_text(f"server: unix://{tmp_path}/kvcore.sock\nl1: {{size: 8MiB}}\nl2: []\n")
    command = [sys.executable, "-m", *shlex.split(line.replace("127.0.0.1:7601", f"127.0.0.1:{port}"))]
    env = {**os.environ, "KVCORE_SERVER__HTTP__TOKEN": TOKEN}
    server = Server("serve", command, ready=lambda: bool(get(port, "/readyz")), folder=tmp_path, env=env)
    with server, urllib.request.urlopen(f"http://127.0.0.1:{port}/ui", timeout=30) as shown:
        assert "kvcore" in shown.read().decode()
