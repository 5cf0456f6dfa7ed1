"""The adapter on LMCache's own objects, in a process of LMCache's environment."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

INSIDE = Path(__file__).resolve().parent / "inside"
PYTEST = ["-q", "-c", "/dev/null", "-o", "python_functions=check_*", "-p", "no:cacheprovider", "--confcutdir", INSIDE]


@pytest.mark.lmcache
@pytest.mark.timeout(900)  # importing LMCache alone takes long on a busy machine
def test_adapter(lmcache_python: Path, environment: Mapping[str, str]) -> None:
    command = [lmcache_python, "-m", "pytest", *PYTEST, INSIDE / "check_adapter.py", INSIDE / "check_settings.py"]
    done = subprocess.run(
        command, env=dict(environment), cwd=INSIDE, capture_output=True, text=True, timeout=880, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert re.match(r"\d+ passed", last), last
    assert "skipped" not in last
