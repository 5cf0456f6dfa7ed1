"""Programs that `kvcore serve` runs beside itself: with it they begin and end, and whatever they do it goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from served import CONFIG, connected, contents, hashes, put, spec, until

from kvcore.cli import main
from kvcore.config import ScriptConfig
from kvcore.observe import METRICS, Metrics
from kvcore.service import children as module
from kvcore.service import open_engine
from kvcore.service.children import Children, Pace
from kvcore.service.output import LINES_PER_S, MAX_LINE, Output
from kvcore.testing.servers import free_port
from kvcore.testing.servers.kvcore import KVCoreServer

LONG_S = 60.0
QUICK = Pace(first_s=0.01, most_s=0.02, steady_s=60.0, limit=5)

Run = Callable[..., Children]


def script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(dedent(text))
    return path


def runs(pid: int) -> bool:
    """It is there, and not only waited for by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids(path: Path, count: int) -> list[int]:
    """As programs have written them to a file, one a line."""
    until(lambda: path.exists() and path.read_text().count("\n") >= count, f"{count} processes are there", LONG_S)
    return [int(line) for line in path.read_text().split()]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs programs in this process, by the file names of scripts or as mappings."""
    started: list[Children] = []

    def start(*scripts: Any, pace: Pace = QUICK) -> Children:
        given = [{"path": one} if isinstance(one, str) else one for one in scripts]
        configured = [ScriptConfig(**{**one, "path": str(tmp_path / one["path"])}) for one in given]
        made = Children(configured, pace)
        made.start(dict(os.environ), Metrics())
        started.append(made)
        return made

    yield start
    for made in started:
        made.close()


def state(children: Children, index: int = 0) -> str:
    return str(children.status()[index]["state"])


# -- with the server ---------------------------------------------------------------------------------------------------


def serving(folder: Path, *scripts: Any, **more: Any) -> tuple[KVCoreServer, str]:
    """A server with these programs and HTTP, not started; and where HTTP is."""
    http = f"127.0.0.1:{free_port()}"
    server = {"url": f"unix://{folder}/kvcore.sock", "http": http}
    values = {**CONFIG, "server": server, "plugins": {"run": list(scripts)}, **more}
    return KVCoreServer(folder, values), f"http://{http}"


def helpers(http: str) -> Any:
    with urllib.request.urlopen(f"{http}/status", timeout=30) as answer:
        return json.loads(answer.read())["helpers"]


def test_a_program_finds_the_server_and_uses_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its environment alone, which does not hold the server's tokens; and it ends with the server."""
    for name in ("KVCORE_SERVER__TOKEN", "KVCORE_SERVER__HTTP__TOKEN", "KVCORE_server__http__token"):
        monkeypatch.setenv(name, "a-token-that-is-secret")
    script(
        folder, "stores.py", """\
        import json, os, sys
        sys.path[:0] = json.loads(os.environ["WHERE"])
        from served import back, hashes, put, spec
        from kvcore.service import open_engine

        engine = open_engine(flags={"server.timeout": "5s"})
        space = engine.register(spec())
        back(engine)
        engine.clear(space)
        print("stored", put(engine, space, hashes()))
        known = {k: v for k, v in os.environ.items() if k.startswith("KVCORE_") and not k.startswith("KVCORE_TEST_")}
        print(json.dumps([sys.argv[1:], os.getpid(), os.getcwd(), known]))
        sys.stdin.read()
        import signal
        signal.pause()
        """,
    )  # fmt: skip
    where = json.dumps([str(Path(__file__).parent)])
    server, http = serving(folder, {"path": "stores.py", "args": ["--fast", "two words"], "env": {"WHERE": where}})
    with server:
        said = until(lambda: re.search(r"INFO \[stores.py\] (\[.*)", server.log.read_text()), "it has said", LONG_S)
        args, pid, cwd, known = json.loads(said[1])
        assert "[stores.py] stored 8\n" in server.log.read_text()
        assert (args, cwd) == (["--fast", "two words"], str(folder))
        assert known == {"KVCORE_SERVER": server.url, "KVCORE_CONFIG": str(server.config), "KVCORE_HTTP": http}
        (helper,) = helpers(http)
        since = helper.pop("since")
        path = str(folder / "stores.py")
        expected = {"name": "stores.py", "path": path, "state": "running", "pid": pid, "starts": 1, "last": ""}
        assert helper == expected
        assert since.endswith("Z")
        assert server.metrics()['kvcore_helper_up{helper="stores.py"}'] == 1
        assert server.metrics()['kvcore_helper_starts_total{helper="stores.py"}'] == 1
        engine, space = connected(server)
        put(engine, space, hashes())
        assert contents(engine, space, hashes()) == list(range(1, 9))
        engine.close()
        server.stop()
        assert not runs(pid)
    assert "a-token-that-is-secret" not in server.log.read_text()


def test_a_server_that_is_killed_leaves_nobody(folder: Path) -> None:
    """Neither its programs, nor what they started, nor what takes no SIGTERM."""
    script(
        folder, "family.sh", """\
        echo $$ >> pids
        sh -c 'trap "" TERM; echo $$ >> pids; while :; do sleep 0.1; done' &
        sh -c 'echo $$ >> pids; exec sleep 1000' > /dev/null &
        wait
        """,
    )  # fmt: skip
    script(folder, "one.py", "import os, time\nopen('pids', 'a').write(f'{os.getpid()}\\n')\ntime.sleep(1000)\n")
    server, _ = serving(folder, "family.sh", "one.py")
    with server:
        found = pids(folder / "pids", 4)
        assert all(map(runs, found))
        server.kill()
        until(lambda: not any(map(runs, found)), "all have ended", LONG_S)


def test_one_that_floods_its_output_costs_the_server_little(folder: Path) -> None:
    script(folder, "flood.sh", "yes 'much to say'\n")
    server, http = serving(folder, "flood.sh")
    with server:
        until(lambda: "which are not shown" in server.log.read_text(), "it is held back", LONG_S)

        def used() -> tuple[float, float]:
            stat = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
            uptime_s = float(Path("/proc/uptime").read_text().split()[0])
            return sum(map(int, stat[11:13])) / os.sysconf("SC_CLK_TCK"), uptime_s

        (cpu_s, at), lines = used(), server.log.read_text().count("much to say")
        engine, space = connected(server)
        for first in range(5):
            put(engine, space, hashes(8, 100 * first))
        engine.close()
        until(lambda: used()[1] - at > 2.0, "two seconds are over", LONG_S)
        after_s, now = used()
        assert after_s - cpu_s < 0.5 * (now - at)
        assert server.log.read_text().count("much to say") - lines <= LINES_PER_S * (now - at + 2)
        assert [h["state"] for h in helpers(http)] == ["running"]


def test_those_that_fail_harm_nobody(folder: Path) -> None:
    script(folder, "broken.py", "import this_is_not_there\n")
    script(folder, "dies.sh", "kill -SEGV $$\n")
    server, http = serving(folder, "broken.py", "dies.sh", {"path": "dies.sh", "restart": "never"})
    with server:
        until(lambda: all(h["last"] for h in helpers(http)), "all have ended", LONG_S)
        engine, space = connected(server)
        assert put(engine, space, hashes()) == 8
        engine.close()
        broken, dies, once = helpers(http)
        assert [broken["name"], dies["name"], once["name"]] == ["broken.py", "dies.sh", "dies.sh#2"]
        assert (broken["last"], dies["last"]) == ("ended with 1", "was killed by SIGSEGV")
        assert (once["state"], once["starts"], once["pid"]) == ("ended", 1, None)
        with urllib.request.urlopen(f"{http}/healthz", timeout=30) as answer:
            assert json.loads(answer.read())["status"] == "ok"
    said = server.log.read_text()
    assert "[broken.py] ModuleNotFoundError: No module named 'this_is_not_there'" in said
    assert "WARNING [broken.py] ended with 1; it is started again in 1 s" in said


# -- the configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nothere.py", "3:9: plugins.run[0].path: there is no {folder}/nothere.py"),
        ("{path: nothere.sh, args: [x]}", "3:16: plugins.run[0].path: there is no {folder}/nothere.sh"),
        ("program.exe", "3:9: plugins.run[0].path: {folder}/program.exe ends with neither .py nor .sh"),
        ("folder.py", "3:9: plugins.run[0].path: {folder}/folder.py is no file"),
    ],
)
def test_what_cannot_be_run_is_refused(folder: Path, entry: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With its place. An engine with the same file runs, and runs none of it."""
    (folder / "folder.py").mkdir()
    config = checked(folder, f"\n      - {entry}", 1, said, capsys)
    engine = open_engine(str(config))
    assert engine.register(spec()) is not None
    engine.close()


def checked(folder: Path, run: str, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> Path:
    """A file with this `run`, of which `kvcore config check` says so."""
    config = folder / "kvcore.yaml"
    config.write_text(f"plugins:\n  run:{run}\nl1: {{size: 8MiB}}\nl2: []\nserver: unix://{folder}/s\n")
    assert main(["config", "check", str(config)]) == status
    assert f"{config}:{said.format(folder=folder)}" in capsys.readouterr().out
    return config


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (" [null]", "2:9: plugins.run[0]: must be a path, or a mapping with `path`, given nothing"),
        (" [3]", "2:9: plugins.run[0]: must be a path, or a mapping with `path`, given 3"),
        (" [{path: a.sh, env: {'A=B': x}}]", "2:35: plugins.run[0].env.A=B: no variable can have this name"),
        (" [{path: a.sh, env: {'': x}}]", "2:32: plugins.run[0].env.: no variable can have this name"),
    ],
)
def test_what_is_no_program_is_refused(folder: Path, run: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.sh").touch()
    checked(folder, run, 1, said, capsys)


def test_check_of_no_program_and_of_one_that_is_told_of_another_server(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checked(folder, "", 0, " no faults", capsys)
    (folder / "a.sh").touch()
    told = "2:43: plugins.run[0].env.KVCORE_SERVER: the program is told this value and not the server's own"
    checked(folder, " [{path: a.sh, env: {KVCORE_SERVER: x}}]", 0, told, capsys)


def test_a_server_with_what_cannot_be_run_does_not_start(folder: Path) -> None:
    """It says so before it makes its socket."""
    config = folder / "kvcore.yaml"
    config.write_text(f"plugins: {{run: [nothere.py]}}\nl1: {{size: 8MiB}}\nl2: []\nserver: unix://{folder}/s\n")
    command = [sys.executable, "-m", "kvcore", "serve", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{config}:1:17: plugins.run[0].path: there is no {folder}/nothere.py" in done.stderr
    assert os.listdir(folder) == ["kvcore.yaml"]


def test_an_engine_of_its_own_runs_none_of_it_and_check_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(folder, "once.sh", "touch ran\n")
    config = folder / "kvcore.yaml"
    config.write_text("plugins: {run: [once.sh]}\nl1: {size: 8MiB}\nl2: []\nmin_object_size: 128KiB\n")
    engine = open_engine(str(config))
    space = engine.register(spec())
    put(engine, space, hashes())
    assert contents(engine, space, hashes()) == list(range(1, 9))
    engine.close()
    assert not (folder / "ran").exists()
    assert main(["config", "check", str(config)]) == 0
    assert "plugins.run: is run by `kvcore serve` only" in capsys.readouterr().out


def test_values_of_the_environment_are_not_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = folder / "kvcore.yaml"
    config.write_text("plugins: {run: [{path: once.sh, env: {PASSWORD: hunter2}}]}\nl2: []\n")
    monkeypatch.setenv("KVCORE_PLUGINS__RUN__0__RESTART", "never")
    assert main(["config", "show", str(config)]) == 0
    shown = capsys.readouterr().out
    assert "plugins.run[0].env.PASSWORD" in shown
    assert re.search(r"plugins.run\[0\].restart +never +environment", shown)
    assert "hunter2" not in shown


# -- ends and restarts -------------------------------------------------------------------------------------------------


def test_one_that_ends_at_once_is_given_up(tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    script(tmp_path, "ends.sh", "echo x >> starts; exit 3\n")
    children = run("ends.sh")
    until(lambda: state(children) == "failed", "it is given up", LONG_S)
    assert (tmp_path / "starts").read_text() == "x\n" * QUICK.limit
    (found,) = children.status()
    assert (found["starts"], found["last"], found["pid"]) == (QUICK.limit, "ended with 3", None)
    assert "[ends.sh] ended with 3, 5 times in a row" in caplog.text


def test_the_pauses_double_and_begin_anew_after_a_steady_run(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    script(tmp_path, "ends.sh", "exit 1\n")
    children = run("ends.sh", pace=Pace(0.01, 0.04, 60, 6))
    until(lambda: state(children) == "failed", "it is given up", LONG_S)
    assert re.findall(r"again in ([\d.]+) s", caplog.text) == ["0.01", "0.02", "0.04", "0.04", "0.04"]
    caplog.clear()
    children = run("ends.sh", pace=Pace(0.01, 0.04, 0.0, 3))
    until(lambda: children.status()[0]["starts"] > 10, "it is started for ever", LONG_S)
    assert set(re.findall(r"again in ([\d.]+) s", caplog.text)) == {"0.01"}


def test_when_it_is_started_again(tmp_path: Path, run: Run) -> None:
    script(tmp_path, "good.sh", "exit 0\n")
    script(tmp_path, "bad.sh", "exit 1\n")
    given = [(name, when) for when in ("never", "failure", "always") for name in ("good.sh", "bad.sh")]
    children = run(*({"path": name, "restart": when} for name, when in given))
    until(lambda: all(c["state"] in ("ended", "failed") for c in children.status()), "all have ended", LONG_S)
    found = [(c["state"], c["starts"]) for c in children.status()]
    assert found == [("ended", 1), ("ended", 1), ("ended", 1), ("failed", 5), ("failed", 5), ("failed", 5)]


def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path, run: Run) -> None:
    """What holds its output, too, and would otherwise speak for it."""
    script(
        tmp_path, "leaves.sh", """\
        sh -c 'echo $$ >> pids; exec sleep 1000' &
        sh -c 'echo $$ >> pids; exec sleep 1000' > /dev/null 2>&1 &
        while [ "$(wc -l < pids)" -lt 2 ]; do sleep 0.01; done
        """,
    )  # fmt: skip
    (tmp_path / "pids").touch()
    children = run({"path": "leaves.sh", "restart": "never"})
    until(lambda: state(children) == "ended", "it has ended", LONG_S)
    assert children.status()[0]["last"] == "ended with 0"
    found = pids(tmp_path / "pids", 2)
    until(lambda: not any(map(runs, found)), "so have they", LONG_S)


def test_the_end_is_asked_for_and_then_forced(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvcore.run")
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    script(tmp_path, "polite.sh", "trap 'echo good bye; exit 0' TERM\necho $$ >> pids\nwhile :; do sleep 0.05; done\n")
    script(tmp_path, "deaf.sh", "trap '' TERM\necho $$ >> pids\nwhile :; do sleep 0.05; done\n")
    children = run("polite.sh", "deaf.sh")
    found = pids(tmp_path / "pids", 2)
    children.stop()
    children.close()
    assert [(c["state"], c["last"]) for c in children.status()] == [
        ("ended", "ended with 0"),
        ("ended", "was killed by SIGKILL"),
    ]
    assert not any(map(runs, found))
    assert "[polite.sh] good bye" in caplog.text


def test_one_that_waits_for_all_its_children_has_none_of_ours(tmp_path: Path, run: Run) -> None:
    script(
        tmp_path, "waits.py", """\
        import os, sys
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            sys.exit(7)
        """,
    )  # fmt: skip
    children = run({"path": "waits.py", "restart": "never"})
    until(lambda: state(children) == "ended", "it has ended", LONG_S)
    assert children.status()[0]["last"] == "ended with 7"


def test_what_cannot_be_started_is_tried_again(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "fine.sh", "exec sleep 1000\n")
    (tmp_path / "gone").mkdir()
    moved = script(tmp_path / "gone", "moved.sh", "exec sleep 1000\n")
    moved.unlink()
    moved.parent.rmdir()
    children = run("gone/moved.sh", "fine.sh", pace=Pace(0.01, 0.01, 60, 1000))
    until(lambda: "cannot be started" in children.status()[0]["last"], "it could not be started", LONG_S)
    moved.parent.mkdir()
    script(tmp_path / "gone", "moved.sh", "exec sleep 1000\n")
    until(lambda: state(children) == state(children, 1) == "running", "both run", LONG_S)


def test_a_containers_first_process_keeps_no_zombies(tmp_path: Path) -> None:
    """It inherits what programs leave behind."""
    script(tmp_path, "ends.sh", "sleep 1000 &\nexit 1\n")
    code = f"""\
import ctypes, os, time
from pathlib import Path
from kvcore.cli import main
from kvcore.config import ScriptConfig
from kvcore.observe import Metrics
from kvcore.service.children import Children, Pace
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
children = Children([ScriptConfig(path={str(tmp_path / "ends.sh")!r})], Pace(0.01, 0.01, 60, 5))
children.start(dict(os.environ), Metrics())
while children.status()[0]["state"] != "failed":
    time.sleep(0.01)
children.close()
print(Path(f"/proc/self/task/{{os.getpid()}}/children").read_text().split())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_signals_without_a_name_and_the_metrics() -> None:
    assert module._ending(-40) == "was killed by signal 40"
    assert module._ending(-signal.SIGTERM) == "was killed by SIGTERM"
    assert {"helper_up", "helper_starts"} <= set(METRICS)


# -- output ------------------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", "kvcore.run")
    return caplog


def test_lines_however_they_arrive(said: pytest.LogCaptureFixture) -> None:
    output = Output("p", Clock())
    for part in (b"on", b"e\ntw", b"o\r\n\n", b"  three\n\x1b[31mred\x00\n", b"\xff\xc3\xa9\nla", b"st"):
        output.feed(part)
    assert said.messages == ["[p] one", "[p] two", "[p]   three", "[p] ?[31mred?", "[p] \ufffd\u00e9"]
    output.close()
    assert said.messages[-1] == "[p] last"


def test_a_line_without_end_is_cut(said: pytest.LogCaptureFixture) -> None:
    output = Output("p", Clock())
    for _ in range(100):
        output.feed(b"x" * 1000)
    assert len(output._line) <= MAX_LINE + 1
    output.feed(b"y\nnext\n")
    assert said.messages == [f"[p] {'x' * MAX_LINE} ...", "[p] next"]


def test_so_many_lines_a_second(said: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    output = Output("p", clock)
    output.feed(b"".join(b"%d\n" % i for i in range(1000)) + b"half")
    assert said.messages == [f"[p] {i}" for i in range(LINES_PER_S)]
    clock.now = 1.5
    output.feed(b" a line\n")
    assert said.messages[LINES_PER_S:] == [
        f"[p] {1000 - LINES_PER_S} lines more, which are not shown",
        "[p] half a line",
    ]
    output.feed(b"z\n" * 1000)
    output.close()
    assert said.messages[-1] == f"[p] {1000 - LINES_PER_S + 1} lines more, which are not shown"


def test_who_never_stops_is_told_of_ever_less_often(said: pytest.LogCaptureFixture) -> None:
    """And no line is lost from the count."""
    clock = Clock()
    output = Output("p", clock)
    for second in range(200):
        clock.now = float(second)
        output.feed(b"x\n" * 150)
    told = [m for m in said.messages if "lines more" in m]
    assert told == [f"[p] {50 * n} lines more, which are not shown" for n in (1, 2, 4, 8, 16, 32, 60, 60)]
    clock.now = 201.5
    output.feed(b"y\n")
    output.feed(b"x\n" * 150)
    clock.now = 203.0
    output.feed(b"z\n")
    clock.now = 204.5
    output.feed(b"z\n" * 101)
    output.close()
    assert [m for m in said.messages if "lines more" in m][len(told) :] == [
        f"[p] {n} lines more, which are not shown" for n in (50 * 17 + 51, 1)
    ]


def test_what_is_read_has_its_pace_however_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe seldom holds all that one read may take."""
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    reader, writer = os.pipe()
    try:
        for size in (8 << 10, 8 << 10, 1):
            os.write(writer, b"x" * size)
            assert module._read(reader, Output("p"))
        assert slept[:2] == [module.READ_EVERY_S / 8] * 2
        assert 0 < slept[2] < slept[1]
    finally:
        os.close(writer)
        os.close(reader)
