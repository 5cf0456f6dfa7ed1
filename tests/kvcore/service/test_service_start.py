"""`kvcore serve`: its start and its end, its address, and engines that start it."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import CONFIG, back, connected, contents, engine_of, hashes, put, spec, until

from kvcore.api import ConfigError
from kvcore.cli import main
from kvcore.config import load_config
from kvcore.plugins import Registry
from kvcore.service import open_engine
from kvcore.service.client import RemoteEngine
from kvcore.testing.servers import free_port
from kvcore.testing.servers.kvcore import KVCoreServer

READY_S = 1.0
MEMORY_BYTES = 80 << 20


def serve(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`kvcore serve` that is expected to end by itself."""
    command = [sys.executable, "-m", "kvcore", "serve", "--config", str(config), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_it_is_ready_soon_small_and_private(folder: Path) -> None:
    """One line says so; the socket is 0600 in a folder of 0700; the arena is in no file that others see."""
    config = folder / "kvcore.yaml"
    path = folder / "run" / "kvcore.sock"
    config.write_text(f"server: unix://{path}\nl1: {{size: 64MiB}}\nl2: []\n")
    best = 1e9
    for _ in range(3):
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "kvcore", "serve", "--config", str(config)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        best = min(best, time.monotonic() - began)
        assert line == f"kvcore is ready on unix://{path}: L1 of 64 MiB, tiers: none\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        own = sum(int(x.split()[1]) * 1024 for x in status if x.startswith(("RssAnon:", "RssFile:")))
        assert own < MEMORY_BYTES
        assert "/dev/shm" not in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=20)
        assert (rest, process.returncode) == ("", 0)
        assert not list(path.parent.iterdir())
    assert best < 5 * READY_S


def test_it_uses_no_processor_while_nobody_asks(server: KVCoreServer) -> None:
    engines = [connected(server)[0] for _ in range(3)]
    time.sleep(1.0)  # the arena is faulted in at first

    def used() -> float:
        return sum(map(int, Path(f"/proc/{server.pid}/stat").read_text().split()[13:15])) / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(2.0)
    assert used() - before < 0.05 * 2.0
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_writes_out_what_waits_before_it_ends(folder: Path, number: signal.Signals) -> None:
    disk = {"storage": {"plugin": "disk", "path": str(folder / "cache"), "capacity": "64MiB"}}
    server = KVCoreServer(folder, {**CONFIG, "l2": [disk]})
    with server:
        engine, space = connected(server)
        put(engine, space, hashes())
        process = server._process
        assert process is not None
        process.send_signal(number)
        assert process.wait(20) == 0
        assert not server.socket.exists()
        until(lambda: engine.descriptor() is None, "the engine has noticed")
        server.start()
        back(engine)
        assert contents(engine, space, hashes()) == list(range(1, 9))
        assert engine.stats()['kvcore_hit_chunks_total{source="disk"}'] == 8
        engine.close()


def test_what_a_killed_server_left_is_cleaned_and_only_that(server: KVCoreServer) -> None:
    (server.socket.parent / "kvcore.sock.mine").write_text("kept")
    server.kill()
    assert server.socket.exists()
    before = set(os.listdir(server.socket.parent))
    server.start()
    assert set(os.listdir(server.socket.parent)) == before
    engine, space = connected(server)
    assert put(engine, space, hashes()) == 8
    engine.close()
    server.stop()
    assert before - set(os.listdir(server.socket.parent)) == {"kvcore.sock", "kvcore.sock.lock"}


def test_two_servers_on_one_path(server: KVCoreServer) -> None:
    engine, space = connected(server)
    put(engine, space, hashes())
    done = serve(server.config, "--set", f"metrics_port={free_port()}")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"another server is running on {server.url}" in done.stderr
    assert "stop it, or give another path in `server`" in done.stderr
    assert contents(engine, space, hashes()) == list(range(1, 9))
    engine.close()


def test_four_servers_at_once_over_what_a_dead_one_left(folder: Path) -> None:
    """One of them gets the path, and it is the one that can be reached."""
    config = folder / "kvcore.yaml"
    path = folder / "kvcore.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    config.write_text(f"server: unix://{path}\nl1: {{size: 8MiB}}\nl2: []\n")
    command = [sys.executable, "-m", "kvcore", "serve", "--config", str(config)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    try:
        engine = open_engine(str(config))
        descriptor = until(engine.descriptor, "a server", 30)
        until(lambda: sum(p.poll() is not None for p in processes) == 3, "the others have ended", 30)
        (alive,) = [p for p in processes if p.poll() is None]
        assert descriptor["pid"] == alive.pid
        assert engine.descriptor() == descriptor
        engine.close()
    finally:
        for p in processes:
            p.terminate()
        ends = [p.communicate(timeout=20) for p in processes]
    assert sum(b"another server is running" in err for _, err in ends) == 3


@pytest.mark.parametrize("what", ["a file", "a folder", "a program"])
def test_what_is_not_a_dead_servers_socket_is_left_alone(folder: Path, what: str) -> None:
    config, path = folder / "kvcore.yaml", folder / "kvcore.sock"
    config.write_text(f"server: unix://{path}\nl1: {{size: 8MiB}}\nl2: []\n")
    with socket.socket(socket.AF_UNIX) as other:
        if what == "a file":
            path.write_text("kept")
        elif what == "a folder":
            path.mkdir()
        else:
            other.bind(str(path))
            other.listen()
        done = serve(config)
        assert (done.returncode, done.stdout) == (1, "")
        expected = "another program listens on" if what == "a program" else f"{path} is no socket"
        assert expected in done.stderr
        assert path.exists()
    assert set(os.listdir(folder)) == {"kvcore.yaml", "kvcore.sock"}


def test_a_port_that_is_taken(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = folder / "kvcore.yaml"
        config.write_text(f"server: {{url: tcp://127.0.0.1:{port}, token: 0123456789abcdef}}\nl2: []\n")
        done = serve(config)
    assert done.returncode == 1
    assert f"another program listens on tcp://127.0.0.1:{port}: stop it, or give another port" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("l2: []\n", "server: is missing: say where to listen"),
        ("server: [unix:///tmp/a.sock, unix:///tmp/b.sock]\n", "server: is a list, which is for engines"),
        ("server: unix:///tmp/a.sock\nl1: {size: 900TiB}\n", "l1.size is 900 TiB, but "),
        (
            "server: unix:///proc/none/a.sock\n",
            "/proc/none cannot be made or written to (No such file or directory): make it",
        ),
    ],
)
def test_what_it_cannot_do_is_one_line_and_leaves_nothing(folder: Path, text: str, said: str) -> None:
    config = folder / "kvcore.yaml"
    config.write_text(text.replace("/tmp/", f"{folder}/"))
    done = serve(config)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(folder) == ["kvcore.yaml"]


# -- the configuration -------------------------------------------------------------------------------------------------


def loaded(folder: Path, text: str, **env: str) -> Any:
    (folder / "kvcore.yaml").write_text(text)
    return load_config(folder / "kvcore.yaml", env=env, registry=Registry()).server


@pytest.mark.parametrize(
    ("text", "env", "expected"),
    [
        ("server: unix:///run/a.sock\n", {}, "unix:///run/a.sock 0.25 None"),
        ("server: {url: unix:///run/a.sock, timeout: 50ms}\n", {}, "unix:///run/a.sock 0.05 None"),
        ("server: [unix:///run/a.sock, unix:///run/b.sock]\n", {}, "unix:///run/a.sock unix:///run/b.sock 0.25 None"),
        ("l2: []\n", {"KVCORE_SERVER": "unix:///a"}, "unix:///a 0.25 None"),
        ("server: unix:///a\n", {"KVCORE_SERVER__TIMEOUT": "1s"}, "unix:///a 1.0 None"),
        (
            "server: tcp://127.0.0.1:76\n",
            {"KVCORE_SERVER__TOKEN": "t" * 16},
            "tcp://127.0.0.1:76 0.25 tttttttttttttttt",
        ),
    ],
)
def test_forms_of_the_configuration(tmp_path: Path, text: str, env: dict[str, str], expected: str) -> None:
    found = loaded(tmp_path, text, **env)
    token = found.token.get_secret_value() if found.token else None
    assert f"{' '.join(map(str, found.url))} {found.timeout} {token}" == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "server: kvcore.sock\n",
            "'kvcore.sock' is no address: write unix:///run/kvcore/kvcore.sock, or tcp://127.0.0.1:7600",
        ),
        ("server: unix://kvcore.sock\n", "the path of a socket is absolute"),
        (f"server: unix:///{'x' * 120}\n", "has at most 107 bytes"),
        ("server: tcp://0.0.0.0:7600\n", "over TCP a server serves this machine alone"),
        ("server: tcp://127.0.0.1:0\n", "is no address"),
        ("server: tcp://127.0.0.1:7600\n", "needs a `token`"),
        ("server: {url: tcp://127.0.0.1:7600, token: short-secret}\n", "given a hidden value"),
        ("server: {url: [unix:///a, unix:///b], autostart: true}\n", "`autostart` needs one address"),
        ("server: {timeout: 1s}\n", "server.url: is missing"),
        ("server: []\n", "no address"),
        ("server: 7600\n", "must be a mapping"),
    ],
)
def test_what_is_wrong_in_the_configuration(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, text)
    assert said in str(error.value)
    assert "short-secret" not in str(error.value)


# -- engines that start it ---------------------------------------------------------------------------------------------


@pytest.fixture
def starting(folder: Path) -> Iterator[Path]:
    """A configuration whose engines start a server, which is ended afterwards."""
    config = folder / "kvcore.yaml"
    url = f"unix://{folder}/run/kvcore.sock"
    config.write_text(json.dumps({**CONFIG, "server": {"url": url, "autostart": True, "timeout": "5s"}}))
    yield config
    engine = open_engine(str(config), flags={"server.autostart": False})
    time.sleep(0.3)
    if (descriptor := engine.descriptor()) is not None:
        os.kill(descriptor["pid"], signal.SIGTERM)
        until(lambda: not (folder / "run" / "kvcore.sock.lock").exists(), "it has ended", 30)
    engine.close()


def test_engines_that_find_no_server_start_one(starting: Path, folder: Path) -> None:
    """Three at once get one and the same; it outlives them; killed, it is started again."""
    engines = [open_engine(str(starting), name=f"engine {i}") for i in range(3)]
    spaces = [engine.register(spec()) for engine in engines]
    for engine in engines:
        until(engine.descriptor, "a server", 30)
    pids = {engine.descriptor()["pid"] for engine in engines}  # type: ignore[index]
    assert len(pids) == 1
    put(engines[0], spaces[0], hashes())
    assert contents(engines[2], spaces[2], hashes()) == list(range(1, 9))
    for engine in engines:
        engine.close()
    again = open_engine(str(starting))
    assert isinstance(again, RemoteEngine)
    space = again.register(spec())
    token = back(again)
    assert contents(again, space, hashes()) == list(range(1, 9))
    (pid,) = pids
    os.kill(pid, signal.SIGKILL)
    until(lambda: again.descriptor() is None, "it is gone")
    until(lambda: (d := again.descriptor()) and d["token"] != token, "another", 40)
    assert again.descriptor()["pid"] != pid  # type: ignore[index]
    assert put(again, space, hashes()) == 8
    said = (folder / "run" / "kvcore.sock.log").read_text()
    assert f"kvcore is ready on unix://{folder}/run/kvcore.sock" in said
    again.close()


def test_an_engine_that_cannot_start_a_server_runs_without_a_cache(folder: Path) -> None:
    config = folder / "kvcore.yaml"
    config.write_text(f"server: {{url: unix://{folder}/s, autostart: true}}\nl1: {{size: 900TiB}}\nl2: []\n")
    engine = open_engine(str(config))
    space = engine.register(spec())
    log = folder / "s.log"
    until(lambda: log.exists() and "l1.size is 900 TiB" in log.read_text(), "the reason is in its log", 30)
    assert engine.lookup(space, hashes()).poll() == 0
    engine.close()


def test_without_a_server_in_the_configuration_the_engine_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "kvcore.yaml").write_text("l1: {size: 8MiB}\nl2: []\nmin_object_size: 128KiB\n")
    engine = open_engine(str(tmp_path / "kvcore.yaml"))
    space = engine.register(spec())
    assert put(engine, space, hashes()) == 8
    assert contents(engine, space, hashes()) == list(range(1, 9))
    engine.close()


def test_an_engine_is_open_at_once_whatever_the_server_does(folder: Path) -> None:
    server = KVCoreServer(folder, CONFIG)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(server.socket))
        deaf.listen(0)
        began = time.monotonic()
        engine = engine_of(server)
        space = engine.register(spec())
        assert engine.lookup(space, hashes()).poll() == 0
        engine.close()
        assert time.monotonic() - began < 2.0


# -- doctor ------------------------------------------------------------------------------------------------------------


def doctor(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timeout: str = "30s"
) -> dict[str, Any]:
    """What doctor says of the server."""
    for part in ("_torch", "_engines", "_plugins"):
        monkeypatch.setattr(f"kvcore.cli.doctor.command.{part}", lambda *given: iter(()))
    main(["doctor", "--json", str(config), "--set", "metrics_port=0", "--set", f"server.timeout={timeout}"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [f for f in findings if f["subject"].startswith("server ")]
    return dict(found)


def test_doctor_says_whether_the_server_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = KVCoreServer(folder, CONFIG)
    found = doctor(server.config, monkeypatch, capsys)
    assert (found["level"], found["subject"]) == ("warning", f"server {server.url}")
    assert "nobody answers: No such file" in found["text"]
    assert "kvcore serve --config" in found["remedy"]
    with server:
        found = doctor(server.config, monkeypatch, capsys)
        assert found["level"] == "ok"
        assert "L1 of 8 MiB, answers in" in found["text"]
        found = doctor(server.config, monkeypatch, capsys, "0.001ms")
        assert (found["level"], found["text"].partition(" ms, and ")[2]) == (
            "warning",
            "engines wait 0.001 ms: they would go on without it",
        )
        assert "raise `server.timeout`" in found["remedy"]
        server.freeze()
        found = doctor(server.config, monkeypatch, capsys)
        assert (found["level"], "has not answered for 2 s" in found["text"]) == ("error", True)
        server.thaw()
