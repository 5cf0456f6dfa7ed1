"""Built wheels in an empty environment: `kvcore` alone, then with its plugins one by one. Needs the package index."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pythons
from docs_blocks import LANGUAGES, blocks, commands, lines, pages
from kvcore import __version__
from kvcore.api.hooks import GROUPS
from kvcore.plugins.known import BUILTINS, PACKAGES

ROOT = Path(__file__).parents[2]
PROJECTS = {
    project["name"]: (folder, project)
    for folder in [ROOT / "core", *sorted((ROOT / "plugins").iterdir())]
    if (folder / "pyproject.toml").is_file()
    for project in [tomllib.loads((folder / "pyproject.toml").read_text())["project"]]
}
PLUGINS = sorted(set(PROJECTS) - {"kvcore"})


def declared(distribution: str) -> set[tuple[str, str, str]]:
    """(kind, name, distribution) of each entry point in a package's pyproject.toml."""
    kinds = {group: kind for kind, group in GROUPS.items()}
    groups = PROJECTS[distribution][1].get("entry-points", {})
    return {(kinds[g], name, distribution) for g, names in groups.items() if g in kinds for name in names}


def run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=240, check=False, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """The wheel of each package, made from its source distribution, as `make dist` makes them."""
    out = tmp_path_factory.mktemp("wheels")
    for folder, _ in PROJECTS.values():
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, folder)
    run(sys.executable, "-m", "twine", "check", "--strict", *out.iterdir())
    built = {w.name.split("-")[0].replace("_", "-"): w for w in out.glob("*.whl")}
    assert set(built) == set(PROJECTS)
    return built


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as z:
        [name] = [n for n in z.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(z.read(name).decode())


def test_the_core_knows_its_own_entry_points():
    groups = PROJECTS["kvcore"][1]["entry-points"]
    assert {kind: dict(names) for kind, names in BUILTINS.items()} == {
        group.removeprefix("kvcore."): names for group, names in groups.items()
    }


def test_the_packages_known_to_the_core_give_the_names_it_says():
    for (kind, name), distribution in PACKAGES.items():
        if distribution in PROJECTS:
            assert (kind, name, distribution) in declared(distribution)
    for distribution in PLUGINS:
        for kind, name, _ in declared(distribution):
            assert PACKAGES[kind, name] == distribution


def test_all_packages_are_one_release(wheels):
    assert {metadata(wheel)["Version"] for wheel in wheels.values()} == {__version__}
    for wheel in wheels.values():
        assert len(list(wheel.parent.glob(f"{wheel.name.split('-')[0]}-{__version__}.tar.gz"))) == 1


def test_the_changelog_is_made_of_all_that_changed():
    """`make changelog`: a fragment of a kind that towncrier does not know would be left out without a word."""
    said = " ".join(
        run(sys.executable, "-m", "towncrier", "build", "--draft", "--version", "next", "--dir", ROOT).split()
    )
    fragments = [f for f in (ROOT / "changes").iterdir() if f.name != "template.md"]
    assert len(fragments) > 30
    for fragment in fragments:
        assert " ".join(fragment.read_text().removeprefix("- ").split()) in said, fragment.name


@pytest.mark.parametrize("distribution", sorted(PROJECTS))
def test_a_wheel_is_whole(wheels, distribution):
    with zipfile.ZipFile(wheels[distribution]) as z:
        names = z.namelist()
    package = distribution.replace("-", "_")
    assert f"{package}/__init__.py" in names
    assert f"{package}/py.typed" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {package}
    found = metadata(wheels[distribution])
    assert found["Requires-Python"] == ">=3.11"
    assert found["License-Expression"] == "Apache-2.0"
    assert len(found.get_payload()) > 200  # a README


def test_the_cores_wheel_has_every_file(wheels):
    """Also what is no module: templates, helpers for servers, the type marker."""
    with zipfile.ZipFile(wheels["kvcore"]) as z:
        shipped = {n for n in z.namelist() if n.startswith("kvcore/")}
    source = ROOT / "core" / "src"
    there = {str(p.relative_to(source)) for p in (source / "kvcore").rglob("*") if p.is_file()}
    assert shipped == {n for n in there if "__pycache__" not in n}
    assert {"kvcore/testing/servers/process.py", "kvcore/cli/templates/common/pyproject.toml.in"} < shipped


@pytest.mark.parametrize("distribution", PLUGINS)
def test_a_plugin_accepts_this_core_and_no_other_major(wheels, distribution):
    [core] = [
        r
        for r in map(Requirement, metadata(wheels[distribution]).get_all("Requires-Dist"))
        if r.name == "kvcore" and r.marker is None
    ]
    assert core.specifier.contains(__version__)
    assert not core.specifier.contains(f"{int(__version__.split('.')[0]) + 1}.0.0")


def test_pythons_are_those_of_the_page():
    """No package says more than the core, with whose Pythons CI runs tests (`tests/pythons.py`)."""
    those = {
        name: {c.rpartition(" ")[2] for c in project["classifiers"] if re.fullmatch(r".* :: Python :: 3\.\d+", c)}
        for name, (_, project) in PROJECTS.items()
    }
    assert all({"3.11"} <= said <= those["kvcore"] for said in those.values())
    [page] = re.findall(r"\*\*Python\.\*\* .*?\n\n", (ROOT / "docs" / "versions.md").read_text(), re.DOTALL)
    assert set(re.findall(r"\b3\.\d+", page)) == those["kvcore"]


def test_a_python_without_tests_is_said(tmp_path, monkeypatch, capsys):
    assert pythons.run_with("3.99", str(tmp_path / "absent"))
    assert capsys.readouterr().out == "NOT TESTED with Python 3.99: this machine has none\n"
    monkeypatch.setattr(pythons, "found", lambda version: sys.executable)
    monkeypatch.setattr(pythons, "needed", lambda: ["kvcore"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert pythons.run_with("3.99", str(tmp_path / "empty"))
    assert capsys.readouterr().out.startswith("NOT TESTED with Python 3.99: ERROR: Could not find a version")


def test_nothing_forces_a_torch_build(wheels):
    for wheel in wheels.values():
        needed = [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist") or []]
        always = {r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})}
        assert not always & {"torch", "vllm", "cupy", "cupy-cuda12x"}
    extras = set(metadata(wheels["kvcore"]).get_all("Provides-Extra"))
    assert {"torch", "cuda", "cli"} <= extras


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_subset_finds_exactly_its_plugins(wheels, tmp_path):
    """One environment that grows and shrinks; the index gives third-party dependencies only."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python, kvcore = tmp_path / "venv/bin/python", tmp_path / "venv/bin/kvcore"

    def pip(*arguments: object) -> None:
        run(sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", python, *arguments)

    def listed() -> set[tuple[str, str, str]]:
        found = json.loads(run(kvcore, "plugins", "list", "--json"))
        assert all(p["status"] == "ready" for p in found)
        return {(p["kind"], p["name"], p["distribution"]) for p in found}

    pip("install", wheels["kvcore"])
    here = declared("kvcore")
    assert listed() == here
    assert "Keep and share" in run(kvcore, "--help")
    run(kvcore, "plugins", "check")
    run(kvcore, "config", "show", "--json")
    run(python, "-c", "import importlib.util as u; assert not any(map(u.find_spec, ('torch', 'numpy', 'rich')))")
    for distribution in PLUGINS:
        pip("install", wheels[distribution])
        here |= declared(distribution)
        assert listed() == here
    run(kvcore, "plugins", "check")
    # Installed in alphabetical order and removed in the same one, so that most pairs and singles stand alone once.
    for distribution in PLUGINS:
        pip("uninstall", "-y", distribution)
        here -= declared(distribution)
        assert listed() == here
    config = tmp_path / "kvcore.yaml"
    config.write_text("l2: [{storage: disk}]\n")
    done = subprocess.run([str(kvcore), "config", "check", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install kvcore-disk" in done.stdout


def test_make_setup_says_each_step_before_it_takes_its_time():
    """Without making anything: what make would run."""
    lines = run("make", "-C", ROOT, "-n", "-B", "setup", "VENV=/nowhere").splitlines()
    steps = [i for i, line in enumerate(lines) if line.startswith('echo "')]
    count = len(steps)
    assert [lines[i].split()[1] for i in steps] == [f'"{n}/{count}' for n in range(1, count + 1)]
    slow = [i for i, line in enumerate(lines) if " -m venv " in line or " install " in line]
    assert len(slow) >= count > 3
    assert {max(s for s in steps if s < i) for i in slow} == set(steps)


def installed(folder: Path) -> set[str]:
    """The packages in a folder that pip has filled."""
    return {path.name.split("-")[0].replace("_", "-") for path in folder.glob("*.dist-info")}


def test_what_the_pages_install(wheels, tmp_path):
    """Every `pip install` of ours, by name out of these wheels; and README's from the checkout, as it stands there.
    What else is installed with them is in this environment."""
    named = {
        word.partition("[")[0]
        for page in pages()
        for block in blocks(page)
        if block.language in LANGUAGES and "pip install" in block.text
        for words in commands(block)
        for word in words
        if word.startswith("kvcore")
    } & set(PROJECTS)
    assert len(named) > 12
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
    run(*pip, "--find-links", wheels["kvcore"].parent, "--target", tmp_path / "named", *sorted(named))
    assert installed(tmp_path / "named") == named
    line = next(line for line in lines("README.md", "pip install ./core "))
    folders = [ROOT / word for word in shlex.split(line, comments=True)[2:]]
    run(*pip, "--no-build-isolation", "--target", tmp_path / "folders", *folders)
    assert installed(tmp_path / "folders") == {"kvcore", "kvcore-disk", "kvcore-zstd", "kvcore-vllm"}
