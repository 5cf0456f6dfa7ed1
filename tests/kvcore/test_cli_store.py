"""`kvcore store`: what it lists, verifies, copies and deletes, over real stores on disk and storages that misbehave."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.api import Entry, ObjectKey
from kvcore.cli import main
from kvcore.cli.kit import opened
from kvcore.cli.store import walk
from kvcore.engine import CacheEngine, GroupSpec, ModelSpec
from kvcore.l2.frame import Stage
from kvcore.testing import dist
from store_samples import ONE, TWO, clean_env, contents, disk, fill, frame_of, key_of, kvcore, place, put

MIB = 1 << 20
CONFIG = """
l2:
  - storage: {plugin: disk, path: a, capacity: 1GiB}
  - {name: b, storage: {plugin: disk, path: b, capacity: 1GiB}}
"""


@pytest.fixture(autouse=True)
def place_of_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variables of ours, an own working folder, and in it two tiers on disk: `disk` below `a`, and `b`."""
    for name in [n for n in os.environ if n.startswith("KVCORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVCORE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvcore.yaml").write_text(CONFIG)
    (tmp_path / "b").mkdir()


Answer = tuple[int, dict[str, Any], str]


@pytest.fixture
def store(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs `kvcore store ... --json` here; its status, what it printed, and its stderr."""

    def run(action: str, *words: str) -> Answer:
        status = main(["store", action, "--config", "kvcore.yaml", "--json", *words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, json.loads(out) if out else {}, err

    return run


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# -- ls and stat -----------------------------------------------------------------------------------------------------


def test_ls_groups_by_namespace_and_leaves_foreign_files_alone(tmp_path: Path) -> None:
    fill(tmp_path / "a", range(5), ONE)
    fill(tmp_path / "a", range(3), TWO, nbytes=MIB)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    (tmp_path / "a" / "0" / "0").mkdir(parents=True, exist_ok=True)
    (tmp_path / "a" / "0" / "0" / "not-an-object").write_text("mine, too")
    done = kvcore("store", "ls", "--config", "kvcore.yaml", "--tier", "disk", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["tier", "disk"]
    assert lines[2][:5] == [TWO.hex(), "3", "3.012", "MiB", "1"]
    assert lines[3][:5] == [ONE.hex(), "5", "60", "KiB", "1"]
    assert lines[4][:3] == ["2", "namespaces", "8"]
    assert "2 foreign files" in done.stderr
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "a" / "0" / "0" / "not-an-object").exists()


def test_ls_json(tmp_path: Path, store: Callable[..., Answer]) -> None:
    fill(tmp_path / "a", range(5), ONE)
    fill(tmp_path / "a", range(2), TWO)
    status, found, _ = store("ls")
    assert status == 0
    first, second = found["tiers"]
    assert (first["tier"], first["storage"], first["objects"], first["bytes"]) == ("disk", "disk", 7, 7 * 12288)
    one, two = first["namespaces"]
    assert one.pop("last_used_s") == pytest.approx(time.time(), abs=60)
    nobody = {"model": None, "tenant": None}
    assert one == {"namespace": ONE.hex(), "objects": 5, "bytes": 5 * 12288, "groups": 1, **nobody}
    assert two["namespace"] == TWO.hex()
    assert second["namespaces"] == []
    status, found, _ = store("ls", "--namespace", TWO.hex(), "--tier", "disk")
    assert [n["objects"] for n in found["tiers"][0]["namespaces"]] == [2]


def test_ls_long_gives_every_object(tmp_path: Path) -> None:
    fill(tmp_path / "a", range(3))
    done = kvcore("store", "ls", "--config", "kvcore.yaml", "--tier", "disk", "--long", cwd=tmp_path)
    hashes = {key_of(i).chunk_hash.hex() for i in range(3)}
    assert {line.split()[2] for line in done.stdout.splitlines()[1:4]} == hashes
    done = kvcore("store", "ls", "--config", "kvcore.yaml", "--tier", "disk", "--long", "--json", cwd=tmp_path)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["hash"] for row in rows} == hashes
    assert all(row["bytes"] == 12288 and row["namespace"] == ONE.hex() and row["group"] == 0 for row in rows)
    assert list(rows[0]) == ["tier", "namespace", "group", "hash", "bytes", "last_used_s"]


def test_stat(tmp_path: Path, store: Callable[..., Answer]) -> None:
    fill(tmp_path / "a", range(4), ONE)
    fill(tmp_path / "a", range(4), TWO)
    status, found, _ = store("stat")
    assert status == 0
    counts = {"objects": 8, "bytes": 8 * 12288, "capacity_bytes": 1 << 30, "namespaces": 2}
    where = str(tmp_path / "a")
    assert found["tiers"][0] == {"tier": "disk", "storage": "disk", **counts, "path": where}
    done = kvcore("store", "stat", "--config", "kvcore.yaml", cwd=tmp_path)
    words = ["disk", "disk", "8", "96", "KiB", "1", "GiB", "0.0", "%", "2", where]
    assert done.stdout.splitlines()[1].split() == words
    assert done.stderr == ""


def test_without_a_file_it_says_whose_objects_these_are(tmp_path: Path) -> None:
    fill(tmp_path / "kvcore", range(2))
    tiers = f"l2=[{{storage: {{plugin: disk, path: {tmp_path}/kvcore}}}}]"
    for action in (["stat"], ["rm", "--all", "--yes", "--dry-run"]):
        done = kvcore("store", *action, "--set", tiers, cwd=tmp_path)
        said = f"note: neither --config nor KVCORE_CONFIG names a file: tier disk is disk {tmp_path}/kvcore\n"
        assert (done.returncode, done.stderr) == (0, said)


def test_ten_thousand_objects(tmp_path: Path, store: Callable[..., Answer]) -> None:
    storage = disk(tmp_path / "a")
    for first in range(0, 10_000, 500):
        put(storage, range(first, first + 500), nbytes=64)
    storage.close()
    assert store("ls", "--tier", "disk")[1]["tiers"][0]["objects"] == 10_000
    status, found, _ = store("verify", "--tier", "disk")
    assert (status, found["tiers"][0]["objects"]) == (0, {"whole": 10_000})
    status, found, _ = store("rm", "--tier", "disk", "--namespace", ONE.hex())
    assert (status, found["tiers"][0]["objects"]) == (0, {"deleted": 10_000})
    assert contents(tmp_path / "a") == {}


# -- verify and gc ---------------------------------------------------------------------------------------------------


def damage(root: Path) -> dict[str, tuple[str, str]]:
    """Ten objects, six of them damaged; name -> (state, reason) of what should be found."""
    fill(root, range(10))
    paths = [place(root, key_of(i)) for i in range(10)]
    flip(paths[0], 4096 + 5000)
    flip(paths[1], 40)
    flip(paths[2], 0)
    os.truncate(paths[3], 100)
    paths[4].write_bytes(paths[5].read_bytes())
    flip(paths[6], 8)
    with paths[7].open("ab") as file:
        file.write(b"more")
    reasons = {0: "checksum", 1: "header", 2: "magic", 3: "short", 4: "key", 6: "version", 7: "length"}
    return {key_of(i).name: ("version" if i == 6 else "corrupt", reason) for i, reason in reasons.items()}


def test_verify_finds_every_damage_and_touches_nothing(tmp_path: Path, store: Callable[..., Answer]) -> None:
    expected = damage(tmp_path / "a")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_atime_ns) for path in (tmp_path / "a").glob("?/?/*")}
    status, found, _ = store("verify", "--tier", "disk")
    assert status == 1
    tier = found["tiers"][0]
    assert (tier["ok"], tier["objects"]) == (False, {"whole": 3, "corrupt": 6, "version": 1})
    assert {n["object"]: (n["state"], n["reason"].partition(":")[0]) for n in tier["named"]} == expected
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_atime_ns) for path in before}
    done = kvcore("store", "verify", "--config", "kvcore.yaml", "--tier", "disk", cwd=tmp_path)
    assert done.returncode == 1
    assert f"corrupt  {key_of(0).name}  12 KiB  checksum: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("disk: ")
    assert "Traceback" not in done.stderr


def test_verify_delete_removes_what_is_corrupt_alone(tmp_path: Path, store: Callable[..., Answer]) -> None:
    expected = damage(tmp_path / "a")
    held = contents(tmp_path / "a")
    status, found, _ = store("verify", "--tier", "disk", "--delete", "--dry-run")
    assert (status, found["tiers"][0]["objects"]["deleted"]) == (1, 6)
    assert contents(tmp_path / "a") == held
    status, found, _ = store("verify", "--tier", "disk", "--delete")
    assert (status, found["tiers"][0]["objects"]["deleted"]) == (1, 6)
    corrupt = {name for name, (state, _) in expected.items() if state == "corrupt"}
    assert contents(tmp_path / "a").keys() == held.keys() - corrupt
    assert store("verify", "--tier", "disk")[0] == 0


def test_gc(tmp_path: Path, store: Callable[..., Answer]) -> None:
    expected = damage(tmp_path / "a")
    storage = disk(tmp_path / "a")
    strange = key_of(77)
    storage.store([_item(strange, (Stage("acme/1", 9000),))])
    storage.store([_item(key_of(78), (Stage("zstd/1", 9000),))])
    storage.close()
    status, found, _ = store("gc", "--tier", "disk", "--versions", "--serdes", "--dry-run")
    assert status == 0
    assert found["tiers"][0]["objects"] == {"whole": 4, "corrupt": 6, "version": 1, "serde": 1, "deleted": 8}
    assert len(contents(tmp_path / "a")) == 12
    assert store("gc", "--tier", "disk")[1]["tiers"][0]["objects"]["deleted"] == 6
    names = contents(tmp_path / "a").keys()
    assert strange.name in names
    assert {n for n, (state, _) in expected.items() if state == "version"} <= names
    status, found, _ = store("gc", "--tier", "disk", "--versions", "--serdes")
    assert (status, found["tiers"][0]["objects"]["deleted"]) == (0, 2)
    assert len(contents(tmp_path / "a")) == 4
    assert store("gc", "--tier", "disk", "--versions", "--serdes")[1]["tiers"][0]["objects"] == {"whole": 4}


def _item(key: ObjectKey, stages: Sequence[Stage]) -> Any:
    from kvcore.api import Item

    return Item(key, frame_of(key, stages=stages))


def test_gc_of_namespaces_that_nobody_uses(tmp_path: Path, store: Callable[..., Answer]) -> None:
    fill(tmp_path / "a", range(5), ONE)
    fill(tmp_path / "a", range(5), TWO)
    old = time.time() - 40 * 86400
    for i in range(5):
        os.utime(place(tmp_path / "a", key_of(i, ONE)), (old, old))
    for i in range(4):  # one object of it was used since
        os.utime(place(tmp_path / "a", key_of(i, TWO)), (old, old))
    assert store("verify", "--tier", "disk")[0] == 0  # is no use
    status, found, _ = store("gc", "--tier", "disk", "--unused-for", "30d", "--dry-run")
    assert (status, found["tiers"][0]["namespaces"]) == (0, [ONE.hex()])
    assert contents_count(tmp_path / "a") == 10
    status, found, _ = store("gc", "--tier", "disk", "--unused-for", "30d")
    assert (status, found["tiers"][0]["objects"]) == (0, {"deleted": 5})
    assert {name.partition("-")[0] for name in contents(tmp_path / "a")} == {TWO.hex()}
    status, _, err = store("gc", "--unused-for", "30d", "--serdes")
    assert status == 1
    assert "reads no object" in err


# -- rm --------------------------------------------------------------------------------------------------------------


def test_rm_of_a_namespace_and_of_everything(tmp_path: Path, store: Callable[..., Answer]) -> None:
    for tier in ("a", "b"):
        fill(tmp_path / tier, range(5), ONE)
        fill(tmp_path / tier, range(3), TWO)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    assert store("rm", "--namespace", ONE.hex(), "--dry-run")[1]["tiers"][0]["objects"] == {"deleted": 5}
    assert len(contents(tmp_path / "a")) == 8
    status, found, _ = store("rm", "--namespace", ONE.hex())
    assert (status, [t["objects"] for t in found["tiers"]]) == (0, [{"deleted": 5}, {"deleted": 5}])
    assert {name.partition("-")[0] for name in contents(tmp_path / "a")} == {TWO.hex()}
    status, _, err = store("rm", "--all")
    assert status == 1
    assert "add --yes" in err
    assert len(contents(tmp_path / "a")) == 3
    assert store("rm", "--all", "--yes")[0] == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == {}
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


def test_rm_of_a_namespace_by_how_it_begins(tmp_path: Path, store: Callable[..., Answer], capsys: Any) -> None:
    one, two = (bytes.fromhex(f"abcdef{i}0") + bytes(12) for i in (1, 2))
    fill(tmp_path / "a", range(5), one)
    fill(tmp_path / "b", range(3), two)
    fill(tmp_path / "b", range(2), ONE)
    assert main(["store", "rm", "--config", "kvcore.yaml", "--namespace", "abcdef", "--json"]) == 1
    assert capsys.readouterr().err == (
        "kvcore: rm: 2 namespaces begin with abcdef; nothing is deleted. Choose one: "
        f"{one.hex()} (disk), {two.hex()} (b)\n"
    )
    assert main(["store", "rm", "--config", "kvcore.yaml", "--namespace", "abcdee"]) == 1
    assert "no namespace begins with abcdee; see them with: kvcore store ls" in capsys.readouterr().err
    assert len(contents(tmp_path / "a")) == len(contents(tmp_path / "b")) == 5
    status, found, _ = store("rm", "--namespace", "abcdef2")
    assert (status, [t["objects"] for t in found["tiers"]]) == (0, [{}, {"deleted": 3}])
    assert store("rm", "--namespace", "abcdef", "--tier", "disk")[1]["tiers"][0]["objects"] == {"deleted": 5}
    assert len(contents(tmp_path / "b")) == 2


@pytest.mark.parametrize(("typed", "status"), [(b"yes\n", 0), (b"y\n", 1), (b"\x04", 1), (b"\x03", 130)])
def test_rm_asks_on_a_terminal(tmp_path: Path, typed: bytes, status: int) -> None:
    fill(tmp_path / "a", range(3))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        words = ["-m", "kvcore", "store", "rm", "--config", "kvcore.yaml", "--tier", "disk", "--all"]
        os.execve(sys.executable, [sys.executable, *words], clean_env())
    seen = b""
    while b"Type yes: " not in seen:
        seen += os.read(terminal, 1024)
    assert b"Delete everything in tier disk (3 objects, 36 KiB)?" in seen
    os.write(terminal, typed)
    _, ended = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(ended) == status
    assert len(contents(tmp_path / "a")) == (0 if status == 0 else 3)


# -- cp --------------------------------------------------------------------------------------------------------------


def test_cp_copies_frames_as_they_are_and_goes_on_where_it_ended(tmp_path: Path, store: Callable[..., Answer]) -> None:
    damaged = damage(tmp_path / "a")
    fill(tmp_path / "a", range(100, 130), TWO, nbytes=MIB)
    fill(tmp_path / "b", range(100, 110), TWO, nbytes=MIB)
    status, found, _ = store("cp", "disk", "b", "--dry-run")
    assert (status, found["objects"]) == (0, {"there": 10, "copied": 30})
    assert len(contents(tmp_path / "b")) == 10
    status, found, _ = store("cp", "disk", "b")
    assert (status, found["from"], found["to"]) == (1, "disk", "b")
    assert found["objects"] == {"there": 10, "copied": 23, "corrupt": 6, "version": 1}
    assert {n["object"] for n in found["named"]} == set(damaged)
    source = contents(tmp_path / "a")
    assert contents(tmp_path / "b") == {name: data for name, data in source.items() if name not in damaged}
    assert store("cp", "disk", "b")[1]["objects"] == {"there": 33, "corrupt": 6, "version": 1}


def test_cp_to_another_configuration_and_of_one_namespace(tmp_path: Path) -> None:
    fill(tmp_path / "a", range(5), ONE)
    fill(tmp_path / "a", range(3), TWO)
    (tmp_path / "other.yaml").write_text("l2: [{name: new, storage: {plugin: disk, path: far/away, capacity: 1GiB}}]\n")
    words = ["store", "cp", "disk", "new", "--config", "kvcore.yaml", "--to-config", "other.yaml"]
    done = kvcore(*words, "--namespace", TWO.hex(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "disk to new: 3 copied (36 KiB)\n"
    expected = {n: d for n, d in contents(tmp_path / "a").items() if n.startswith(TWO.hex())}
    assert contents(tmp_path / "far" / "away") == expected


def test_cp_warns_when_the_target_is_smaller(tmp_path: Path, store: Callable[..., Answer]) -> None:
    fill(tmp_path / "a", range(20), nbytes=MIB)
    status, found, err = store("cp", "disk", "b", "--set", "l2[1].storage.capacity=8MiB")
    assert sum(found["objects"].values()) == 20
    assert status == int("failed" in found["objects"])  # a batch that is larger than the target is refused its rest
    assert "tier disk holds 20.08 MiB, tier b has 8 MiB free of 8 MiB" in err
    assert 0 < len(contents(tmp_path / "b")) < 8


def test_an_interrupted_cp_is_resumed(tmp_path: Path) -> None:
    fill(tmp_path / "a", range(60), nbytes=4 * MIB)
    words = [sys.executable, "-m", "kvcore", "store", "cp", "disk", "b", "--config", "kvcore.yaml", "--json"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=clean_env()) as process:
        while not contents_count(tmp_path / "b"):
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    copied = contents_count(tmp_path / "b")
    if copied < 60:  # it may have been quicker than the signal
        assert process.returncode == 130
        assert "interrupted; run it again to go on. So far: " in err
    assert "Traceback" not in err
    done = kvcore("store", "cp", "disk", "b", "--config", "kvcore.yaml", "--json", cwd=tmp_path)
    result = json.loads(done.stdout)
    assert result["objects"].get("there", 0) >= copied
    assert sum(result["objects"].values()) == 60
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


def contents_count(path: Path) -> int:
    return len(list(path.glob("?/?/*")))


# -- beside others ---------------------------------------------------------------------------------------------------


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from store_samples import disk, key_of, put
storage = disk(Path(sys.argv[2]), "3MiB")
print("ready", flush=True)
for i in range(1_000_000):
    put(storage, range(7 * i, 7 * i + 7))
    storage.delete([key_of(i)])
"""


def test_beside_a_writer_that_stores_deletes_and_evicts(tmp_path: Path, store: Callable[..., Answer]) -> None:
    here = str(Path(__file__).parents[1])
    words = [sys.executable, "-c", WRITER, here, str(tmp_path / "a")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            for _ in range(5):
                status, found, _ = store("ls", "--tier", "disk")
                assert status == 0
                status, found, _ = store("verify", "--tier", "disk")
                assert status == 0, found
                assert set(found["tiers"][0]["objects"]) <= {"whole", "gone"}
                assert found["tiers"][0]["objects"]["whole"] > 0
            assert store("cp", "disk", "b")[0] == 0
            assert writer.poll() is None
        finally:
            writer.kill()
    assert store("verify", "--tier", "b")[0] == 0


def test_beside_an_engine(tmp_path: Path, store: Callable[..., Answer]) -> None:
    """An engine serves from the directory meanwhile: nothing is evicted, what is deleted is a miss for it."""
    (tmp_path / "engine.yaml").write_text(
        "l1: {size: 16MiB}\nl2: [{storage: {plugin: disk, path: a, capacity: 64MiB}, serde: [zstd]}]\n"
    )
    engine = CacheEngine.open("engine.yaml")
    group = GroupSpec(("a", "b"), (65536, 65536))
    space = engine.register(ModelSpec("t", "m", "w", "bfloat16", 2, "l", "b", "i", 32, 1, (group,)))
    hashes = [key_of(i).chunk_hash for i in range(6)]
    ids = [list(range(6 * space.chunk_blocks))]

    def compute_and_store() -> None:
        plan = engine.reserve(space, hashes, 0, 6, ids)
        engine.publish(plan.id)
        assert engine.drain() == 0
        engine.clear(space)

    def found() -> int:
        lookup = engine.lookup(space, hashes)
        assert lookup.wait(10)
        end = lookup.poll()
        engine.release(lookup)
        engine.clear(space)
        assert end is not None
        return end

    compute_and_store()
    assert found() == 6
    # The command line knows a smaller capacity than the engine. Looking must not evict.
    small = ["--tier", "disk", "--set", "l2[0].storage.capacity=100KiB"]
    assert store("ls", *small)[1]["tiers"][0]["objects"] == 6
    assert store("verify", *small)[1]["tiers"][0]["objects"] == {"whole": 6}
    assert found() == 6
    assert store("cp", "disk", "b")[1]["objects"] == {"copied": 6}
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    status, result, _ = store("rm", "--namespace", space.namespace.hex(), "--tier", "disk")
    assert (status, result["tiers"][0]["objects"]) == (0, {"deleted": 6})
    assert found() == 0
    compute_and_store()
    assert found() == 6
    engine.close()
    assert store("verify", "--tier", "disk")[1]["tiers"][0]["objects"] == {"whole": 6}


def test_looking_makes_nothing(tmp_path: Path, store: Callable[..., Answer]) -> None:
    status, found, err = store("ls", "--tier", "disk")
    assert status == 1
    missing = f"tier disk: nothing is stored yet: {tmp_path}/a does not exist. Is kvcore.yaml the engine's"
    assert found["tiers"][0]["error"].startswith(missing)
    assert f"kvcore: {missing}" in err
    status, found, err = store("cp", "disk", "b", "--dry-run")
    assert (status, found["error"].startswith(missing)) == (1, True)
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    assert store("ls", "--tier", "disk")[0] == 0
    assert not list((tmp_path / "a").iterdir())


def test_nothing_stored_and_no_configuration_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCORE_L2", f"[{{storage: {{plugin: disk, path: {tmp_path}/none}}}}]")
    assert main(["store", "ls", "--json"]) == 1
    err = capsys.readouterr().err
    assert err == (
        f"kvcore: tier disk: nothing is stored yet: {tmp_path}/none does not exist. No configuration was given: name "
        "the engine's with --config FILE or KVCORE_CONFIG\n"
    )


def test_large_objects_take_bounded_memory(tmp_path: Path) -> None:
    """2 GiB in objects of 32 MiB, which are holes on disk, so that they are all corrupt, but read none the less."""
    fill(tmp_path / "a", range(64), nbytes=64)
    for i in range(64):
        os.truncate(place(tmp_path / "a", key_of(i)), 32 * MIB)
    code = (
        "import sys\nfrom kvcore.cli import main\nstatus = main(sys.argv[1:])\n"
        "print([x for x in open('/proc/self/status') if x.startswith('VmHWM')][0].split()[1], file=sys.stderr)\n"
    )
    words = ["store", "verify", "--config", "kvcore.yaml", "--tier", "disk", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    tier = json.loads(done.stdout)["tiers"][0]
    assert (tier["objects"], tier["bytes"]) == ({"corrupt": 64}, {"corrupt": 2048 * MIB})
    assert int(done.stderr.splitlines()[-1]) * 1024 < 350 * MIB


# -- storages that misbehave -----------------------------------------------------------------------------------------


ODD = """
import asyncio, time
from kvcore.api import *
from store_samples import frame_of, key_of

class Config(PluginConfig):
    how: str = ""

class Base:
    persistent = True
    def __init__(self, config, context):
        self.how = config.how

class Blocking(Base, BlockingStorage):
    preferred_concurrency = 2
    def open(self):
        if self.how == "refuses": raise StorageError("nobody at 192.0.2.1:6379: start the server")
        if self.how == "breaks": raise RuntimeError("a bug")
    def exists(self, keys): return [False] * len(keys)
    def load(self, items):
        if self.how == "slow":
            open("begun", "w").close()
            time.sleep(0.5)
        if self.how == "fails": raise StorageError("the cable is out")
        if self.how == "holes": raise OSError(5, "Input/output error")
        if self.how == "lies": return [Loaded(1 << 40) for _ in items]
        return [fill(i.buffers, b"".join(frame_of(i.key))) for i in items]
    def store(self, items): return [Failed("no", "read_only") for _ in items]
    def delete(self, keys):
        if self.how == "keeps": self.exists = lambda keys: [True] * len(keys)
    def usage(self): return Usage(7, 1) if self.how == "mute" else None
    def list(self):
        if self.how == "mute": raise NotImplementedError
        if self.how == "odd list": return [("a", 1)]
        count = 1_000_000 if self.how in ("slow", "fails") else 300
        return (Entry(key_of(i), 12288) for i in range(count))

class Async(Base, Storage):
    held = {key_of(i): b"".join(frame_of(key_of(i))) for i in range(2500)}
    async def exists(self, keys): return [k in self.held for k in keys]
    async def load(self, items):
        return [fill(i.buffers, self.held[i.key]) if i.key in self.held else MISSING for i in items]
    async def store(self, items):
        self.held.update({i.key: b"".join(i.buffers) for i in items})
        return [STORED] * len(items)
    async def delete(self, keys):
        for k in keys: self.held.pop(k, None)
    async def list(self): return [Entry(k, len(v)) for k, v in self.held.items()]

@hookimpl
def kvcore_storage():
    return Component(api=ApiVersion(1, 0), config=Config, factory=FACTORY)
"""


@pytest.fixture
def odd(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages `odd` and `waits`; subprocesses see them, too."""
    for name, factory in (("odd", "Blocking"), ("waits", "Async")):
        source = ODD.replace("FACTORY", factory)
        dist(site, f"acme-{name}", {"kvcore.storage": {name: f"fake_{name}"}}, {f"fake_{name}": source})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(site), str(Path(__file__).parents[1]))))


def configure(tmp_path: Path, how: str, name: str = "odd") -> None:
    (tmp_path / "kvcore.yaml").write_text(
        f"l2:\n  - storage: {{plugin: {name}, how: {how}}}\n"
        "  - {name: b, storage: {plugin: disk, path: b, capacity: 1GiB}}\n"
    )


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("refuses", "tier odd: open: nobody at 192.0.2.1:6379: start the server"),
        ("breaks", "tier odd: open: RuntimeError: a bug"),
        ("mute", "tier odd: its storage cannot list what it holds"),
        ("odd list", "tier odd: list: gave ('a', 1), not an Entry"),
        ("fails", "given up after 10 failures in a row: the cable is out"),
    ],
)
def test_a_tier_that_cannot_be_examined(
    odd: None, tmp_path: Path, store: Callable[..., Answer], how: str, says: str
) -> None:
    """It is one clear sentence, and the other tiers are examined all the same."""
    fill(tmp_path / "b", range(3))
    configure(tmp_path, how)
    status, found, err = store("verify")
    assert status == 1
    assert found["tiers"][0]["error"] == says
    assert says in err
    assert found["tiers"][1]["objects"] == {"whole": 3}


def test_stat_of_a_storage_that_cannot_list(odd: None, tmp_path: Path, store: Callable[..., Answer]) -> None:
    configure(tmp_path, "mute")
    status, found, _ = store("stat", "--tier", "odd")
    assert status == 0
    counts = {"objects": 1, "bytes": 7, "capacity_bytes": None, "namespaces": None, "path": None}
    assert found["tiers"] == [{"tier": "odd", "storage": "odd", **counts}]


def test_a_storage_that_says_more_than_there_is(odd: None, tmp_path: Path, store: Callable[..., Answer]) -> None:
    configure(tmp_path, "lies")
    status, found, _ = store("verify", "--tier", "odd")
    assert (status, found["tiers"][0]["objects"]) == (1, {"failed": 300})
    assert "for a room of 12288 bytes" in found["tiers"][0]["named"][0]["reason"]


def test_some_unreadable_objects_do_not_end_the_pass(odd: None, tmp_path: Path, store: Callable[..., Answer]) -> None:
    configure(tmp_path, "holes")  # all five batches fail
    status, found, _ = store("verify", "--tier", "odd")
    assert (status, found["tiers"][0]["objects"]) == (1, {"failed": 300})
    assert found["tiers"][0]["named"][0]["reason"] == "OSError: [Errno 5] Input/output error"


def test_a_storage_that_does_not_delete(odd: None, tmp_path: Path, store: Callable[..., Answer]) -> None:
    configure(tmp_path, "keeps")
    status, found, _ = store("rm", "--tier", "odd", "--all", "--yes")
    assert (status, found["tiers"][0]["objects"]) == (1, {"kept": 300})


def test_a_target_that_refuses(odd: None, tmp_path: Path, store: Callable[..., Answer]) -> None:
    fill(tmp_path / "b", range(1000), nbytes=64)
    configure(tmp_path, "fine")
    status, found, err = store("cp", "b", "odd")
    assert status == 1
    assert found["error"] == "given up after 10 failures in a row: no"
    assert found["objects"]["failed"] >= 600
    assert "given up" in err


def test_an_asyncio_storage(odd: None, tmp_path: Path, store: Callable[..., Answer]) -> None:
    configure(tmp_path, "fine", "waits")
    assert store("ls", "--tier", "waits")[1]["tiers"][0]["objects"] == 2500
    assert store("cp", "waits", "b")[1]["objects"] == {"copied": 2500}
    assert store("rm", "--tier", "waits", "--all", "--yes")[1]["tiers"][0]["objects"] == {"deleted": 2500}
    assert store("cp", "b", "waits")[1]["objects"] == {"copied": 2500}
    assert store("verify")[0] == 0


def test_a_call_that_hangs_has_a_deadline(
    odd: None, tmp_path: Path, store: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "PATIENCE_S", 0.1)
    configure(tmp_path, "slow")
    status, found, _ = store("verify", "--tier", "odd", "--set", "l2[0].timeout=100ms")
    assert status == 1
    assert found["tiers"][0]["error"] == "given up after 10 failures in a row: odd: load took more than 0.1 s"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_midway(odd: None, tmp_path: Path, number: signal.Signals, status: int) -> None:
    configure(tmp_path, "slow")
    words = [sys.executable, "-m", "kvcore", "store", "verify", "--config", "kvcore.yaml", "--tier", "odd"]
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_env()
    ) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        begun = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (status, "")
    assert err.startswith("kvcore: tier odd: not finished. So far: ")
    assert "Traceback" not in err
    assert time.monotonic() - begun < 20


def test_a_tier_in_memory_is_passed_over(tmp_path: Path, store: Callable[..., Answer]) -> None:
    fill(tmp_path / "b", range(3))
    (tmp_path / "kvcore.yaml").write_text(
        "l2: [{storage: memory}, {name: b, storage: {plugin: disk, path: b, capacity: 1GiB}}]\n"
    )
    status, found, err = store("ls")
    assert status == 0
    assert "ends with it" in found["tiers"][0]["skipped"]
    assert found["tiers"][1]["objects"] == 3
    assert err.startswith("note: tier memory: ")
    assert store("ls", "--tier", "memory")[0] == 1
    assert store("cp", "b", "memory")[0] == 1


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_batches_stay_in_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "available_memory", lambda: 4 * 160 * MIB)
    sizes = [MIB // 16] * 500 + [30 * MIB] * 20 + [150 * MIB] * 3 + [12 * MIB, 5 * MIB] * 10 + [161 * MIB]
    entries = [Entry(key_of(i), size) for i, size in enumerate(sizes)]
    running: list[int] = []
    seen: list[Entry] = []
    most_bytes = most_calls = 0

    async def listing() -> Any:
        for at in range(0, len(entries), 100):
            yield entries[at : at + 100]

    async def handle(batch: Sequence[Entry]) -> None:
        nonlocal most_bytes, most_calls
        nbytes = sum(e.nbytes for e in batch)
        assert len(batch) <= walk.BATCH_OBJECTS
        assert nbytes <= walk.BATCH_BYTES or len(batch) == 1
        running.append(nbytes)
        most_calls = max(most_calls, len(running))
        if len(running) > 1:
            most_bytes = max(most_bytes, sum(running))
        await asyncio.sleep(0.001 * (nbytes % 7))
        running.remove(nbytes)
        seen.extend(batch)

    left = asyncio.run(walk.each_batch(listing(), handle, 8))
    assert [e.nbytes for e in left] == [161 * MIB]
    assert sorted(e.key for e in seen) == sorted(e.key for e in entries[:-1])
    assert most_bytes <= walk.MEMORY_BYTES
    assert 2 <= most_calls <= 8


def test_a_failing_batch_ends_the_others() -> None:
    ended = threading.Event()

    async def listing() -> Any:
        yield [Entry(key_of(i), 20 * MIB) for i in range(4)]

    async def handle(batch: Sequence[Entry]) -> None:
        if batch[0].key == key_of(1):
            raise ValueError("this one")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.set()
            raise

    with pytest.raises(ValueError, match="this one"):
        asyncio.run(walk.each_batch(listing(), handle, 4))
    assert ended.is_set()


# -- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["store"], 2, "ACTION"),
        (["store", "ls", "--namespace", "ab"], 2, "'ab' is no namespace: 32 characters of [0-9a-f]"),
        (["store", "rm", "--namespace", "abcde"], 2, "32 characters of [0-9a-f], or the first 6 or more"),
        (["store", "gc", "--unused-for", "30"], 2, "is not a duration: write a number and a unit, such as 30d or 12h"),
        (["replay", "x", "my.yml"], 2, "unrecognized arguments: my.yml (did you mean --config my.yml?)"),
        (["run", "vllm", "my.yml"], 2, "unrecognized arguments: my.yml (did you mean --config my.yml?)"),
        (["top", "my.yml"], 2, "kvcore top: error: unrecognized arguments: my.yml\n"),
        (["store", "ls", "--teir"], 2, "kvcore store ls: error: unrecognized arguments: --teir (did you mean --tier?)"),
        (["run", "vllm", "--conf=x"], 2, "unrecognized arguments: --conf=x (did you mean --config?)"),
        (
            ["run", "vllm", "--port", "1"],
            2,
            "arguments: --port 1: what is another program's stands behind",
        ),
        (["--verison"], 2, "(did you mean --version?)"),
        (["store", "ls", "disk"], 1, "disk: does not exist"),
        (["store", "rm", "--config", "kvcore.yaml"], 1, "rm: give either --namespace HEX or --all"),
        (["store", "rm", "--config", "kvcore.yaml", "--all", "--namespace", "ab" * 16], 1, "rm: give either"),
        (["store", "ls", "--config", "kvcore.yaml", "--tier", "c"], 1, "no tier is named 'c'; the tiers are disk, b"),
        (["store", "cp", "b", "b", "--config", "kvcore.yaml"], 1, "cp: b is both FROM and TO"),
        (["store", "ls", "--config", "none.yaml"], 1, "none.yaml"),
        (["store", "ls", "--config", "kvcore.yaml", "--set", "l2=[]"], 1, "kvcore.yaml has no tiers"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], words: list[str], status: int, says: str) -> None:
    assert main(words) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def test_progress_on_a_terminal(tmp_path: Path) -> None:
    fill(tmp_path / "a", range(200))
    own, theirs = pty.openpty()
    words = [sys.executable, "-m", "kvcore", "store", "verify", "--config", "kvcore.yaml", "--tier", "disk"]
    done = subprocess.run(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, env=clean_env(), check=False)
    os.close(theirs)
    seen = os.read(own, 1 << 16).decode()
    os.close(own)
    assert done.stdout == b"disk: 200 whole (2.344 MiB)\n"
    assert "reading disk [....................] 0/200 objects" in seen
    assert seen.endswith("\r\x1b[K"), "the line is taken away"


# -- the operators' page ---------------------------------------------------------------------------------------------


def test_the_commands_of_the_operators_page(tmp_path: Path) -> None:
    """In their order, over its own configuration; `doctor` has tests of its own, and takes its time, and so has what is
    asked of open caches."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
    (yaml,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.S | re.M)
    assert "/var/cache/kvcore" in yaml
    (tmp_path / "kvcore.yaml").write_text(yaml.replace("/var/cache/kvcore", "a").replace("100GiB", "1GiB"))
    (tmp_path / "new.yaml").write_text("l2: [{name: new, storage: {plugin: disk, path: new, capacity: 1GiB}}]\n")
    commands = re.findall(r"^ +(kvcore .*|curl .*)$", page, re.M)
    assert len(commands) == 19
    fill(tmp_path / "a", range(5), ONE)
    for command in commands:
        if command.startswith(("curl", "kvcore doctor", "kvcore pin", "kvcore clear")):
            continue
        if "cp" in command:
            fill(tmp_path / "a", range(5), TWO)  # what came before has removed everything
        words = command.replace("NAMESPACE", ONE.hex()).split()[1:]
        done = subprocess.run(
            [sys.executable, "-m", "kvcore", *words],
            cwd=tmp_path, env={**clean_env(), "KVCORE_CONFIG": "kvcore.yaml"}, capture_output=True, text=True,
            check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert contents(tmp_path / "new") == contents(tmp_path / "a")
    assert len(contents(tmp_path / "new")) == 5
