"""Tiers added and removed while the cache serves."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.api import ConfigError, PluginError
from kvcore.control.tiers import TierConflict
from kvcore.engine import CacheEngine, Space
from kvcore.testing.chunks import contents, hashes, publish, put, spec
from kvcore.testing.distributions import dist
from kvcore.testing.fault_config import Faults

FAULTY = {"name": "far", "storage": {"plugin": "faulty", "storage": "memory"}}
ALL = list(range(1, 9))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], tuple[CacheEngine, Space]]]:
    engines: list[CacheEngine] = []

    def open_(tiers: str = "[]") -> tuple[CacheEngine, Space]:
        path = tmp_path / f"{len(engines)}.yaml"
        path.write_text(f"l1: {{size: 8MiB}}\nmin_object_size: 128KiB\nlookup_timeout: 20s\nl2: {tiers}\n")
        engines.append(CacheEngine.open(str(path)))
        return engines[-1], engines[-1].register(spec())

    yield open_
    for engine in engines:
        engine.close()


def metric(engine: CacheEngine, name: str, **labels: str) -> float | None:
    text = ",".join(f'{k}="{v}"' for k, v in labels.items())
    return engine.metrics.values().get(f"kvcore_{name}{{{text}}}")


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_what_is_cleared_while_it_waits_is_not_written(make: Any) -> None:
    """Nor found while somebody still reads it, and its memory is free with the last reader."""
    engine, space = make(f"[{FAULTY}]")
    free = engine.l1.free_bytes
    far = engine.manager.tiers[0]
    far.storage.faults = Faults(latency=0.2, operations=("store",))
    for start in range(0, 24, 8):  # more than the tier takes at once
        publish(engine, space, hashes(8, start), start)
    read = engine.lookup(space, hashes(24))
    assert read.wait(10)
    assert engine.clear(space) == 24
    assert contents(engine, space, hashes()) in ([], list(range(1, 9)))  # what had been written by then
    written = engine.manager.loop.submit(engine.manager.stores.written(30))
    assert written.result()
    assert engine.drain() == 0
    dropped = metric(engine, "tier_dropped_total", tier="far", reason="cleared")
    assert dropped is not None
    assert 0 < dropped <= 24
    there = [h for h in hashes(24) if contents(engine, space, [h])]
    assert len(there) == 24 - dropped
    engine.clear(space)
    engine.release(read)
    until(lambda: engine.l1.free_bytes == free, "what was read is free with its last reader")


def test_an_added_tier_is_written_and_read(make: Any) -> None:
    engine, space = make()
    put(engine, space, hashes())
    engine.manager.add_tier({"storage": "memory"})
    assert engine.tiers == {"memory": "memory"}
    assert metric(engine, "tier_open", tier="memory") == 1
    more = hashes(8, 100)
    put(engine, space, more, 100)
    engine.clear(space)
    assert contents(engine, space, more) == list(range(101, 109))
    assert contents(engine, space, hashes()) == []  # from before the tier


def test_where_it_stands(make: Any) -> None:
    engine, space = make("[{name: far, storage: memory}]")
    put(engine, space, hashes())
    engine.manager.add_tier({"name": "near", "storage": "memory"}, before="far")
    engine.manager.add_tier({"name": "last", "storage": "memory"})
    assert list(engine.tiers) == ["near", "far", "last"]
    engine.clear(space)
    assert contents(engine, space, hashes()) == ALL
    assert engine.drain() == 0
    assert metric(engine, "tier_promoted_total", tier="near") == 8  # what a later tier had
    engine.manager.remove_tier("far")
    engine.clear(space)
    assert contents(engine, space, hashes()) == ALL
    with pytest.raises(TierConflict, match="no tier is named 'far': the tiers are near, last"):
        engine.manager.add_tier({"storage": "memory"}, before="far")


def test_a_removed_tier_has_what_was_waiting_and_its_name_is_free(make: Any, tmp_path: Path) -> None:
    engine, space = make()
    slow = {"plugin": "faulty", "latency": "30ms", "storage": {"plugin": "disk", "path": str(tmp_path / "disk")}}
    engine.manager.add_tier({"name": "far", "storage": slow})
    publish(engine, space, hashes())
    assert engine.manager.remove_tier("far") == 0
    assert engine.tiers == {}
    assert metric(engine, "tier_open", tier="far") is None
    assert metric(engine, "tier_queue_bytes", tier="far") is None
    assert metric(engine, "tier_operations_total", tier="far", op="store", outcome="ok") == 8
    engine.clear(space)
    assert contents(engine, space, hashes()) == []
    engine.manager.add_tier({"name": "far", "storage": {"plugin": "disk", "path": str(tmp_path / "disk")}})
    assert contents(engine, space, hashes()) == ALL
    assert engine.l1.usage()["leases"] == 0


def test_what_a_hanging_tier_does_not_take_is_counted(make: Any) -> None:
    engine, space = make()
    tier = engine.manager.add_tier({**FAULTY, "timeout": "300ms", "queue_size": "100MiB"})
    tier.storage.faults = Faults(hang_rate=1, operations=("store",))
    for i in range(4):
        publish(engine, space, hashes(8, 8 * i))
    begun = time.monotonic()
    dropped = engine.manager.remove_tier("far", drain_s=0.1)
    assert time.monotonic() - begun < 10
    failed = metric(engine, "tier_dropped_total", tier="far", reason="failed") or 0
    assert dropped > 0
    assert metric(engine, "tier_dropped_total", tier="far", reason="removed") == dropped
    assert failed + dropped == 32
    until(lambda: engine.l1.usage()["leases"] == 0, "objects stay pinned for a tier that is gone")
    assert contents(engine, space, hashes()) == ALL  # L1 has them


def test_what_is_asked_of_it_ends_first(make: Any) -> None:
    engine, space = make("[{name: far, storage: {plugin: faulty, storage: memory}}]")
    put(engine, space, hashes())
    engine.clear(space)
    engine.manager.tiers[0].storage.faults = Faults(latency=0.2, operations=("load",))
    lookup = engine.lookup(space, hashes())
    time.sleep(0.05)  # its objects are being loaded
    engine.manager.remove_tier("far")
    assert lookup.wait(5)
    assert (lookup.poll(), lookup.sources) == (8, {"far": 8})
    engine.release(lookup)


def test_what_a_removed_tier_had_delivered_brings_none_of_its_gauges_back(make: Any) -> None:
    """A lookup counts what it had from a tier when it has all of it, from others, too."""
    engine, _ = make("[{name: far, storage: memory}]")
    (far,) = engine.manager.tiers
    engine.manager.remove_tier("far")
    for _ in range(8):
        far.delivered(1 << 20, 0.1)
    assert not [name for name in engine.metrics.values() if name.startswith("kvcore_tier_load_")]


def test_traffic_goes_on_while_tiers_come_and_go(make: Any) -> None:
    """Every lookup is answered, and what it promises is right, whatever the tiers do."""
    engine, space = make("[{name: base, storage: {plugin: faulty, storage: memory, latency: 2ms}}]")
    keys = hashes(16)
    put(engine, space, keys)
    over, wrong, answers = threading.Event(), [], []

    def ask(seed: int) -> None:
        while not over.is_set():
            mine = hashes(4, 1000 * seed + len(answers))
            try:
                publish(engine, space, mine, 0)
                engine.clear(space)
                found = contents(engine, space, keys)
                if found != list(range(1, len(found) + 1)):
                    wrong.append(found)
                answers.append(len(found))
            except BaseException as error:
                wrong.append(error)
                raise

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in (1, 2)]
    for thread in threads:
        thread.start()
    faults = [{}, {"error_rate": 0.3}, {"lost_rate": 0.5}, {"fail_rate": 0.5}, {"flip_rate": 0.3}]
    try:
        for i in range(15):
            storage = {**FAULTY["storage"], "latency": "3ms", **faults[i % len(faults)]}  # type: ignore[dict-item]
            given = {"name": "far", "storage": storage, "timeout": "500ms", "write": ("all", "evicted")[i % 2]}
            engine.manager.add_tier(given, before=("base", None)[i % 2])
            time.sleep(0.05)
            engine.manager.remove_tier("far", drain_s=(0.0, 1.0)[i % 2])
    finally:
        over.set()
        for thread in threads:
            thread.join(20)
    assert not wrong
    assert len(answers) > 30
    assert answers.count(16) > len(answers) / 2
    assert engine.tiers == {"base": "faulty"}
    assert engine.drain() == 0
    until(lambda: engine.l1.usage()["leases"] == 0, "a lease was left behind")


def test_opening_one_delays_nobody(make: Any, site: Path) -> None:
    install(site, "slow", "import time\n", "    def open(self):\n        time.sleep(1)\n")
    engine, space = make("[{name: near, storage: memory}]")
    put(engine, space, hashes())
    adding = threading.Thread(target=engine.manager.add_tier, args=({"storage": "slow"},))
    adding.start()
    time.sleep(0.1)
    begun, count = time.monotonic(), 0
    while adding.is_alive():
        engine.clear(space)
        assert contents(engine, space, hashes()) == ALL
        count += 1
    assert time.monotonic() - begun > 0.5
    assert count > 20
    assert list(engine.tiers) == ["near", "slow"]


def test_one_that_is_not_there_yet_is_used_when_it_comes(make: Any, site: Path, tmp_path: Path) -> None:
    body = "    def open(self):\n        if not Path(PATH).exists():\n            raise StorageUnavailable('not yet')\n"
    head = f"from pathlib import Path\nfrom kvcore.api import StorageUnavailable\nPATH = {str(tmp_path / 'there')!r}\n"
    install(site, "later", head, body)
    engine, _ = make()
    tier = engine.manager.add_tier({"storage": "later"})
    assert (tier.usable, tier.opened, tier.breaker.cause) == (False, False, "not yet")
    assert metric(engine, "tier_open", tier="later") == 0
    (tmp_path / "there").touch()
    until(lambda: tier.usable, "it was not opened again")
    engine.manager.remove_tier("later")


def test_one_that_refuses_leaves_nothing_behind(make: Any, site: Path) -> None:
    install(site, "no", "", "    def open(self):\n        raise OSError('no such bucket: make it first')\n")
    engine, _ = make()
    with pytest.raises(PluginError, match=r"tier no: storage: storage 'no' did not open: .*no such bucket"):
        engine.manager.add_tier({"storage": "no"})
    assert engine.tiers == {}
    assert metric(engine, "tier_open", tier="no") is None
    engine.manager.add_tier({"name": "no", "storage": "memory"})  # its name is free


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"storage": "memroy"}, "the tier: storage: no storage plugin is named 'memroy'"),
        ({}, "the tier: storage: is missing"),
        ({"storage": "memory", "timeout": 3, "write": "x"}, r"write: must be 'all'.*\n.*timeout: 3 is not a duration"),
        ({"storage": {"plugin": "memory", "size": "1GiB"}}, r"storage\.size: no such option"),
        (
            {"storage": {"plugin": "disk", "path": "/nowhere"}, "capacity": "1GiB"},
            "see the options of storage",
        ),
        ({"storage": "memory", "name": "l1"}, "the name 'l1' is taken by L1"),
    ],
)
def test_what_is_wrong_is_said_as_for_a_file(make: Any, given: dict[str, Any], text: str) -> None:
    engine, _ = make()
    with pytest.raises(ConfigError, match=text):
        engine.manager.add_tier(given)
    assert engine.tiers == {}


def test_a_taken_name(make: Any) -> None:
    engine, _ = make("[{storage: memory}]")
    with pytest.raises(TierConflict, match="the name 'memory' is taken"):
        engine.manager.add_tier({"name": "memory", "storage": "memory"})
    assert engine.manager.add_tier({"storage": "memory"}).name == "memory-2"
    with pytest.raises(TierConflict, match="no tier is named 'disk': the tiers are memory, memory-2"):
        engine.manager.remove_tier("disk")


LOSSY = """
from kvcore.api import ApiVersion, Component, Serde, hookimpl

class Halve(Serde):
    lossy, tag = True, "halve/1"
    def encode(self, source, layout):
        return bytes(source)
    def decode(self, source, into, layout):
        into[:] = source
    def max_encoded_bytes(self, nbytes):
        return nbytes

@hookimpl
def kvcore_serde():
    return Component(api=ApiVersion(1, 0), factory=Halve)
"""


def test_a_lossy_serde_only_where_the_namespaces_know_it(make: Any, site: Path) -> None:
    dist(site, "halve", {"kvcore.serde": {"halve": "halve_plugin"}}, {"halve_plugin": LOSSY})
    engine, space = make("[{name: near, storage: memory}]")
    given = {"name": "small", "storage": "memory", "serde": ["halve"]}
    with pytest.raises(ConfigError, match="'small' has the lossy serde halve/1, and no tier had it at the start"):
        engine.manager.add_tier(given)
    assert list(engine.tiers) == ["near"]
    knows, _ = make("[{name: near, storage: memory, serde: [halve]}]")
    before = knows.register(spec()).namespace
    assert before != space.namespace
    knows.manager.add_tier(given)
    knows.manager.remove_tier("near")
    knows.manager.remove_tier("small")
    assert knows.register(spec()).namespace == before  # what L1 holds went through it


def test_one_change_at_a_time(make: Any, site: Path) -> None:
    install(site, "slow", "import time\n", "    def open(self):\n        time.sleep(0.5)\n")
    engine, _ = make()
    adding = threading.Thread(target=engine.manager.add_tier, args=({"storage": "slow"},))
    adding.start()
    time.sleep(0.1)
    with pytest.raises(TierConflict, match="another tier is being added or removed"):
        engine.manager.add_tier({"storage": "memory"})
    engine.close()  # waits for it, and closes it
    adding.join(5)
    assert not adding.is_alive()
    with pytest.raises(TierConflict, match="the cache has been closed"):
        engine.manager.remove_tier("slow")


def install(site: Path, name: str, head: str, body: str) -> None:
    """A storage plugin that keeps nothing, with these methods."""
    source = f"""
from kvcore.api import ApiVersion, BlockingStorage, Component, MISSING, STORED, hookimpl
{head}
class Store(BlockingStorage):
{body}
    def exists(self, keys):
        return [False] * len(keys)
    def load(self, items):
        return [MISSING] * len(items)
    def store(self, items):
        return [STORED] * len(items)
    def delete(self, keys):
        pass

@hookimpl
def kvcore_storage():
    return Component(api=ApiVersion(1, 0), factory=Store)
"""
    dist(site, name, {"kvcore.storage": {name: f"{name}_plugin"}}, {f"{name}_plugin": source})
