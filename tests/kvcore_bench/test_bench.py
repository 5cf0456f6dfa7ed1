"""`kvcore bench`: the shape of its result, and that its numbers mean what they say."""

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from docs_blocks import lines
from kvcore.cli import main
from kvcore.plugins import Registry
from kvcore_bench.speed import measure, transfer
from kvcore_bench.speed.command import GROUPS
from kvcore_bench.speed.disk_limit import raw_limit
from kvcore_bench.speed.measure import Case, us_each
from kvcore_bench.speed.peer import Peer, PeerError, find_scripts
from kvcore_bench.speed.rows import BUDGETS, Budget, Row
from kvcore_bench.speed.setting import Setting

FIELDS = {"name", "value", "unit", "limit", "ratio_to_limit", "peer", "ratio_to_peer", "budget", "budget_met"}
PROMISED = {
    "keys": {"keys.tokens_buffer", "keys.tokens_list", "keys.engine"},
    "l1": {"l1.lookup_hit", "l1.reserve_publish", "l1.alloc_free"},
    "calls": {"calls.lookup", "calls.reserve_publish"},
    "startup": {"import.seconds", "import.rss"},
    "serde": {"serde.zstd.ratio", "serde.zstd.encode", "serde.zstd.decode"},
    "server": {"server.ready", "server.rss", "server.lookup_p50", "server.lookups", "server.store", "server.retrieve"},
    "transfer": {"transfer.store", "transfer.load"},
    "disk": {"disk.store", "disk.load"},
}

PEER = """
import json, sys
setting = json.loads(sys.stdin.readline())
print(json.dumps({"peer": "twin 1.0", "rows": ["a.fast", "a.broken", "a.dies"]}), flush=True)
for line in sys.stdin:
    row = line.strip()
    if row == "a.dies":
        sys.exit(3)
    print(json.dumps({"value": setting["answer"]} if row == "a.fast" else {"error": "out of order"}), flush=True)
"""


def test_every_promised_group_exists() -> None:
    assert set(PROMISED) == set(GROUPS)


def words(page: str, start: str) -> list[str]:
    """Those of a page's line that begins so, without `kvcore`; as short as it can be."""
    (line,) = (line for line in lines(page, start) if "--peer" not in line)
    return [*shlex.split(line, comments=True)[1:], "--quick"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All groups, by the lines of benchmarks/README.md and docs/performance.md: what is not the server's by the first,
    the server's by the other. `kvcore bench --quick` is both."""
    folder = tmp_path_factory.mktemp("nvme")
    first = words("benchmarks/README.md", "kvcore bench --json")
    first[first.index("/mnt/nvme")] = str(folder)
    for group in GROUPS:
        first += ["--only", group] if group != "server" else []
    server = [*words("docs/performance.md", "kvcore bench --only server"), "--json"]
    found = {}
    for command in (first, server):
        done = subprocess.run(
            [sys.executable, "-m", "kvcore", *command], capture_output=True, text=True, timeout=800, check=False
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert set(result) == {"machine", "rows"}
        assert result["machine"]["cores"] >= 1
        found |= {row["name"]: row for row in result["rows"]}
    assert not list(folder.iterdir()), "what was written is removed"
    return found


@pytest.mark.timeout(1700)
def test_json_of_each_group(rows: dict[str, dict[str, Any]]) -> None:
    for group, promised in PROMISED.items():
        assert rows.keys() >= promised, group
    for row in rows.values():
        assert set(row) - {"note"} == FIELDS
        assert row["peer"] is None
        assert row["ratio_to_peer"] is None
        assert row["unit"] in ("us", "ms", "s", "GB/s", "1/s", "MiB", "x")
        if row["value"] is None:
            assert row["note"], "a row without a value says why"
        else:
            assert row["value"] > 0 or (row["name"], row["value"]) == ("server.idle_cpu", 0)
        assert (row["limit"] is None) == (row["ratio_to_limit"] is None)


def test_table_shows_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words("benchmarks/README.md", "kvcore bench --only l1"), "--path", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert any(line.startswith("keys.") for line in out.splitlines())
    line = next(line for line in out.splitlines() if line.startswith("l1.alloc_free "))
    assert "<= 0.2" in line
    assert line.rstrip().endswith(("ok", "missed"))


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--path", str(tmp_path / "none")]) == 1
    assert "no such directory" in capsys.readouterr().err
    assert main(["bench", "--peer", str(tmp_path / "python")]) == 1
    assert "not a working Python interpreter" in capsys.readouterr().err
    assert main(["bench", "--peer", sys.executable, "--peer-scripts", str(tmp_path)]) == 1
    assert "holds no peer scripts" in capsys.readouterr().err
    assert main(["bench", "--only", "everything"]) == 2


def test_samples_are_taken_in_turn_and_ratios_are_of_pairs() -> None:
    order: list[str] = []
    ours, limit, peer = iter([9.0, 2.0, 4.0, 6.0]), iter([1.0, 1.0, 4.0, 2.0]), iter([1.0, 4.0, 4.0, 4.0])

    def sampler(name: str, values: Iterator[float]) -> Callable[[], float]:
        def sample() -> float:
            order.append(name)
            return next(values)

        return sample

    case = Case("a.b", "us", sampler("ours", ours), sampler("limit", limit), sampler("peer", peer))
    (row,) = measure.measure([case], rounds=4)
    assert order == ["ours", "limit", "peer"] * 4
    # The first round warms up. Best of the rest; medians of 2/1, 4/4, 6/2 and of 2/4, 4/4, 6/4.
    assert row == Row("a.b", 2.0, "us", 1.0, 2.0, 4.0, 1.0)


def test_best_of_a_rate_is_the_greatest() -> None:
    values = iter([5.0, 1.0, 3.0])
    (row,) = measure.measure([Case("a.b", "GB/s", lambda: next(values))], rounds=3)
    assert row.value == 3.0
    assert row.as_json().keys() == FIELDS


def test_time_is_per_item_and_leaves_preparation_out() -> None:
    sample = us_each(lambda: time.sleep(0.01), 100, repeats=2, before=lambda: time.sleep(0.05))
    assert 100 <= sample() < 400  # 10 ms in 100 items; with the preparation it would be 600


def test_budgets_name_rows_that_exist_and_judge_them() -> None:
    groups = ("keys", "l1", "calls", "server", "startup", "serde", "transfer", "disk")
    sources = "".join((Path(measure.__file__).parent / f"{g}.py").read_text() for g in groups)
    for name in BUDGETS:
        assert name in sources or name.rpartition(".")[0] in sources
    most, least = Budget("value", most=2.0), Budget("ratio_to_limit", least=0.9)
    row = Row("a", 2.0, "us", 1.0, 0.8)
    assert most.met(row) is True
    assert least.met(row) is False
    assert most.met(row._replace(value=None)) is None
    assert str(least) == ">= 0.9 /limit"
    engine_key = Row("keys.engine", 0.13, "us").as_json()
    assert (engine_key["budget"], engine_key["budget_met"]) == ({"of": "value", "most": 0.1}, False)
    transfer_row = Row("transfer.load", 9.0, "GB/s", 10.0, 0.9).as_json()
    assert (transfer_row["budget"], transfer_row["budget_met"]) == ({"of": "ratio_to_limit", "least": 0.85}, True)
    unmeasured = Row("disk.load", None, "GB/s").as_json()
    assert (unmeasured["budget"], unmeasured["budget_met"]) == ({"of": "ratio_to_limit", "least": 0.95}, None)
    assert (Row("a", 1.0, "us").as_json()["budget"], Row("a", 1.0, "us").as_json()["budget_met"]) == (None, None)


def test_peer_script(tmp_path: Path) -> None:
    script = tmp_path / "keys.py"
    said: list[str] = []
    script.write_text(PEER)
    assert find_scripts(str(tmp_path)) == tmp_path.resolve()
    with Peer(sys.executable, script, {"answer": 1.5}, said.append) as peer:
        assert peer.name == "twin 1.0"
        assert peer.sampler("a.unknown") is None
        fast, broken, dies = (peer.sampler(f"a.{name}") for name in ("fast", "broken", "dies"))
        assert fast is not None
        assert broken is not None
        assert dies is not None
        assert fast() == 1.5
        assert broken() is None
        assert broken() is None
        assert said == ["the peer failed on a.broken: out of order"], "told once"
        assert dies() is None
        assert fast() is None


def test_peer_that_does_not_start(tmp_path: Path) -> None:
    script = tmp_path / "keys.py"
    said: list[str] = []
    script.write_text("raise SystemExit('no lmcache here')")
    with Peer(sys.executable, script, {}, said.append) as peer:
        assert peer.sampler("keys.engine") is None
    assert len(said) == 1
    assert "did not start" in said[0]


def test_rows_beside_a_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys.py").write_text(PEER.replace("a.fast", "keys.engine").replace('setting["answer"]', "4.0"))
    arguments = [
        "bench",
        "--quick",
        "--json",
        "--only",
        "keys",
        "--peer",
        sys.executable,
        "--peer-scripts",
        str(tmp_path),
    ]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["machine"]["peer"] == "twin 1.0"
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["keys.engine"]["peer"] == 4.0
    assert rows["keys.engine"]["ratio_to_peer"] == pytest.approx(rows["keys.engine"]["value"] / 4.0, rel=0.5)
    assert rows["keys.tokens_list"]["peer"] is None


def test_scripts_are_found_in_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkout = Path(__file__).parents[2] / "benchmarks" / "peer"
    monkeypatch.chdir(checkout.parents[1])
    assert find_scripts(None) == checkout
    with pytest.raises(PeerError, match="holds no peer scripts"):
        find_scripts(str(tmp_path))
    assert {p.name for p in checkout.glob("*.py")} == {f"{g}.py" for g in GROUPS if g not in ("serde", "server")} | {
        "serve.py"
    }


def test_disk_limit_without_fio(tmp_path: Path) -> None:
    limit = raw_limit(tmp_path, 1 << 20, 4, 2)
    assert limit.write() > 0
    assert limit.read() > 0
    assert sorted(p.stat().st_size for p in (tmp_path / "raw").iterdir()) == [1 << 20] * 4


SLOW_FIO = """#!/bin/sh
[ "$1" = --version ] && exec echo fio-slow
for word in "$@"; do case "$word" in --directory=*) folder="${word#--directory=}" ;; esac; done
echo $$ > "$folder/pid"
exec sleep 60
"""


@pytest.mark.parametrize("group", [True, False], ids=["the whole group, as a terminal does", "this process alone"])
def test_an_interrupt_is_one_line_and_leaves_nothing(tmp_path: Path, group: bool) -> None:
    tools, work = tmp_path / "tools", tmp_path / "work"
    tools.mkdir()
    work.mkdir()
    (tools / "fio").write_text(SLOW_FIO)
    (tools / "fio").chmod(0o755)
    bench = subprocess.Popen(
        [sys.executable, "-m", "kvcore", "bench", "--quick", "--only", "disk", "--path", str(work)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not (written := [p for p in work.glob("*/fio/pid") if p.read_text().strip()]):
            assert time.monotonic() < end, "fio was never started"
            assert bench.poll() is None
            time.sleep(0.02)
        fio = int(written[0].read_text())
        (os.killpg if group else os.kill)(bench.pid, signal.SIGINT)
        _, said = bench.communicate(timeout=60)
    finally:
        bench.kill()
        bench.communicate()
    assert (bench.returncode, said) == (130, "[1/1] disk\nkvcore: interrupted\n")
    assert list(work.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(fio, 0)


def test_an_interrupt_is_not_hidden_by_what_fails_after_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(setting: Setting) -> list[Row]:
        try:
            raise KeyboardInterrupt
        finally:
            raise AssertionError("it cannot be closed now")

    monkeypatch.setattr("kvcore_bench.speed.keys.run", interrupted)
    assert main(["bench", "--only", "keys"]) == 130
    assert capsys.readouterr().err.splitlines()[1:] == ["kvcore: interrupted"]


@pytest.mark.parametrize(("group", "plugin"), [("disk", "disk"), ("serde", "zstd")])
def test_rows_of_an_absent_plugin(group: str, plugin: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = importlib.import_module(f"kvcore_bench.speed.{group}")
    monkeypatch.setattr(module, "Registry", partial(Registry, block=[plugin]))
    rows = module.run(Setting(quick=True, path=tmp_path, say=print))
    assert {row.name for row in rows} >= PROMISED[group]
    for row in rows:
        assert row.value is None
        assert row.as_json().keys() == FIELDS | {"note"}
        assert plugin in row.note


def test_rows_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    rows = transfer.run(Setting(quick=True, path=tmp_path, say=print))
    assert {row.name for row in rows} >= PROMISED["transfer"]
    assert all(row.value is None and "torch is not installed" in row.note for row in rows)
