"""`kvcore simulate` as its user sees it."""

import gzip
import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from simulate_samples import lines_of

from kvcore.cli import main
from kvcore.testing import dist
from kvcore.testing.traces import TOOL_AGENT, synthetic_trace

ACME = """
    from kvcore.api import ApiVersion, Component, PluginConfig, hookimpl
    from kvcore.builtin.eviction_lru import LruPolicy

    class AcmeConfig(PluginConfig):
        newest: bool = False
        fails: bool = False

    class Acme(LruPolicy):
        def __init__(self, config, context):
            super().__init__(config, context)
            self.evicts_newest = config.newest
            self.fails = config.fails

        def evict(self, nbytes, pinned):
            if self.fails:
                raise RuntimeError("no idea")
            return super().evict(nbytes, pinned)

    @hookimpl
    def kvcore_eviction():
        return Component(api=ApiVersion(1, 0), config=AcmeConfig, factory=Acme)
"""


@pytest.fixture
def acme(site):
    """A third-party policy with options."""
    dist(site, "kvcore-acme", {"kvcore.eviction": {"acme": "acme_policy"}}, {"acme_policy": ACME})
    return site


def as_json(capsys, *words):
    status = main(["simulate", *map(str, words), "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out), err


def test_all_installed_policies_and_a_sweep(small, acme, capsys):
    status, found, err = as_json(capsys, small)
    assert (status, err) == (0, "")
    assert list(found) == ["trace", "capacities", "ceiling", "optimum", "policies"]
    assert [p["policy"] for p in found["policies"]] == ["lru", "acme", "fifo", "lfu", "mru", "s3fifo"]
    rooms = [c["blocks"] for c in found["capacities"]]
    assert len(rooms) == 8
    assert rooms == sorted(rooms)
    assert rooms[-1] == found["trace"]["distinct_blocks"]
    assert found["optimum"] == sorted(found["optimum"])
    assert 0 < found["optimum"][0] < found["optimum"][-1] == found["ceiling"]
    for policy in found["policies"]:
        assert list(policy) == ["policy", "plugin", "options", "results"]
        rates = [r["hit_rate"] for r in policy["results"]]
        assert all(rate <= best for rate, best in zip(rates, found["optimum"], strict=True))
        assert rates[-1] == found["ceiling"]
        assert policy["results"][-1]["stranded_rate"] == 0
    assert found["policies"][1]["results"][3]["hit_tokens"] == found["policies"][0]["results"][3]["hit_tokens"]


def test_policies_with_options(small, acme, capsys):
    words = ("--policy", "acme:newest=yes", "--policy", "{plugin: acme, newest: false}", "--policy", "acme@kvcore-acme")
    status, found, _ = as_json(capsys, small, *words, "--policy", "lru", "--capacity", "200blocks")
    assert status == 0
    newest, oldest, default, lru = (p["results"][0]["hit_rate"] for p in found["policies"])
    assert newest != oldest == default == lru
    assert [p["options"] for p in found["policies"]] == [{"newest": True}, {"newest": False}, {}, {}]


def test_capacities_in_every_unit(small, capsys):
    words = ("--policy", "lru", "--bytes-per-token", "128KiB", "--capacity", "1GiB, 100%,512tokens,7 blocks,7blocks")
    _, found, _ = as_json(capsys, small, *words)
    assert [c["blocks"] for c in found["capacities"]] == [1, 7, 16, found["trace"]["distinct_blocks"]]
    assert found["capacities"][2] == {"blocks": 16, "tokens": 8192, "bytes": 1 << 30}
    _, found, _ = as_json(capsys, small, "--policy", "lru", "--bytes-per-token", "128KiB")
    sizes = [c["bytes"] for c in found["capacities"]]
    assert len(sizes) == 8
    assert all(size.bit_count() == 1 for size in sizes)  # round numbers
    assert sizes[-1] // 2 < found["trace"]["distinct_blocks"] * (64 << 20) <= sizes[-1]


def test_text(small, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["simulate", str(small), "--bytes-per-token", "128KiB"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("small.jsonl (Mooncake): 300 requests, ")
    assert "SIZE  TOKENS  BLOCKS" in out
    for name in ("lru", "fifo", "lfu", "mru", "s3fifo", "optimum"):
        assert f" {name}" in out
    assert "★ optimum" in out
    assert "behind a block that was missing" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


def test_the_plot_is_a_picture(small, tmp_path, capsys):
    file = tmp_path / "p.svg"
    words = ["--policy", "lru", "--policy", "fifo", "--capacity", "40%,5%", "--plot", str(file)]
    assert main(["simulate", str(small), *words]) == 0
    capsys.readouterr()
    root = ElementTree.parse(file).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{svg}polyline")) == 3
    assert len(root.findall(f"{svg}circle")) == 6
    assert {"lru", "fifo", "optimum"} <= {text.text for text in root.findall(f"{svg}text")}
    for x, y in (point.split(",") for line in root.findall(f"{svg}polyline") for point in line.get("points").split()):
        assert 0 <= float(x) <= 760
        assert 0 <= float(y) <= 440


def test_a_policy_that_fails_is_reported_and_the_others_are_shown(small, acme, capsys, tmp_path):
    words = (small, "--policy", "lru", "--policy", "acme:fails=true", "--capacity", "5%,100%")
    status, found, err = as_json(capsys, *words)
    assert status == 1
    first, last = found["policies"][1]["results"]
    assert first["fault"].startswith("evict raised RuntimeError: no idea (in request ")
    assert first["hit_rate"] is None
    assert last["fault"] is None  # nothing has to go
    assert found["policies"][0]["results"][0]["hit_rate"] > 0
    assert err.count("\n") == 1
    assert "policy acme:fails=true at " in err
    assert main(["simulate", *map(str, words), "--plot", str(tmp_path / "p.svg")]) == 1
    out, err = capsys.readouterr()
    assert " fault" in out
    assert "Traceback" not in out + err


def test_an_installed_policy_that_cannot_be_made_is_left_out_and_named(small, site, capsys):
    needs = ACME.replace("newest: bool = False", "newest: bool")
    dist(site, "kvcore-acme", {"kvcore.eviction": {"acme": "needy_policy"}}, {"needy_policy": needs})
    dist(site, "kvcore-burnt", {"kvcore.eviction": {"burnt": "burnt_policy"}}, {"burnt_policy": "import nowhere"})
    status, found, err = as_json(capsys, small, "--capacity", "5%")
    assert status == 0
    assert [p["policy"] for p in found["policies"]] == ["lru", "fifo", "lfu", "mru", "s3fifo"]
    assert "acme is left out: " in err
    assert "newest" in err
    assert "burnt is left out: " in err


WRONG = {
    "policy": (["--policy", "lur"], "Did you mean 'lru'?"),
    "option": (["--policy", "acme:oldest=1"], "oldest"),
    "form": (["--policy", "acme:newest"], "write a name, name:option=value"),
    "yaml": (["--policy", "{plugin: ["], "is not YAML"),
    "nameless": (["--policy", "{newest: true}"], "names no plugin"),
    "unit": (["--capacity", "5"], "'5' is no capacity: write 4GiB, 10%, 2000000tokens or 4096blocks"),
    "size": (["--capacity", "1GiB"], "needs --bytes-per-token"),
    "little": (["--capacity", "511tokens"], "does not hold one block of 512 tokens"),
    "plot": (["--plot", "p.png"], "does not end with .svg"),
    "token": (["--bytes-per-token", "128"], "write a number and a unit"),
    "block": (["--block-tokens", "0"], "is not a number of at least 1"),
    "file": (["--plot", "nowhere/p.svg"], "there is no folder for 'nowhere/p.svg'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage_is_one_line_that_says_what_is_right(case, small, acme, capsys):
    words, text = WRONG[case]
    policy = [] if case == "policy" else ["--policy", "lru"]
    assert main(["simulate", str(small), *policy, *words]) in (1, 2)
    out, err = capsys.readouterr()
    assert text in err
    assert "Traceback" not in out + err


def test_a_trace_that_is_not_there_or_none(tmp_path, capsys):
    assert main(["simulate", str(tmp_path / "no.jsonl")]) == 1
    assert "no.jsonl: No such file or directory" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text("hello\n")
    assert main(["simulate", str(tmp_path / "bad.jsonl")]) == 1
    assert "bad.jsonl, line 1: JSON is malformed" in capsys.readouterr().err


def test_a_suspicious_block_size_is_said_before_the_result(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text(lines_of([{"input_length": 5120, "hash_ids": list(range(80))}] * 3))
    assert main(["simulate", str(tmp_path / "t.jsonl"), "--policy", "lru"]) == 0
    assert "3 of 3 requests have more or fewer blocks" in (err := capsys.readouterr().err)
    assert "try --block-tokens 64" in err


def test_a_pipe_without_unicode():
    packed = gzip.compress(lines_of(synthetic_trace(TOOL_AGENT, 100)).encode())
    done = subprocess.run(
        [sys.executable, "-m", "kvcore", "simulate", "-", "--policy", "lru"],
        input=packed,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"* optimum" in done.stdout


def test_the_examples_trace_shows_something():
    root = __file__.partition("/tests/")[0]
    done = subprocess.run(
        [sys.executable, "-m", "kvcore", "simulate", f"{root}/examples/traces/agents.jsonl.gz", "--json"],
        capture_output=True,
        timeout=60,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["trace"]["requests"] == 2000
    lru = [r["hit_rate"] for r in found["policies"][0]["results"]]
    assert lru[0] < 0.9 * found["optimum"][0]
