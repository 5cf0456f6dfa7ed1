"""The engines' command lines of docs/server.md, docs/routing.md, docs/from-lmcache.md, docs/operations.md and
docs/bench-engine.md, run as they stand there, in real vLLM."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_lines import Engine

from docs_blocks import blocks, lines
from kvcore.cli import main
from kvcore.cli.child import Outcome
from kvcore.testing.servers import free_port
from kvcore.testing.servers.process import Server
from kvcore.testing.servers.redis import RedisServer
from warm import Warm

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

CHUNKS = 4
WAIT_S = 120.0


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the lines are typed; short, for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="kv") as short:
        monkeypatch.setenv("KVCORE_RUN_DIR", f"{short}/run")
        monkeypatch.chdir(short)
        yield Path(short)


def prompt(seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 1000) for _ in range(128 * CHUNKS + 50)]


def until(what: str, done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up, what
        time.sleep(0.05)


def metric(port: int, name: str) -> float:
    """The sum of a metric's lines."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", answer.read().decode(), re.M)
    return sum(map(float, found))


def hits(engine: Engine) -> float:
    """What the engine has told so far: it tells with a step."""
    engine.complete([5, 6, 7])
    return metric(engine.port, "vllm:kvcore_hit_tokens_total")


def written(disk: Path) -> int:
    return sum(f.is_file() and f.stat().st_size > 16 << 10 for f in disk.rglob("*"))


def shell(line: str, **env: str) -> str:
    """What a line prints, typed into a shell."""
    done = subprocess.run(
        ["sh", "-c", line], env={**os.environ, **env}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_two_engines_over_a_server(warm: Warm, models: Path, folder: Path) -> None:
    """docs/server.md: one file, one server, two engines of which one reuses what the other has computed."""
    page = "docs/server.md"
    given = next(block.text for block in blocks(page) if block.language == "yaml")
    values = yaml.safe_load(given.replace("/run/kvcore", str(folder)).replace("8GiB", "64MiB"))
    metrics_port = free_port()
    values |= {"metrics_port": metrics_port, "chunk_tokens": 128, "lookup_timeout": "20s"}
    (folder / "kvcore.yaml").write_text(yaml.safe_dump(values))
    (serve,) = lines(page, "kvcore serve")
    started = lines(page, "kvcore run vllm")
    assert [re.findall(r"--port (\d+)", line) for line in started] == [["8000"], ["8001"]]
    command = [sys.executable, "-m", *shlex.split(serve)]
    ready = (folder / "kvcore.sock").is_socket
    with Server("kvcore", command, ready=ready, folder=folder), ExitStack() as stack:
        a, b = (stack.enter_context(Engine(warm, line, models / "tiny", folder)) for line in started)
        text, cached = a.ready().complete(prompt(1))
        assert cached == 0
        until("the server has nothing", lambda: metric(metrics_port, "kvcore_l1_objects") >= CHUNKS)
        assert b.ready().complete(prompt(1)) == (text, 128 * CHUNKS)
        (curl,) = lines(page, "curl")
        answer = json.loads(shell(curl.replace("127.0.0.1:8000", f"127.0.0.1:{a.port}")))
        assert answer["choices"][0]["text"]
        assert metric(a.port, "vllm:kvcore_refused_tenants_total") == 0


def test_engines_that_tell_what_they_hold(warm: Warm, models: Path, folder: Path) -> None:
    """docs/routing.md: both lines, and a reader of their streams. What docs/operations.md and docs/bench-engine.md ask
    of engines that run already is asked of these two."""
    import zmq

    (folder / "kvcore.yaml").write_text("{l1: {size: 64MiB}, l2: [], chunk_tokens: 128, lookup_timeout: 20s}")
    started = lines("docs/routing.md", "vllm serve")
    assert len(started) == 2
    context = zmq.Context()
    with ExitStack() as stack:
        stack.callback(context.destroy, 0)
        engines, streams = [], []
        for line in started:
            ports = {f"tcp://*:{old}": f"tcp://*:{free_port()}" for old in re.findall(r"tcp://\*:(\d+)", line)}
            assert len(ports) == 2
            engine = Engine(warm, line, models / "tiny", folder, changed=ports, KVCORE_CONFIG="kvcore.yaml")
            engines.append(stack.enter_context(engine))
            stream = context.socket(zmq.SUB)
            stream.connect(next(iter(ports.values())).replace("*", "127.0.0.1"))
            (topic,) = re.findall(r'"topic": "(.*?)"', line)
            stream.subscribe(topic)
            streams.append((stream, topic))
        for number, (engine, (stream, topic)) in enumerate(zip(engines, streams, strict=True)):
            engine.ready()
            told, seed = b"", 100 * number
            give_up = time.monotonic() + WAIT_S
            while b"CPU" not in told:  # a reader that has just come has missed what was told before
                assert time.monotonic() < give_up, told
                seed += 1
                engine.complete(prompt(seed))
                while stream.poll(500):
                    named, _, payload = stream.recv_multipart()
                    assert named == topic.encode()
                    told += payload
            assert b"BlockStored" in told
        (metrics,) = lines("docs/operations.md", "curl")
        a, b = (engine.port for engine in engines)
        assert "vllm:kvcore_save_bytes_total{" in shell(metrics.replace("127.0.0.1:8000", f"127.0.0.1:{a}"))
        chat, shared = (line for line in lines("docs/bench-engine.md", "kvcore bench engine") if "--url" in line)
        small = " --users 1 --turns 2 --system 40 --history 200 --question 20 --output 4 --qps 9 --json"
        bench_engine(chat.replace("127.0.0.1:8000", f"127.0.0.1:{a}") + small, 1)
        small = " --prefixes 1 --requests 2 --length 300 --question 30 --output 4 --inflight 1 --json"
        bench_engine(shared.replace("a:8000", f"127.0.0.1:{a}").replace("b:8000", f"127.0.0.1:{b}") + small, 2)


def bench_engine(line: str, count: int) -> None:
    """The line, and that it has measured so many engines."""
    found = json.loads(shell(line.replace("kvcore", f"{shlex.quote(sys.executable)} -m kvcore", 1)))
    assert len(found["subjects"]) == count
    for subject in found["subjects"]:
        assert subject["all"]["output_tokens"] > 0
        assert subject["phases"]["again"]["reused_tokens"] > 0


def test_from_lmcache(
    warm: Warm, models: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/from-lmcache.md, its steps two and three, with the file that step one has made: checked, looked through by
    the doctor; an engine computes, and one that is started by the other line finds it again."""
    page = "docs/from-lmcache.md"
    _, made = (block.text for block in blocks(page) if block.language == "yaml")
    redis = RedisServer(folder, password="hunter2")
    monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
    for old, new in (
        ("20GiB", "64MiB"), ("500GiB", "1GiB"), ("/mnt/nvme/lmcache/", f"{folder}/disk"),
        ("redis://cache:6379", f"redis://127.0.0.1:{redis.port}"),
    ):  # fmt: skip
        assert old in made
        made = made.replace(old, new)
    values: dict[str, Any] = yaml.safe_load(made)
    for tier in values["l2"]:
        tier["read"] = "always"  # a model this small is often computed sooner than a busy machine reads
    (folder / "kvcore.yaml").write_text(yaml.safe_dump({**values, "lookup_timeout": "20s"}))
    first, again = lines(page, "kvcore run vllm")
    with redis:
        (check,), (doctor,) = lines(page, "kvcore config check"), lines(page, "kvcore doctor")
        assert main(shlex.split(check)[1:]) == 0
        capsys.readouterr()
        # What it says of the machine is the machine's, and takes seconds: test_docs_commands.py.
        monkeypatch.setattr(
            "kvcore.cli.doctor.command.call", lambda *words, timeout_s: Outcome(False, "not looked at", 0.0)
        )
        main([*shlex.split(doctor)[1:], "--json"])
        said = {f["subject"]: f["level"] for f in json.loads(capsys.readouterr().out)["findings"]}
        assert {said["tier disk"], said["tier redis"]} <= {"ok", "warning"}
        with Engine(warm, first, models / "tiny", folder, REDIS_PASSWORD="hunter2") as engine:
            text, cached = engine.ready().complete(prompt(2))
            assert cached == 0
            until("it is not on the disk", lambda: written(folder / "disk") == CHUNKS // 2)
        with Engine(warm, again, models / "tiny", folder, REDIS_PASSWORD="hunter2") as engine:
            assert engine.ready().complete(prompt(2)) == (text, 256 * (CHUNKS // 2))
            until("no hit is counted", lambda: hits(engine) == 256 * (CHUNKS // 2))
