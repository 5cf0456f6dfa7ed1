"""Runs tests of the core with the other Pythons that it is said to run with: `python tests/pythons.py ENVIRONMENTS`.

Which those are say the classifiers in core/pyproject.toml. Each has an environment of its own, ENVIRONMENTS-python3.X,
without torch, of which there need not be a build for it. Where this machine has no such Python, or the package index no
wheels for it, one line says NOT TESTED. Ends with 0 unless a test has failed.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "plugins/storage_disk", "plugins/serde_zstd")
EXTRAS = ("cli", "http", "testing")
TOOLS = ("hatchling", "editables", "openapi-spec-validator", "pytest-timeout", "pytest-xdist")
TESTS = (
    "test_arena.py",
    "test_builtin_*.py",
    "test_config.py",
    "test_engine.py",
    "test_imports.py",
    "test_l1*.py",
    "test_plugins*.py",
    "test_running.py",
    "test_threads.py",
    "test_tier.py",
    "test_tiers_changing.py",
    "service/test_service_wire.py",
    "service/http/test_*.py",
)
"""Below tests/kvcore: what starts processes and threads, imports, parses, and is on KV's path. None needs torch."""


def said() -> list[str]:
    """Versions of Python that the core is said to run with."""
    lines = project("core")["classifiers"]
    return [m[1] for line in lines if (m := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))]


def project(folder: str) -> dict:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def found(version: str) -> str | None:
    """A Python of this version: on the path, or one of pyenv's."""
    name = f"python{version}"
    versions = Path.home() / ".pyenv" / "versions"
    for python in [shutil.which(name), *map(str, sorted(versions.glob(f"{version}.*/bin/{name}"), reverse=True))]:
        # What is on the path may only say that it is not there; Debian's may lack venv.
        if python and not quiet(python, "-c", "import ensurepip, venv").returncode:
            return python
    return None


def needed() -> list[str]:
    """What the packages need of others, and the tests."""
    core = project("core")
    all_needed = [r for folder in PACKAGES for r in project(folder)["dependencies"]]
    all_needed += [r for extra in EXTRAS for r in core["optional-dependencies"][extra]]
    return [r for r in all_needed if not r.startswith("kvcore")] + list(TOOLS)


def quiet(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def run_with(version: str, folder: str) -> bool:
    """Whether no test has failed with this Python, in an environment in `folder`."""
    python = found(version)
    if python is None:
        print(f"NOT TESTED with Python {version}: this machine has none", flush=True)
        return True
    mine = f"{folder}/bin/python"
    pip = (mine, "-m", "pip", "--disable-pip-version-check", "-q", "install")
    made = quiet(python, "-m", "venv", folder)
    if not made.returncode:
        made = quiet(*pip, "--only-binary", ":all:", "-c", "constraints.txt", *needed())
    if made.returncode:
        why = [line for line in (made.stdout + made.stderr).splitlines() if line.startswith("ERROR")]
        print(f"NOT TESTED with Python {version}: {' '.join(why) or made.stderr.strip()}", flush=True)
        return True
    ours = [word for p in PACKAGES for word in ("-e", f"./{p}")]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", *ours], check=True, cwd=ROOT)
    print(f"Tests of the core with Python {version}", flush=True)
    files = {name: sorted((ROOT / "tests/kvcore").glob(name)) for name in TESTS}
    assert all(files.values()), files
    options = ("-q", "-n", "2", "--dist", "loadfile", "-m", "not slow", *map(str, chain(*files.values())))
    # As in CI's own run, what has failed beside others has one more try alone.
    tries = (("-m", "pytest", *options), ("tests/again.py",))
    return any(not subprocess.run([mine, *words], check=False, cwd=ROOT).returncode for words in tries)


def main(environments: str) -> int:
    start = Path(environments).absolute()
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    passed = [run_with(version, f"{start}-python{version}") for version in said() if version != here]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
