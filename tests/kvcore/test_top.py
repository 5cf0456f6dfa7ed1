"""`kvcore top`: what it shows of real caches, and how it leaves a terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from terminal import read_until

from kvcore.cli import main
from kvcore.cli.top import show
from kvcore.cli.top.sample import Figures, Sample, Watch, figures
from kvcore.engine import CacheEngine
from kvcore.observe.decisions import tenant_shown
from kvcore.service import open_engine
from kvcore.service.inspect import Cache
from kvcore.testing.chunks import contents, hashes, put, spec
from kvcore.testing.servers.kvcore import KVCoreServer

pytestmark = pytest.mark.usefixtures("alone")
PATIENCE_S = 60.0


@pytest.fixture
def engine(folder: Path) -> Iterator[CacheEngine]:
    """An engine for which alice and somebody have asked."""
    path = folder / "kvcore.yaml"
    path.write_text(
        "l1: {size: 8MiB}\nl2: [{storage: {plugin: memory, capacity: 64MiB}}]\nmin_object_size: 128KiB\n"
        "lookup_timeout: 20s\ntenants: {alice: {l1: 4MiB}}\n"
    )
    engine = open_engine(str(path), name="vllm")
    assert isinstance(engine, CacheEngine)
    for tenant in ("alice", ""):
        space = engine.register(spec(), tenant)
        put(engine, space, hashes(4))
        contents(engine, space, hashes(8))
        contents(engine, space, hashes(6))
    yield engine
    engine.close()


def test_one_look_tells_of_everything(engine: CacheEngine, capsys: pytest.CaptureFixture[str]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    text = ""
    while not re.search(r"alice .* KiB", text):  # what tenants hold is brought up to date once a second
        assert time.monotonic() < give_up, text
        assert main(["top", "--once"]) == 0
        text = capsys.readouterr().out
    assert re.match(rf"vllm-{os.getpid()}  engine  \d+s  kvcore ", text)
    assert re.search(r"in all +57\.1% +4 .* absent 12", text)  # 16 of 28
    assert "  the last 4 requests: 0.0% held by the engine, 57.1% found here, 42.9% computed" in text
    assert re.search(r"l1 +57\.1%  \[#+\.+\] 1(\.\d+)? MiB of 8 MiB .* 8, 0 leased", text)
    assert re.search(r"memory +open +0\.0%  \[\.+\] 1(\.\d+)? MiB of 64 MiB .* 8$", text, re.M)
    narrow = show.screen([[show.Text(line) for line in text.splitlines()]], 80, 50)
    assert any(line.text.count(" of 8 MiB ") for line in narrow), "what is full is seen on a small terminal, too"
    assert any("42.9% computed" in line.text for line in narrow)
    assert re.search(r"alice +2 +57\.1% +256  l1 \d+(\.\d+)? KiB", text)
    assert re.search(r"\(none\) +2 +57\.1% +256", text)
    rows = re.findall(r"^  [0-9a-f]{12} +(\d+) +(\d+) +(\d+)% +\d+s  (yes|no) +m(, alice)?$", text, re.M)
    # what both requests of each have in common, whole or not: six chunks, of which four are in L1
    assert sorted(rows) == [("192", "2", "67", "no", ""), ("192", "2", "67", "no", ", alice")]

    assert "pinned" not in text
    space = engine.register(spec(), "alice")
    assert engine.pin(space, hashes(2), 60) == 2
    assert main(["top", "--once"]) == 0
    assert re.search(r"l1 .* 8, 0 leased, 2 pinned$", capsys.readouterr().out, re.M)


def test_as_json(engine: CacheEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--json", "--cache", "vllm"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["caches"]
    assert (found["cache"], found["fault"]) == (f"vllm-{os.getpid()}", "")
    assert found["total"]["hits"] == {"l1": 16}
    assert found["total"]["misses"] == {"absent": 12}
    assert found["total"]["hit_rate"] == pytest.approx(16 / 28)
    assert found["status"]["l1"]["objects"] == 8
    assert found["hot"]["requests"] == 4


def test_a_server_over_http_with_and_without_its_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token = "correct horse battery"
    http = {"listen": "127.0.0.1:0", "token": token}
    config: dict[str, Any] = {"l1": {"size": "8MiB"}, "l2": [], "min_object_size": "128KiB"}
    config["server"] = {"url": f"unix://{folder}/s.sock", "http": http}
    with KVCoreServer(folder, config, name="s"):
        monkeypatch.setenv("KVCORE_RUN_DIR", str(folder / "run"))
        assert main(["top", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["caches"]
        assert found["status"]["kind"] == "server"
        log = (folder / "s.log").read_text()
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+(?!\S*/metrics)", log.split("HTTP is served on")[1])[:1]
        monkeypatch.setenv("KVCORE_RUN_DIR", str(folder / "nowhere"))
        assert main(["top", "--once", "--url", url]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{url}  server unix://")
        assert "it needs the server's token: set KVCORE_SERVER__HTTP__TOKEN" in text
        monkeypatch.setenv("KVCORE_SERVER__HTTP__TOKEN", token)
        assert main(["top", "--json", "--url", url]) == 0
        (found,) = json.loads(capsys.readouterr().out)["caches"]
        assert (found["fault"], found["hot"]["requests"]) == ("", 0)
    assert main(["top", "--once", "--url", url]) == 1
    assert "is gone: Connection refused" in capsys.readouterr().out


def test_without_a_cache_it_says_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "open").mkdir(mode=0o755)
    for run, why in (("none", "is not there"), ("open", "is open to other users: chmod 700")):
        monkeypatch.setenv("KVCORE_RUN_DIR", str(folder / run))
        assert main(["top"]) == 1
        told = capsys.readouterr().err
        assert "no cache of this user is open on this machine: start an engine with kvcore" in told
        assert f"{folder / run}" in told
        assert why in told
    assert main(["top", "--interval", "1ms"]) == 2
    assert "1ms is too short: at least 200ms" in capsys.readouterr().err


def test_live_it_follows_and_gives_the_terminal_back(engine: CacheEngine) -> None:
    space = engine.register(spec(), "bob")
    main_end, other_end = pty.openpty()
    command = [sys.executable, "-m", "kvcore", "top", "--interval", "200ms"]
    environment = {**os.environ, "COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
    with subprocess.Popen(command, stdin=other_end, stdout=other_end, stderr=other_end, env=environment) as process:
        os.close(other_end)
        try:
            shown = read_until(main_end, lambda text: "q ends it" in text and f"vllm-{os.getpid()}" in text)
            assert shown.startswith("\x1b[?1049h\x1b[?25l")
            assert "bob" not in shown
            contents(engine, space, hashes(3))
            read_until(main_end, lambda text: re.search(rf"{tenant_shown('bob', ())} +1 +0\.0%", text))
            os.write(main_end, b"q")
            assert process.wait(PATIENCE_S) == 0
            assert read_until(main_end, lambda text: "\x1b[?25h\x1b[?1049l" in text)
        finally:
            process.kill()
            os.close(main_end)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_a_signal_ends_it_and_the_terminal_is_given_back(engine: CacheEngine, number: int, status: int) -> None:
    main_end, other_end = pty.openpty()
    command = [sys.executable, "-m", "kvcore", "top"]
    with subprocess.Popen(command, stdin=other_end, stdout=other_end, stderr=other_end) as process:
        os.close(other_end)
        try:
            read_until(main_end, lambda text: "HIT RATE" in text)
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == status
            assert read_until(main_end, lambda text: text.endswith("\x1b[?25h\x1b[?1049l"))
        finally:
            process.kill()
            os.close(main_end)


def test_figures_are_differences() -> None:
    before = {"lookups": 10.0, "lookup_chunks": 100.0, "hit_chunks/l1": 50.0, "tier_bytes/disk/load": 1000.0}
    now = {
        "lookups": 14.0, "lookup_seconds": 0.2, "lookup_chunks": 120.0, "hit_chunks/l1": 60.0, "hit_chunks/disk": 5.0,
        "miss_chunks/absent": 5.0, "tier_bytes/disk/load": 5000.0, "tier_seconds/disk/load": 0.5,
        "tier_operations/disk/load/ok": 5.0, "tier_operations/disk/load/missing": 1.0,
        "tier_operations/disk/load/corrupt": 2.0, "saved_prefill_seconds/l1": 1.5,
    }  # fmt: skip
    found = figures(now, before, 2.0)
    assert (found.lookups, found.asked, found.hits, found.misses) == (4, 20, {"l1": 10, "disk": 5}, {"absent": 5})
    assert found.hit_rate == 0.75
    assert found.tiers == {"disk": {"load_bytes": 4000.0, "load_seconds": 0.5, "faults": 2.0}}
    assert found.saved_seconds == 1.5
    assert Figures(1.0).hit_rate is None


def test_what_is_down_is_shown_with_its_cause_and_nothing_moves_the_cursor() -> None:
    tier = {
        "name": "redis", "state": "down", "cause": "refused\x1b[2J\nagain", "queue_bytes": 2048, "usage": None,
    }  # fmt: skip
    status = {
        "version": "1", "kind": "engine", "address": "", "uptime_s": 90061.0, "connected": None, "l1": None,
        "tiers": [tier],
    }  # fmt: skip
    watch = Watch(Cache("x", 1, "/x-1.sock"))
    lines = show.screen([show.cache(watch, Sample("x-1", status, Figures(0.0), None))], 60, 50)
    assert all(line.text.isprintable() and len(line.text) <= 60 for line in lines)
    assert lines[0].text == "x-1  engine  1d1h  kvcore 1"
    (row,) = [line for line in lines if line.text.startswith("  redis")]
    assert row.colour == "error"
    (wide,) = [x for x in show.cache(watch, Sample("x-1", status, Figures(0.0), None)) if x.text.startswith("  redis")]
    assert re.search(r"redis +down +- +- +- +2 KiB +-$", wide.text.rstrip())
    assert any("refused?[2J?again" in line.text for line in lines)
    strange = show.cache(watch, Sample("x-1", {"version": "0.0.1"}, Figures(0.0), None))
    assert strange[1].text.strip().startswith("its answers are not understood: it is kvcore 0.0.1, this is kvcore")
    gone = show.cache(watch, Sample("x-1", None, None, None, "x-1 is gone"))
    assert [line.text for line in gone] == ["x-1", "  x-1 is gone"]
    cut = show.screen([[show.Text("a")] * 10], 60, 4)
    assert [line.text for line in cut] == ["a", "a", "a", "... 7 more lines: a taller terminal shows them"]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (999.6, "1k"), (1234, "1.23k"), (5e7, "50M"), (3e12, "3e+03G")]
)
def test_counts_are_short(number: float, text: str) -> None:
    assert show.count(number) == text
