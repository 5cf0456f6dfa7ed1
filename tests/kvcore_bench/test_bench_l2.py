"""`kvcore bench l2`: rows for every tier, whatever else fails; and nothing is left of what it stored."""

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import docs_blocks
from kvcore.api import PluginError
from kvcore.builtin.memory import MemoryStorage
from kvcore.cli import main
from kvcore.plugins import PluginSpec, Registry
from kvcore.testing import dist
from kvcore_bench.speed import l2_subject
from kvcore_bench.speed.disk_limit import Limit
from kvcore_bench.speed.l2_limit import limit_of
from kvcore_bench.speed.l2_subject import Rounds
from store_samples import clean_env, contents, fill, kvcore

FIELDS = {"name", "value", "unit", "limit", "ratio_to_limit", "peer", "ratio_to_peer"}
CONFIG = """
l2:
  - storage: memory
  - storage: {plugin: disk, path: store, capacity: 1GiB}
    serde: [zstd]
"""
Answer = tuple[int, dict[str, Any], str]


@pytest.fixture(autouse=True)
def place_of_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("KVCORE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("kvcore.yaml").write_text(CONFIG)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs `kvcore bench l2 --quick --json` here; its status, its rows by name, and its stderr."""

    def run(*words: str, sizes: str = "64KiB") -> Answer:
        status = main(["bench", "l2", "--config", "kvcore.yaml", "--quick", "--json", "--sizes", sizes, *words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        result = json.loads(out)
        assert set(result) == {"machine", "rows"}
        assert result["machine"]["cores"] >= 1
        return status, {row["name"]: row for row in result["rows"]}, err

    return run


def names(tier: str, size: str, *chains: str) -> set[str]:
    found = {f"l2.{tier}.{size}{chain}.{op}" for chain in chains for op in ("store", "exists", "load")}
    return found | {f"{name}.{p}" for name in found for p in ("p50", "p99")}


def test_rows_of_every_tier_size_and_chain(bench: Callable[..., Answer]) -> None:
    fill(Path("store"), range(20))
    before = contents(Path("store"))
    status, rows, err = bench(sizes="64KiB,1MiB")
    assert (status, err) == (0, "")
    expected = {"l2.disk.64KiB.serde.ratio", "l2.disk.1MiB.serde.ratio"}
    for size in ("64KiB", "1MiB"):
        expected |= names("memory", size, "") | names("disk", size, "", ".serde")
    assert rows.keys() == expected
    for name, row in rows.items():
        assert set(row) >= FIELDS
        assert row["value"] > 0
        moves = name.rpartition(".")[2] in ("store", "load")
        assert row["unit"] == ("GB/s" if moves else "x" if name.endswith("ratio") else "us")
        assert (row["limit"] is not None) == (moves and name.startswith("l2.disk.")), name
        if name.endswith("p50"):
            assert row["value"] <= rows[name.removesuffix("50") + "99"]["value"]
    assert 1.3 < rows["l2.disk.1MiB.serde.ratio"]["value"] < 1.7, "the payload compresses as KV does"
    assert "in the same file system" in rows["l2.disk.1MiB.store"]["note"]
    assert contents(Path("store")) == before, "the throw-away objects are gone, the others are not"
    assert sorted(os.listdir()) == ["kvcore.yaml", "store"]


def test_as_a_command_with_a_table() -> None:
    """The line of docs/operations.md, for one size."""
    (line,) = docs_blocks.lines("docs/operations.md", "kvcore bench l2")
    done = kvcore(*line.split()[1:], "--config", "kvcore.yaml", "--sizes", "64KiB", cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["TIER", "SIZE", "SERDE", "OPERATION", "VALUE", "P50", "P99", "LIMIT", "/LIMIT"] in lines
    table = {(w[0], w[2], w[3]): w for w in lines if len(w) > 4 and w[1] == "64KiB"}
    chains = (("memory", "-"), ("disk", "-"), ("disk", "zstd/1"))
    assert table.keys() >= {(*chain, op) for chain in chains for op in ("store", "exists", "load")}
    assert table["disk", "zstd/1", "store"][5] == "GB/s"
    assert contents(Path("store")) == {}


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["l2", "--sizes", "64"], 2, "'64' is not a size"),
        (["l2", "--sizes", "64KiB,2TiB"], 2, "an even size from 4 KiB to 1 GiB is needed"),
        (["l2", "--config", "kvcore.yaml", "--tier", "nfs"], 1, "no tier is named 'nfs'; the tiers are memory, disk"),
        (["--only", "l1", "l2", "--config", "kvcore.yaml"], 1, "belong to `kvcore bench` without l2"),
        (["l2", "--config", "none.yaml"], 1, "none.yaml"),
        (["l3"], 2, "invalid choice"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], words: list[str], status: int, says: str) -> None:
    assert main(["bench", *words]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


# -- what fails ------------------------------------------------------------------------------------------------------


ODD = """
from kvcore.api import *
from kvcore.builtin.memory import MemoryStorage

class Config(PluginConfig):
    how: str = ""
    capacity: Size | None = None
    eviction: str = "lru"

class Store(MemoryStorage):
    shared = True
    def __init__(self, config, context):
        self.how, self.log = config.how, context.log
        super().__init__(config, context)
        if self.how == "small":
            self.max_object_bytes = 100_000
    def open(self):
        if self.how == "down": self.log.warning("nobody answers, says the log")
        if self.how == "down": raise StorageError("nobody at 192.0.2.1:6379: start the server")
    def ping(self):
        if self.how == "late": raise StorageError("nobody answers yet")
    def usage(self):
        if self.how == "late": raise StorageError("nobody answers yet")
        return super().usage()
    def store(self, items):
        if self.how == "refuses": return [Failed("nothing may be written here", "read_only")] * len(items)
        return super().store(items)
    def load(self, items):
        outcomes = super().load(items)
        if self.how == "forgets": outcomes = [MISSING] * len(items)
        if self.how == "changes":
            for item in items: item.buffers[1][5] ^= 1
        return outcomes
    def exists(self, keys):
        return [False] * len(keys) if self.how == "denies" else super().exists(keys)
    def delete(self, keys):
        if self.how != "keeps": super().delete(keys)

@hookimpl
def kvcore_storage():
    return Component(api=ApiVersion(1, 0), config=Config, factory=Store)
"""


@pytest.fixture
def odd(site: Path) -> Callable[..., None]:
    """Configures storage `odd`, which misbehaves as told, before a good one on disk."""
    dist(site, "acme-odd", {"kvcore.storage": {"odd": "fake_odd"}}, {"fake_odd": ODD})

    def configure(how: str, more: str = "") -> None:
        Path("kvcore.yaml").write_text(
            f"l2:\n  - storage: {{plugin: odd, how: {how}{more}}}\n"
            "  - storage: {plugin: disk, path: store, capacity: 1GiB}\n"
        )

    return configure


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("down", "nobody at 192.0.2.1:6379: start the server"),
        ("late", "nobody answers yet"),
        ("refuses", "nothing may be written here"),
        ("forgets", "an object just stored is missing"),
        ("changes", "checksum"),
        ("denies", "objects just stored are not there"),
    ],
)
def test_a_tier_that_fails_is_reported_and_the_others_are_measured(
    odd: Callable[..., None], bench: Callable[..., Answer], how: str, says: str
) -> None:
    odd(how)
    status, rows, err = bench()
    assert status == 1
    assert says in err
    for name in names("odd", "64KiB", ""):
        assert rows[name]["value"] is None
        assert says in rows[name]["note"]
    for name in names("disk", "64KiB", ""):
        assert rows[name]["value"] > 0
    assert contents(Path("store")) == {}


def test_a_tier_that_is_down_is_said_once_and_has_no_rows(
    odd: Callable[..., None], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a process of its own: what is logged is printed
    odd("down")
    text = Path("kvcore.yaml").read_text()
    Path("kvcore.yaml").write_text(text.replace("how: down}", "how: down}\n    serde: [zstd]"))
    assert main(["bench", "l2", "--config", "kvcore.yaml", "--quick", "--sizes", "64KiB,1MiB"]) == 1
    out, err = capsys.readouterr()
    assert err == "kvcore: tier odd: open: nobody at 192.0.2.1:6379: start the server\n"
    assert "odd" not in out
    assert len([line for line in out.splitlines() if line.startswith("disk  ")]) == 6
    assert main(["bench", "l2", "--config", "kvcore.yaml", "--quick", "--sizes", "64KiB", "--tier", "odd"]) == 1
    assert "TIER" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ("operations: [store], fail_rate: 0.05", "injected: the object cannot be written"),
        ("operations: [load], fail_rate: 0.05", "injected: the object cannot be read"),
        ("operations: [exists], error_rate: 0.1", "an object just stored is not there"),
        ("flip_rate: 0.1", "checksum"),
    ],
)
def test_some_objects_that_fail_are_counted_and_the_others_measured(
    bench: Callable[..., Answer], capsys: Any, monkeypatch: pytest.MonkeyPatch, faults: str, says: str
) -> None:
    # Which objects fail depends on their keys: never three calls in a row, which would open the breaker.
    monkeypatch.setattr("kvcore_bench.speed.l2_subject.secrets.token_bytes", random.Random(1).randbytes)
    inner = "{plugin: disk, path: store, capacity: 1GiB}"
    Path("kvcore.yaml").write_text(f"l2:\n  - storage: {{plugin: faulty, storage: {inner}, {faults}}}\n")
    status, rows, err = bench()
    assert (status, err) == (1, "")
    for name in names("faulty", "64KiB", ""):
        assert rows[name]["value"] > 0
    note = rows["l2.faulty.64KiB.load"]["note"]
    found = re.search(r"(\d+) objects failed and are in no number: (.*)", note)
    assert found
    assert 0 < int(found[1]) < 200
    assert says in found[2]
    assert contents(Path("store")) == {}
    assert main(["bench", "l2", "--config", "kvcore.yaml", "--quick", "--sizes", "64KiB"]) == 1
    assert re.search(r"^faulty, 64KiB: \d+ objects failed", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_a_delete_that_fails_is_tried_again(bench: Callable[..., Answer], rate: float) -> None:
    inner = "{plugin: disk, path: store, capacity: 1GiB}"
    Path("kvcore.yaml").write_text(
        f"l2:\n  - storage: {{plugin: faulty, storage: {inner}, operations: [delete], error_rate: {rate}}}\n"
    )
    status, _, err = bench()
    assert (status, err) == (0, "")
    assert contents(Path("store")) == {}


def test_objects_that_are_too_large_for_a_tier(odd: Callable[..., None], bench: Callable[..., Answer]) -> None:
    odd("small")
    status, rows, _ = bench("--tier", "odd", sizes="64KiB,128KiB")
    assert status == 1
    assert rows["l2.odd.64KiB.load"]["value"] > 0
    assert rows["l2.odd.128KiB.load"]["note"].startswith("no room for one object of 128 KiB")
    odd("fine", ", capacity: 1MiB")
    status, rows, _ = bench("--tier", "odd", sizes="64KiB,512KiB")
    assert rows["l2.odd.64KiB.load"]["value"] > 0
    assert rows["l2.odd.512KiB.load"]["value"] is None


def test_what_cannot_be_deleted_is_said_with_the_command(
    odd: Callable[..., None], bench: Callable[..., Answer]
) -> None:
    odd("keeps")
    _, _, err = bench("--tier", "odd")
    assert "objects are still there" in err
    assert f"kvcore store rm --tier odd --namespace {l2_subject.NAMESPACE.hex()}" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.5])
def test_nothing_is_left_after_an_interruption(number: signal.Signals, delay_s: float) -> None:
    fill(Path("store"), range(3))
    before = contents(Path("store"))
    words = [sys.executable, "-m", "kvcore", "bench", "l2", "--config", "kvcore.yaml", "--tier", "disk"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_env()) as process:
        until = time.monotonic() + 30
        while len(list(Path("store").glob("?/?/*"))) == 3:
            assert time.monotonic() < until
            time.sleep(0.005)
        time.sleep(delay_s)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "kvcore: interrupted\n")
    assert contents(Path("store")) == before
    assert sorted(os.listdir()) == ["kvcore.yaml", "store"]


def test_a_limit_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, bench: Callable[..., Answer]) -> None:
    from kvcore_bench.speed import l2

    def full() -> float:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(l2, "limit_of", lambda *args: nullcontext(Limit(full, full, "limit: a full disk")))
    status, rows, err = bench("--tier", "disk")
    assert status == 0
    assert rows["l2.disk.64KiB.store"]["value"] > 0
    assert rows["l2.disk.64KiB.store"]["limit"] is None
    assert "the limit cannot be measured: [Errno 28] No space left on device" in err


def test_a_bug_in_a_limit_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore_bench.speed import l2

    def broken(*args: Any) -> Any:
        raise PluginError("no limit today")

    monkeypatch.setattr(l2, "limit_of", broken)
    assert main(["bench", "l2", "--config", "kvcore.yaml", "--quick", "--tier", "disk"]) == 1
    assert contents(Path("store")) == {}


# -- parts -----------------------------------------------------------------------------------------------------------


def test_the_limit_of_a_network_store_is_a_loopback_socket() -> None:
    class Shared(MemoryStorage):
        shared = True

    def made(kind: type[MemoryStorage]) -> MemoryStorage:
        registry = Registry()
        config = registry.config_model("storage", "memory")
        assert config is not None
        return kind(config(), registry.context())  # type: ignore[arg-type]

    with limit_of(made(Shared), None, 100_001, 7) as limit:
        assert limit is not None
        assert limit.write() > 0
        assert limit.read() > 0
        assert "4 loopback sockets" in limit.note
    with limit_of(made(MemoryStorage), None, 100_000, 7) as limit:
        assert limit is None


def test_the_limit_of_a_path_is_beside_it(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "store"
    root.mkdir(parents=True)
    registry = Registry()
    spec = PluginSpec("disk", {"path": str(root), "capacity": "64MiB"}, "test")
    storage = registry.create("storage", spec)
    model = registry.config_model("storage", "disk")
    assert model is not None
    with limit_of(storage, model.model_validate(spec.options), 1 << 20, 6) as limit:
        assert limit is not None
        assert limit.write() > 0
        assert limit.read() > 0
        assert len(list(root.parent.glob("kvcore-bench-*"))) == 1
        assert not list(root.iterdir())
    assert [path.name for path in root.parent.iterdir()] == ["store"]


def test_percentiles() -> None:
    rounds = Rounds.__new__(Rounds)
    rounds.seconds = {"load": [i / 1000 for i in range(100, 0, -1)], "store": [0.002]}
    assert rounds.percentile("load", 50) == pytest.approx(50_000)
    assert rounds.percentile("load", 99) == pytest.approx(99_000)
    assert rounds.percentile("store", 99) == rounds.percentile("store", 50) == pytest.approx(2000)


def test_the_payload_is_kv_and_no_two_objects_begin_alike() -> None:
    from kvcore.testing.sample import kv_sample

    sample = kv_sample()[0]
    views = [memoryview(bytearray(100_000)) for _ in range(8)]
    l2_subject._fill(views)
    assert bytes(views[0]) == sample[:100_000]
    assert len({bytes(view[:4096]) for view in views}) == 8
    (large,) = [memoryview(bytearray(len(sample) + 5000))]
    l2_subject._fill([large])
    assert bytes(large) == sample + sample[:5000]
