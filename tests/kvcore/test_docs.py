"""What the documentation shows works: its files are written out, installed and run; its YAML is checked."""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from kvcore.config import load_config
from kvcore.observe import METRICS
from kvcore.plugins import Registry

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "write-a-plugin.md").read_text()
README = (ROOT / "README.md").read_text()
PAGES = sorted(p for w in ("*.md", "docs/*.md", "core/*.md", "plugins/*/*.md", "examples/*/*.md") for p in ROOT.glob(w))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.S | re.M)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's package, written as it says and installed into a folder of its own."""
    parent = tmp_path_factory.mktemp("plugin")
    (new,) = commands("kvcore new-plugin")
    assert run(parent, sys.executable, "-m", *new.split()).returncode == 0
    root = parent / "kvcore-sqlite"
    files = 0
    for language in ("toml", "python", "yaml"):
        for block in blocks(GUIDE, language):
            first, *lines = block.splitlines()
            if first.startswith("# in: "):
                there = (root / first.removeprefix("# in: ")).read_text().splitlines()
                assert set(lines) <= set(there), f"{first}: the guide shows lines that new-plugin does not write"
                continue
            if first.startswith("# add to: "):
                with (root / first.removeprefix("# add to: ")).open("a") as there_already:
                    there_already.write("\n".join(("", *lines, "")))
                continue
            assert first.startswith("# file: "), f"a block of the guide does not say which file it is: {first!r}"
            path = root / first.removeprefix("# file: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)
            files += 1
    assert files >= 16
    extra = {"serde": ["xor"], "eviction": ["oldest"], "keys": ["chain"], "hooks": ["observer", "readonly"]}
    with (root / "pyproject.toml").open("a") as toml:
        for kind, names in extra.items():
            toml.write(f'\n[project.entry-points."kvcore.{kind}"]\n')
            toml.writelines(f'{name} = "kvcore_sqlite.{name}"\n' for name in names)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*install, str(root / "site"), str(root)], check=True, capture_output=True, timeout=120)
    return root


def commands(start: str) -> list[str]:
    """The guide's command lines that start so."""
    return re.findall(rf"^    ({start}.*)$", GUIDE, re.M)


def run(package: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(package / "site"), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, cwd=package, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_the_guides_plugin_passes_its_own_tests(package: Path) -> None:
    done = run(package, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert " passed" in done.stdout


def test_the_guides_files_are_as_the_linter_wants_them(package: Path) -> None:
    """By the rules that new-plugin writes down."""
    done = run(package, sys.executable, "-m", "ruff", "check", "--no-cache", "src", "tests")
    assert done.returncode == 0, done.stdout
    done = run(package, sys.executable, "-m", "ruff", "format", "--check", "--no-cache", "src", "tests")
    assert done.returncode == 0, done.stdout


def test_the_guides_commands_work(package: Path) -> None:
    found = commands("kvcore (?!new-plugin)")
    assert len(found) >= 3
    (package / "all.db").touch()
    for command in found:
        done = run(package, sys.executable, "-m", *command.split())
        assert done.returncode == 0, done.stdout + done.stderr
        if "--quality" in command:
            assert " silver" in done.stdout.splitlines()[0]


def test_the_guides_configurations_are_accepted(package: Path) -> None:
    for file in package.glob("*.yaml"):
        done = run(package, sys.executable, "-m", "kvcore", "config", "check", file.name)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run(package, sys.executable, "-m", "kvcore", "plugins", "show", "sqlite")
    assert done.returncode == 0, done.stderr
    assert "The database file." in done.stdout


def test_the_guides_other_plugins_run_together(package: Path) -> None:
    script = """
import pathlib, logging
from kvcore.api import KeySource
logging.basicConfig(level=logging.INFO)
from kvcore.engine import CacheEngine, GroupSpec, ModelSpec
pathlib.Path("all.yaml").write_text('''
l1: {size: 16MiB, eviction: oldest}
l2: [{storage: {plugin: sqlite, path: all.db}, serde: [xor]}]
keys: chain
hooks: [observer]
''')
engine = CacheEngine.open("all.yaml")
space = engine.register(ModelSpec("t", "m", "w", "bf16", 2, "l", "b", "i", 16, 1, (GroupSpec(("a",), (65536,)),)))
keys = space.hashes(KeySource(space.chunk_tokens, 16, range(3 * space.chunk_tokens)))
ids = [list(range(3 * space.chunk_blocks))]
plan = engine.reserve(space, keys, 0, 3, ids)
engine.publish(plan.id)
engine.drain()
engine.clear(space)
lookup = engine.lookup(space, keys)
assert lookup.wait(10) and lookup.poll() == 3, (lookup.poll(), lookup.misses)
engine.release(lookup)
engine.close()

text = pathlib.Path("all.yaml").read_text().replace("observer", "readonly")
pathlib.Path("all.yaml").write_text(text)
engine = CacheEngine.open("all.yaml")
space = engine.register(space.spec)
more = space.hashes(KeySource(space.chunk_tokens, 16, range(5 * space.chunk_tokens)))
plan = engine.reserve(space, more, 3, 5, [list(range(5 * space.chunk_blocks))])
engine.publish(plan.id)
engine.drain()
engine.clear(space)
lookup = engine.lookup(space, more)
assert lookup.wait(10) and lookup.poll() == 3, (lookup.poll(), lookup.misses)
assert engine.stats()['kvcore_tier_operations_total{tier="sqlite",op="store",outcome="read_only"}'] == 2
engine.release(lookup)
engine.close()
"""
    done = run(package, sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert "objects are now in sqlite" in done.stderr


def test_the_guides_numbers_are_called_as_it_says(package: Path) -> None:
    (name,) = re.findall(r"^`(kvcore_plugin_sqlite\S+)`", GUIDE, re.M)
    script = """
import sys
from kvcore.api import Context, PluginMetrics
from kvcore.observe import Metrics
from kvcore.testing.memory import make_key
from kvcore_sqlite.counted import CountedStorage
from kvcore_sqlite.storage import SqliteConfig
metrics = Metrics()
own = PluginMetrics("sqlite", "l2[0].storage", metrics.registry)
storage = CountedStorage(SqliteConfig(path="counted.db"), Context(metrics=own))
storage.open()
assert storage.exists([make_key(1), make_key(2)]) == [False, False]
assert metrics.values()[sys.argv[1]] == 2
"""
    done = run(package, sys.executable, "-c", script, name)
    assert done.returncode == 0, done.stderr


def test_the_readme_backend_is_the_guides_and_short() -> None:
    (readme,) = [b for b in blocks(README, "python") if "SqliteStorage" in b]
    lines = [line for line in readme.splitlines() if line.strip()]
    assert len(lines) <= 40
    (guide,) = [b for b in blocks(GUIDE, "python") if "class SqliteStorage" in b]
    for line in lines:
        assert line in guide, f"the README shows a line that the tested guide lacks: {line}"


def test_the_readmes_yaml_is_ten_lines_and_valid(tmp_path: Path) -> None:
    (text,) = blocks(README, "yaml")
    assert len(text.splitlines()) <= 10
    path = tmp_path / "kvcore.yaml"
    path.write_text(text)
    config = load_config(str(path), env={}, registry=Registry())
    assert config.l1.size == 8 << 30


def test_the_readmes_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.M)
    assert len(found) >= 6
    for target in found:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_code_that_kv_passes_through_is_as_long_as_the_readme_says() -> None:
    said = re.search(r"KV passes through \((.*?)\)\s+is some\s+([\d,]+)\s+lines\s+of\s+code,\s+([\d,]+)\s+with", README)
    assert said
    files = [f for p in re.findall(r"`(\w+)`", said[1]) for f in (ROOT / "core/src/kvcore" / p).rglob("*.py")]
    counts = sum(len(code_lines(f.read_text())) for f in files), sum(len(f.read_text().splitlines()) for f in files)
    assert [int(n.replace(",", "")) for n in said.groups()[1:]] == pytest.approx(counts, rel=0.1)


def test_the_hour_with_the_code_leads_through_files_that_are_there_and_is_as_long_as_it_says() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = re.search(r"## An hour with the code\n\nSome ([\d,]+) lines(.*?)\nThen by need:(.*?)\n## ", text, re.S)
    assert found
    path, by_need = (re.findall(r"`(\w+/[\w/]*(?:\.py|/))`", part) for part in found.groups()[1:])
    core = ROOT / "core/src/kvcore"
    assert len(path) >= 15
    for name in (*path, *by_need):
        assert (core / name).exists(), f"docs/architecture.md names {name}"
    lines = sum(len((core / name).read_text().splitlines()) for name in path if name.endswith(".py"))
    assert int(found[1].replace(",", "")) == pytest.approx(lines, rel=0.1)


def code_lines(text: str) -> set[int]:
    """Lines that hold more than a comment or a docstring."""
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in nothing]
    strings = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    documented = {n for node in strings for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return {n for t in tokens for n in range(t.start[0], t.end[0] + 1)} - documented


def anchors(page: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there.read_text()), f"{page.name} links to {target}#{anchor}"


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    for name in METRICS:
        assert f"`kvcore_{name}" in text, f"docs/metrics.md lacks kvcore_{name}"
