"""`kvcore record` and `kvcore replay`: what is recorded tells nothing of prompts, and can be simulated and replayed."""

import gzip
import io
import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import main
from kvcore.engine import Asked, CacheEngine, Space
from kvcore.service import open_engine
from kvcore.service.inspect import ask as told
from kvcore.service.inspect import caches, door
from kvcore.testing.chunks import hashes, put, spec
from kvcore.testing.servers.kvcore import KVCoreServer
from kvcore_bench.recording import EVERY_S, Followed, Recording, entrances
from kvcore_bench.simulate.trace import read_trace
from kvcore_bench.trace_file import TraceFile

pytestmark = pytest.mark.usefixtures("alone")
PATIENCE_S = 60.0


@pytest.fixture
def config(folder: Path) -> Path:
    path = folder / "kvcore.yaml"
    path.write_text("l1: {size: 8MiB}\nl2: []\nmin_object_size: 128KiB\nlookup_timeout: 20s\n")
    return path


@pytest.fixture
def engine(config: Path) -> Iterator[CacheEngine]:
    engine = open_engine(str(config), name="vllm")
    assert isinstance(engine, CacheEngine)
    yield engine
    engine.close()


def ask(engine: CacheEngine, space: Space, keys: list[bytes], first: int = 0, more: int = 5) -> None:
    asked = Asked(f"secret-id-{keys[:1]}", len(keys) * space.chunk_tokens + more, salt="ab12")
    lookup = engine.lookup(space, keys, first, asked=asked)
    assert lookup.wait(PATIENCE_S)
    engine.release(lookup)


def lines(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_what_is_recorded_is_what_lookups_have_in_common_and_no_more(
    engine: CacheEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = engine.register(spec())
    put(engine, space, hashes(2))
    ask(engine, space, hashes(4))
    ask(engine, space, [*hashes(2), *hashes(2, 100)])
    ask(engine, space, [], more=7)  # shorter than a chunk
    ask(engine, engine.register(spec("other weights")), hashes(4))
    out = folder / "trace.jsonl.gz"
    assert main(["record", str(out), "--past", "--seconds", "0"]) == 0
    assert f"{out}: 4 requests of 406 tokens, in blocks of 32, from vllm-{os.getpid()}" in capsys.readouterr().out
    first, second, short, other = (line["hash_ids"] for line in lines(out))
    assert first[:2] == second[:2]
    assert short == []
    assert len({*first, *second, *other}) == 4 + 2 + 4  # another model's are others
    times = [line["timestamp"] for line in lines(out)]
    assert times[0] == 0
    assert times == sorted(times)
    assert [line["input_length"] for line in lines(out)] == [133, 133, 7, 133]
    names = {"timestamp", "input_length", "hash_ids", "block_tokens", "token_bytes"}
    assert {name for line in lines(out) for name in line} == names
    text = gzip.decompress(out.read_bytes())
    for chunk_hash in hashes(4):
        value = int.from_bytes(chunk_hash[:7], "big")
        assert chunk_hash.hex()[:12].encode() not in text
        assert str(value).encode() not in text
    again = folder / "again.jsonl"
    assert main(["record", str(again), "--past", "--seconds", "0"]) == 0
    assert not {i for line in lines(again) for i in line["hash_ids"]} & {*first, *second, *other}  # another key
    capsys.readouterr()
    assert main(["record", str(again), "--seconds", "0"]) == 1
    assert f"{again} is there already" in capsys.readouterr().err


def test_a_recording_is_simulated_with_its_own_block_size(
    engine: CacheEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = engine.register(spec())
    for _ in range(3):
        ask(engine, space, hashes(4), more=0)
    out = folder / "trace.jsonl"
    assert main(["record", str(out), "--past", "--seconds", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["requests"], told["tokens"], told["block_tokens"], told["missed"]) == (3, 384, 32, 0)
    trace = read_trace(str(out))
    assert (trace.format, trace.block_tokens, trace.distinct, trace.unlike) == ("kvcore", 32, 4, 0)
    assert trace.token_bytes == sum(layout.nbytes for layout in space.groups) / 32
    assert main(["simulate", str(out), "--policy", "lru", "--capacity", "4blocks", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policies"][0]["results"][0]["hit_rate"] == pytest.approx(2 / 3)


def test_a_recording_goes_on_until_it_is_told_to_end(engine: CacheEngine, folder: Path) -> None:
    space = engine.register(spec())
    ask(engine, space, hashes(1))  # before it began
    out = folder / "trace.jsonl.gz"
    command = [sys.executable, "-m", "kvcore", "record", str(out), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            give_up = time.monotonic() + PATIENCE_S
            while not out.exists():
                assert time.monotonic() < give_up
                time.sleep(0.02)
            time.sleep(0.3)
            for i in range(5):
                ask(engine, space, hashes(2, i))
            process.send_signal(signal.SIGINT)
            said = json.loads(process.communicate(timeout=PATIENCE_S)[0])
            assert process.returncode == 0
        finally:
            process.kill()
    assert (said["requests"], said["missed"]) == (5, 0)
    assert len(lines(out)) == 5
    assert said["seconds"] < EVERY_S * PATIENCE_S


def test_what_the_cache_forgot_before_it_was_read_is_counted(config: Path) -> None:
    engine = open_engine(str(config), flags={"inspect.requests": 4}, name="small")
    assert isinstance(engine, CacheEngine)
    space = engine.register(spec())
    ask(engine, space, hashes(1))
    (cache,) = caches()
    followed = Followed(cache, "engine", past=False)
    for i in range(10):
        ask(engine, space, hashes(2, i))
    assert [len(r["hashes"]) for r in followed.read()] == [2, 2, 2, 2]
    assert followed.missed == 6
    assert followed.read() == []
    engine.close()
    assert followed.read() == []
    assert "was closed" in followed.gone


def test_a_servers_recording_has_the_fronts_that_its_engines_held_themselves() -> None:
    out = io.StringIO()
    recording = Recording(out)

    def request(keys: list[bytes], begin: int = 0, chunk_tokens: int = 32) -> dict[str, Any]:
        shown = [k.hex() for k in keys]
        return {"namespace": "00" * 16, "hashes": shown, "begin": begin, "chunk_tokens": chunk_tokens, "tokens": 0}

    recording.add(request(hashes(4)), 10.0, headed=False)
    recording.add(request(hashes(3, 3), begin=3), 11.0, headed=False)  # chunks 3 to 5
    recording.add(request([], begin=3), 12.0, headed=False)
    recording.add(request(hashes(1, 50), begin=2), 13.0, headed=False)
    recording.add(request(hashes(1), chunk_tokens=64), 14.0)
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert second["hash_ids"][:4] == first["hash_ids"]
    assert len(set(second["hash_ids"])) == 6
    assert (second["timestamp"], second["input_length"]) == (1000, 192)
    assert (recording.requests, recording.headless, recording.other_size) == (2, 2, 1)


def test_requests_are_recorded_where_they_come_in_and_replayed_through_a_server(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = folder / "in.jsonl"
    requests = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [5]]
    written = ({"timestamp": 10 * i, "input_length": 16 * len(r), "hash_ids": r} for i, r in enumerate(requests))
    trace.write_text("".join(json.dumps(line) + "\n" for line in written))
    config: dict[str, Any] = {"l1": {"size": "8MiB"}, "l2": [], "lookup_timeout": "20s"}
    out = folder / "out.jsonl"
    with KVCoreServer(folder, {**config, "server": f"unix://{folder}/s.sock"}, name="s") as server:
        client = open_engine(str(server.config), name="client")
        shown = {c.name: kind for c, kind in entrances(caches(), all_of_them=False)}
        assert shown == {"client": "client"}
        client.close()
        command = ["replay", str(trace), "--config", str(server.config), "--bytes-per-token", "1KiB", "--json"]
        command += ["--block-tokens", "16", "--set", "server.timeout=20s"]
        assert main(command) == 0
        told = json.loads(capsys.readouterr().out)
        assert main(["record", str(out), "--past", "--seconds", "0"]) == 0  # the server's own record
    assert (told["requests"], told["tokens"], told["wrong"], told["stored"]) == (4, 160, 0, 5)
    assert told["hit_rate"] == pytest.approx(5 / 10)
    assert told["hit_rate_by_place"] == {"l1": pytest.approx(5 / 10)}
    assert told["misses"] == {"absent": 5}
    assert told["copied_out"]["bytes"] == 5 * 16 << 10
    assert 0 < told["lookup_seconds"]["p50"] <= told["lookup_seconds"]["max"]
    assert told["seconds"] >= 0.03
    first, second, third, fourth = (line["hash_ids"] for line in lines(out))
    assert (first, first[:2]) == (third, second[:2])
    assert len({*first, *second, *fourth}) == 5


def test_a_replay_is_cold_unless_it_goes_on_with_an_earlier_one(
    folder: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = folder / "in.jsonl"
    trace.write_text("".join(f'{{"input_length": 1024, "hash_ids": [{i}, {i + 1}]}}\n' for i in (0, 10)))
    config.write_text(f"l1: {{size: 8MiB}}\nl2: [{{storage: {{plugin: disk, path: {folder}/disk}}}}]\n")
    command = ["replay", str(trace), "--config", str(config), "--bytes-per-token", "64B", "--speed", "max", "--json"]
    rates = []
    for more in ([], [], ["--name", "one"], ["--name", "one"]):
        assert main([*command, *more]) == 0
        told = json.loads(capsys.readouterr().out)
        rates.append((told["hit_rate"], told["hit_rate_by_place"], told["waiting"]))
    assert rates == [(0.0, {}, 0)] * 3 + [(1.0, {"disk": 1.0}, 0)]
    assert main(command[:-1]) == 0
    text = capsys.readouterr().out
    assert re.search(r"in\.jsonl: 2 requests of 2,048 tokens in [\d.]+ s, as fast as it goes", text)
    (namespace,) = [line.split()[1].strip(":") for line in text.splitlines() if line.startswith("namespace")]
    assert main(["store", "rm", "--config", str(config), "--namespace", namespace[:8]]) == 0


def test_a_recording_of_nothing_leaves_nothing(
    engine: CacheEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["record", str(folder / "t.jsonl.gz"), "--seconds", "0"]) == 1
        told = capsys.readouterr()
        assert "nothing was recorded, and there is no trace" in told.err
        assert told.out == ""
        assert not (folder / "t.jsonl.gz").exists()


def test_a_recorded_trace_says_how_large_its_kv_is(
    folder: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = folder / "in.jsonl"
    line: dict[str, Any] = {"input_length": 32, "hash_ids": [1, 2], "block_tokens": 16}
    command = ["replay", str(trace), "--config", str(config), "--speed", "max", "--json"]
    trace.write_text(json.dumps(line) + "\n")
    assert main(command) == 1
    assert "in.jsonl does not say how large the KV of a token is: --bytes-per-token" in capsys.readouterr().err
    trace.write_text(json.dumps({**line, "token_bytes": 1024}) + "\n")
    for more, size in (([], 1024), (["--bytes-per-token", "2KiB"], 2048)):
        assert main([*command, *more]) == 0
        assert json.loads(capsys.readouterr().out)["bytes_per_token"] == size
    assert main(["simulate", str(trace), "--policy", "lru", "--capacity", "32KiB", "--json"]) == 0
    (capacity,) = json.loads(capsys.readouterr().out)["capacities"]
    assert capacity["blocks"] == 2


def test_a_replay_that_would_never_end_is_refused(
    folder: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = folder / "in.jsonl"
    line = '{{"timestamp": {}, "input_length": 512, "hash_ids": [1]}}\n'
    trace.write_text(line.format(0) + line.format("1e300"))
    assert main(["replay", str(trace), "--config", str(config), "--bytes-per-token", "64B"]) == 1
    assert "days so: a higher --speed, or `max`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--speed", "0"], "'0' is no speed: a number above 0"),
        (["--speed", "fast"], "or `max`"),
        (["--bytes-per-token", "1"], "'1' is not a size"),
        (["--requests", "0"], "'0' is not a number of at least 1"),
        ([], "none.jsonl"),
    ],
    ids=["no-speed", "word", "bare", "none", "no-file"],
)
def test_wrong_options_of_a_replay(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "none.jsonl", "--bytes-per-token", "1KiB", *options]) in (1, 2)
    assert said in capsys.readouterr().err


def test_the_last_requests_of_a_cache_that_closes_are_recorded(config: Path, folder: Path) -> None:
    engine = open_engine(str(config), name="ends")
    assert isinstance(engine, CacheEngine)
    space = engine.register(spec())
    out = folder / "trace.jsonl"
    command = [sys.executable, "-m", "kvcore", "record", str(out), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            give_up = time.monotonic() + PATIENCE_S
            while not (out.exists() and out.read_text()):  # then it has just read, and will in a second again
                assert time.monotonic() < give_up
                ask(engine, space, hashes(1))
                time.sleep(0.05)
            ask(engine, space, hashes(7))
            engine.close()
            said = json.loads(process.communicate(timeout=PATIENCE_S)[0])
        finally:
            process.kill()
            engine.close()
    assert len(lines(out)[-1]["hash_ids"]) == 7
    assert said["missed"] == 0


ONE = """
import sys
from kvcore.engine import Asked
from kvcore.service import open_engine
from kvcore.testing.chunks import hashes, spec
engine = open_engine(sys.argv[1], name="stopped")
space = engine.register(spec())
print(flush=True)
for line in sys.stdin:
    lookup = engine.lookup(space, hashes(int(line)), asked=Asked("r", 1))
    lookup.wait(20)
    engine.release(lookup)
"""


def test_one_that_is_stopped_holds_up_nobody_and_is_recorded_on_when_it_runs(
    engine: CacheEngine, config: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcore.service.inspect.ask", lambda cache, path: told(cache, path, timeout_s=0.5))
    space = engine.register(spec())
    out = folder / "trace.jsonl"

    def lengths() -> list[int]:
        return [len(line["hash_ids"]) for line in lines(out)] if out.exists() else []

    def until_recorded(asked: Callable[[], object], length: int) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while length not in lengths():
            assert time.monotonic() < give_up
            asked()
            time.sleep(0.1)

    command = [sys.executable, "-c", ONE, str(config)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # it is open

        def happens() -> None:
            try:
                until_recorded(lambda: process.stdin.write("1\n"), 1)
                process.send_signal(signal.SIGSTOP)
                until_recorded(lambda: ask(engine, space, hashes(2)), 2)
                ask(engine, space, hashes(3))
                until_recorded(lambda: None, 3)
                process.send_signal(signal.SIGCONT)
                until_recorded(lambda: process.stdin.write("4\n"), 4)
            finally:
                os.kill(os.getpid(), signal.SIGINT)

        with ThreadPoolExecutor() as pool:
            try:
                happened = pool.submit(happens)
                assert main(["record", str(out)]) == 0
                happened.result()
            finally:
                process.kill()
    err = capsys.readouterr().err
    assert re.search(rf"stopped-{process.pid} did not answer for \d+ s: what it still had of that time is", err)
    assert "were forgotten" not in err
    assert "is not recorded" not in err


def test_a_cache_that_nobody_records_closes_without_waiting(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "LAST_S", 10 * PATIENCE_S)
    engine = open_engine(str(config), name="ends")
    (cache,) = caches()
    told(cache, "/requests?hashes=1")
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < 5 * PATIENCE_S


@pytest.fixture
def room() -> Iterator[Callable[[int], None]]:
    """Files may be no longer, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_on_a_full_disk_no_half_line_is_left(folder: Path, name: str, room: Callable[[int], None]) -> None:
    path = folder / name
    file = TraceFile(str(path))
    for n in range(3):
        file.write(f'{{"n": {n}}}\n')
    file.flush()
    file.write("".join(f'{{"x": "{secrets.token_hex()}"}}\n' for _ in range(100)))
    room(path.stat().st_size + 1000)
    with pytest.raises(OSError, match="File too large: the trace ends with the 3 requests before") as fault:
        file.flush()
    file.close()
    assert fault.value.filename == str(path)
    assert lines(path) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_full_disk_is_told_with_the_file(
    engine: CacheEngine, folder: Path, capsys: pytest.CaptureFixture[str], room: Callable[[int], None]
) -> None:
    ask(engine, engine.register(spec()), hashes(7))
    out = folder / "t.jsonl"
    room(50)
    assert main(["record", str(out), "--past", "--seconds", "0"]) == 1
    assert capsys.readouterr().err == f"kvcore: {out}: File too large\n"
    assert not out.exists()
