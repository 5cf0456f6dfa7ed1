"""Each module of the core imports alone and without a warning; start-up is light."""

import pkgutil
import subprocess
import sys

import pytest

import kvcore

HEAVY = ("torch", "pydantic", "yaml", "numpy", "msgspec", "prometheus_client", "rich", "pytest", "hypothesis")
MODULES = sorted(m.name for m in pkgutil.walk_packages(kvcore.__path__, "kvcore.") if m.name != "kvcore.__main__")

ALL_ALONE = """
import importlib, sys
names = sys.argv[1:]
before = set(sys.modules)
for name in names:
    for loaded in [m for m in sys.modules if m == "kvcore" or m.startswith("kvcore.")]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except BaseException as e:
        print(f"{name}: {type(e).__name__}: {e}")
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=280)


def test_each_module_imports_with_no_other_before_it():
    """Cycles show when a module is the first of the package; warnings are errors."""
    needing_extras = [] if _has("hypothesis") else [m for m in MODULES if m.startswith("kvcore.testing")]
    needing_extras += [] if _has("torch") else ["kvcore.transfer.tensors"]
    done = python("-W", "error", "-c", ALL_ALONE, *(m for m in MODULES if m not in needing_extras))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "module", ["kvcore.api", "kvcore.config.load", "kvcore.plugins", "kvcore.engine", "kvcore.cli"]
)
def test_a_module_in_a_process_of_its_own(module):
    done = python("-W", "error", "-c", f"import {module}")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_caches_show_needs_nothing_of_http():
    names = "routes", "clearing", "door", "client"
    wanted = ", ".join(f"kvcore.service.inspect.{name}" for name in names)
    code = f"import sys, {wanted}\nprint([m for m in sys.modules if m.startswith('kvcore.service.http')])"
    assert python("-c", code).stdout == "[]\n"


@pytest.mark.parametrize(
    "code",
    [
        "import kvcore",
        "import kvcore.api",
        "import kvcore.plugins",
        "import kvcore.config",
        "import kvcore.cli",
        "from kvcore.cli import main; main(['--help'])",
        "from kvcore.cli import main; main(['--version'])",
        "from kvcore.cli import main; main(['plugins', 'list', '--json'])",
    ],
)
def test_what_must_start_fast_imports_nothing_heavy(code):
    script = f"import sys\n{code}\nprint('\\nheavy:', [m for m in {HEAVY!r} if m in sys.modules])"
    done = python("-c", script)
    assert done.stdout.splitlines()[-1] == "heavy: []", done.stdout + done.stderr


def test_listing_imports_no_plugin():
    script = (
        "import sys\nfrom kvcore.cli import main\nmain(['plugins', 'list', '--json'])\n"
        "print('\\n', [m for m in sys.modules if m.startswith(('kvcore.builtin', 'kvcore_'))])"
    )
    assert python("-c", script).stdout.splitlines()[-1].strip() == "[]"


@pytest.mark.parametrize(
    ("code", "most"), [("import kvcore", 1), ("from kvcore.cli import main; main(['--help'])", 170)]
)
def test_start_up_is_light(code, most):
    """Modules and memory, which are the same on every machine; `kvcore bench` has the seconds."""
    script = (
        f"import sys\nbefore = set(sys.modules)\n{code}\nafter = len(set(sys.modules) - before)\n"
        "[line] = [line for line in open('/proc/self/status') if line.startswith('VmHWM:')]\n"
        "print(f'\\n{after} {line.split()[1]}')"
    )
    modules, kib = map(int, python("-c", script).stdout.splitlines()[-1].split())
    assert 0 < modules <= most
    assert kib <= 60 << 10


def _has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None
