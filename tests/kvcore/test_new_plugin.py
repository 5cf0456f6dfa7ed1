"""`kvcore new-plugin`: what it writes works, of every kind and with any name it takes; names it does not take."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import main
from kvcore.cli.new_plugin import MAX_NAME, render
from kvcore.testing import dist

KINDS = ("storage", "serde", "eviction", "keys", "hooks")
LONGEST = "a2345-789012-45678-0123w"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of each kind, and all of them installed into the folder `site`."""
    root = tmp_path_factory.mktemp("new")
    for kind in KINDS:
        assert main(["new-plugin", kind, f"toy-{kind}", "--path", str(root)]) == 0
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", root / "site"]
    subprocess.run([*pip, *root.glob("kvcore-*")], check=True, capture_output=True, timeout=120)
    return root


def run(root: Path, *command: object, cwd: Path | None = None) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVCORE_")}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd or root,
        env={**env, "PYTHONPATH": str(root / "site")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_its_tests_pass(root: Path, kind: str) -> None:
    out = run(root, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=root / f"kvcore-toy-{kind}")
    assert " passed" in out


def test_its_types_are_strict(root: Path) -> None:
    folders = [package / part for package in root.glob("kvcore-*") for part in ("src", "tests")]
    assert "no issues found in 20 source files" in run(root, "-m", "mypy", "--strict", "--cache-dir=mypy", *folders)


def test_it_is_listed_checked_and_at_least_silver(root: Path) -> None:
    listed = json.loads(run(root, "-m", "kvcore", "plugins", "list", "--json"))
    mine = {p["kind"]: p for p in listed if p["distribution"].startswith("kvcore-toy-")}
    assert sorted(mine) == sorted(KINDS)
    assert all(p["status"] == "ready" and p["module"] == f"kvcore_toy_{kind}.plugin" for kind, p in mine.items())
    levels = {}
    for kind in KINDS:
        out = run(root, "-m", "kvcore", "plugins", "check", f"toy-{kind}", "--quality", "--json")
        levels[kind] = json.loads(out)["plugins"][0]["level"]
    assert levels == {"storage": "silver", "serde": "silver", "eviction": "gold", "keys": "silver", "hooks": "gold"}


SCRIPT = """
from kvcore.api import KeySource
from kvcore.engine import CacheEngine, GroupSpec, ModelSpec
engine = CacheEngine.open("kvcore.yaml")
space = engine.register(ModelSpec("t", "m", "w", "bf16", 2, "l", "b", "i", 16, 1, (GroupSpec(("a",), (65536,)),)))
keys = space.hashes(KeySource(space.chunk_tokens, 16, range(3 * space.chunk_tokens)))
plan = engine.reserve(space, keys, 0, 3, [list(range(3 * space.chunk_blocks))])
engine.publish(plan.id)
assert engine.drain() == 0
engine.clear(space)
lookup = engine.lookup(space, keys)
assert lookup.wait(10) and lookup.poll() == 3, (lookup.poll(), lookup.misses)
engine.release(lookup)
print([type(x).__name__ for x in (engine.manager.tiers[0].storage, engine.l1._pool._policy, space._keys)])
print(int(engine.stats()['kvcore_plugin_toy_hooks__stored_total{place="hooks[0]",tier="toy-storage"}']))
engine.close()
"""


def test_yaml_selects_them(root: Path) -> None:
    (root / "kvcore.yaml").write_text(
        "l1: {size: 16MiB, eviction: toy-eviction}\nkeys: toy-keys\nhooks: [toy-hooks]\n"
        f"l2: [{{storage: {{plugin: toy-storage, path: '{root / 'objects'}'}}, serde: [toy-serde]}}]\n"
    )
    run(root, "-m", "kvcore", "config", "check", "kvcore.yaml")
    assert run(root, "-c", SCRIPT).split() == ["['ToyStorageStorage',", "'ToyEvictionPolicy',", "'ToyKeysKeys']", "3"]
    assert len(list((root / "objects").iterdir())) == 3


def test_any_name_gives_clean_code(tmp_path: Path) -> None:
    assert len(LONGEST) == MAX_NAME
    for kind in KINDS:
        for name in ("x", "my-own", LONGEST):
            assert main(["new-plugin", kind, name, "--path", str(tmp_path / kind)]) == 0
    for arguments in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        ruff = [sys.executable, "-m", "ruff", *arguments, tmp_path]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout


def test_a_storage_is_under_forty_lines() -> None:
    source = render("storage", "toy")["src/kvcore_toy/storage.py"]
    tree = ast.parse(source)
    counted: set[int] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            counted.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = [line for i, line in enumerate(source.splitlines(), 1) if i in counted and line.strip()]
    assert 30 < len([line for line in lines if not line.strip().startswith('"""')]) < 40


# --- the command


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", "storage", "my-store", "--path", str(tmp_path / "deep" / "er"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    package = tmp_path / "deep" / "er" / "kvcore-my-store"
    assert facts == {
        "kind": "storage",
        "name": "my-store",
        "distribution": "kvcore-my-store",
        "module": "kvcore_my_store",
        "path": str(package),
        "files": sorted(str(p.relative_to(package)) for p in package.rglob("*") if p.is_file()),
    }
    assert {"LICENSE", "README.md", "pyproject.toml", "src/kvcore_my_store/py.typed"} < set(facts["files"])


def test_it_says_what_comes_next(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", "serde", "my-own"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("kvcore-my-own: 8 files; it works as it is. Next:\n  cd kvcore-my-own\n")
    assert "edit src/kvcore_my_own/serde.py" in out
    assert main(["new-plugin", "hooks", "my-watch"]) == 0
    assert "edit src/kvcore_my_watch/observer.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("My-Store", "is no name: use lowercase letters"),
        ("my_store", "is no name"),
        ("-store", "NAME"),
        ("9store", "is no name"),
        ("my--store", "is no name"),
        ("store-", "is no name"),
        ("../evil", "is no name"),
        ("", "is no name"),
        ("x" * (MAX_NAME + 1), f"at most {MAX_NAME} characters"),
        ("kvcore-store", "write 'store', the package gets its `kvcore-` by itself"),
        ("memory", "'memory' is a built-in storage of kvcore, and such names are reserved"),
        ("faulty", "such names are reserved"),
        ("redis", "'kvcore-redis' is a package of kvcore's own"),
        ("vllm", "'kvcore-vllm' is a package of kvcore's own"),
        ("acme", "is the name of an installed storage plugin, acme (kvcore-acme 1.0)"),
    ],
)
def test_names_that_it_does_not_take(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    dist(site, "kvcore-acme", {"kvcore.storage": {"acme": "fake_acme"}})
    target = tmp_path / "target"
    assert main(["new-plugin", "storage", name, "--path", str(target)]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert not target.exists()


def test_a_builtin_of_another_kind_is_no_hindrance(tmp_path: Path) -> None:
    assert main(["new-plugin", "serde", "memory", "--path", str(tmp_path)]) == 0


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "kvcore-toy"
    package.mkdir()
    for _ in range(2):
        assert main(["new-plugin", "keys", "toy", "--path", str(tmp_path)]) == 1
        assert f"{package} is there already: nothing is overwritten" in capsys.readouterr().err
        assert list(package.iterdir()) == []
    (tmp_path / "file").touch()
    assert main(["new-plugin", "keys", "toy", "--path", str(tmp_path / "file" / "x")]) == 1
    err = capsys.readouterr().err
    assert "cannot be written: Not a directory" in err
    assert "Traceback" not in err
