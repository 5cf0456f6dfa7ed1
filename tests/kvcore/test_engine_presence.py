"""What an open cache shows: its metrics on a port, its opening and closing to observers; and what a fork has of it."""

import importlib
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from test_engine import BLOCK, hashes, opened, put, spec

from kvcore.engine import CacheEngine, GroupSpec, LocalStore
from kvcore.service import open_store
from kvcore.testing import dist

OBSERVER = """
from kvcore.api import hookimpl
seen = []
@hookimpl
def kvcore_opened(name): seen.append(("opened", name))
@hookimpl
def kvcore_closed(name): seen.append(("closed", name))
@hookimpl
def kvcore_stored(events): seen.extend(("stored", e.tier, e.nbytes, e.reason) for e in events)
@hookimpl
def kvcore_loaded(events): seen.extend(("loaded", e.tier, e.nbytes, e.reason) for e in events)
@hookimpl
def kvcore_failed(events): seen.extend(("failed", e.tier, e.nbytes, e.reason) for e in events)
"""


@pytest.fixture
def observed(site: Path) -> list[tuple[object, ...]]:
    """What a hooks plugin `watch` hears."""
    dist(site, "kvcore-watch", {"kvcore.hooks": {"watch": "fake_watch"}}, {"fake_watch": OBSERVER})
    seen: list[tuple[object, ...]] = importlib.import_module("fake_watch").seen
    return seen


def scraped(text: str) -> dict[str, str]:
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def scrape(port: int) -> dict[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return scraped(answer.read().decode())


def port_of(cache: CacheEngine | LocalStore) -> int:
    port: int = cache._presence._server.server_port
    return port


def test_object_store_tells_observers_and_serves_its_metrics(
    tmp_path: Path, observed: list[tuple[object, ...]]
) -> None:
    path = tmp_path / "kvcore.yaml"
    path.write_text("hooks: [watch]\nmetrics_port: 0\nl2: [{storage: {plugin: memory, capacity: 140KiB}}]\n")
    store = open_store(str(path), name="mine")
    wide = store.register(spec(), "test/1")
    narrow = store.register(spec(GroupSpec(("a",), (BLOCK,))), "test/1")
    big, small, absent = hashes(3)
    room = [[memoryview(bytearray(BLOCK))] for _ in range(2)]
    both = [[memoryview(bytearray(BLOCK)), memoryview(bytearray(BLOCK))]]
    assert store.store(narrow, [small], room[:1]) == [True]
    assert store.load(narrow, [small, absent], room) == [True, False]
    store.delete(narrow, [small])
    assert store.store(wide, [big], both) == [True]
    values = scrape(port_of(store))
    assert values['kvcore_tier_operations_total{op="load",outcome="missing",tier="memory"}'] == "1.0"
    port = port_of(store)
    store.close()
    store.close()
    assert observed == [
        ("opened", "mine"),
        ("stored", "memory", BLOCK, ""),
        ("loaded", "memory", BLOCK, ""),
        ("stored", "memory", 2 * BLOCK, ""),
        ("closed", "mine"),
    ]
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    assert store.exists(narrow, [small]) == store.load(narrow, [small], room[:1]) == [False]
    assert store.store(narrow, [small], room[:1]) == [False]
    store.delete(narrow, [small])


def test_a_cache_engine_closes_once_and_serves_fresh_gauges(tmp_path: Path, observed: list[tuple[object, ...]]) -> None:
    engine = opened(tmp_path, "hooks: [watch]\nmetrics_port: 0\n")
    space = engine.register(spec())
    put(engine, space, hashes(3))
    values = scrape(port_of(engine))
    assert values["kvcore_l1_objects"] == "3.0"
    assert not [name for name in values if "_created" in name]
    put(engine, space, hashes(2, "more"))
    assert scrape(port_of(engine))["kvcore_l1_objects"] == "5.0"
    engine.close()
    engine.close()
    assert observed[0] == ("opened", "kvcore")
    assert [event for event in observed if event[0] == "closed"] == [("closed", "kvcore")]


def test_metrics_that_nobody_asks_for_wake_nothing(tmp_path: Path) -> None:
    engine = opened(tmp_path, "metrics_port: 0\n")
    scrape(port_of(engine))
    (thread,) = [t for t in threading.enumerate() if t.name == "kvcore-metrics"]
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def wakes() -> list[str]:
        return re.findall(r"^voluntary_ctxt_switches:\t(\d+)$", status.read_text(), re.M)

    give_up = time.monotonic() + 60
    before: list[str] = []
    while before != wakes():  # until it has gone to sleep after that answer
        assert time.monotonic() < give_up, "it does not sleep"
        before = wakes()
        time.sleep(1.2)
    engine.close()
    thread.join(60)
    assert not thread.is_alive()


FORKED = """
import os, sys, threading, time
from test_engine import hashes, opened, put, spec
from test_engine_presence import port_of, scrape
from kvcore.api import LeaseError
from kvcore.service import open_store
from pathlib import Path

folder = Path(sys.argv[1])
tiers = f"l2: [{{storage: memory}}, {{storage: {{plugin: disk, path: {folder}/disk}}}}]"
engine = opened(folder, f"metrics_port: 0\\n{tiers}\\n")
space = engine.register(spec())
put(engine, space, hashes(4))
before = engine.lookup(space, hashes(4))
assert before.poll() == 4
(folder / "store.yaml").write_text("l2: [{storage: memory}]")
store = open_store(str(folder / "store.yaml"))
lent = store.register(spec(), "test/1")
keys = hashes(1)
room = [[memoryview(bytearray(lent.layouts[0].nbytes))]]
assert store.store(lent, keys, room) == [True]

engine.l1._lock.acquire()  # as another thread may hold it at that moment
child = os.fork()
if child == 0:
    begun = time.monotonic()
    try:
        lookup = engine.lookup(space, hashes(4))
        assert lookup.wait(0) and lookup.poll() == 0
        engine.release(lookup)
        assert before.poll() == 0
        engine.release(before)
        try:
            engine.retrieve(before, 0, [[0]])
            raise AssertionError("a plan in a fork")
        except LeaseError:
            pass
        plan = engine.reserve(space, hashes(1, "x"), 0, 1, [[0]])
        assert (plan.id, plan.copies) == (0, [])
        engine.publish(1)
        assert engine.drain() == engine.clear(space) == 0
        engine.stats()
        assert store.exists(lent, keys) == store.load(lent, keys, room) == store.store(lent, keys, room) == [False]
        store.delete(lent, keys)
        engine.close()
        store.close()
        assert time.monotonic() - begun < 3
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(0)
engine.l1._lock.release()
for _ in range(1000):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        break
    time.sleep(0.02)
else:
    os.kill(child, 9)
    sys.exit("the fork hangs")
assert status == 0, status
lookup = engine.lookup(space, hashes(4))
assert lookup.poll() == 4 and before.poll() == 4
assert scrape(port_of(engine))["kvcore_l1_objects"] == "4.0"
assert engine.drain() == 0
assert store.exists(lent, keys) == [True]
engine.close()
store.close()
print("as it should be")
"""


def test_a_fork_answers_misses_and_closes_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "as it should be\n"), done.stderr


@pytest.mark.parametrize(("text", "lines"), [("salt: x\n", 1), ("l2: []\n", 0), ("l2: [{storage: memory}]\n", 0)])
def test_a_file_that_forgets_the_tiers_is_told_so(
    tmp_path: Path, text: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path, text).close()
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line.startswith("no l2 tier is configured") for line in said] == [True] * lines
