"""Settings for all tests: hypothesis without deadlines; in CI without shrinking and from a fixed seed. Signals as in a
terminal. Files that start engines come first."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from kvcore.testing import installed

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    derandomize=True,
    print_blob=True,
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Who starts the tests in the background, or with nohup, has these ignored: so would all programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ENGINES = ("vllm", "sglang", "lmcache")
"""Markers of what takes longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the processes that share the tests, none is to begin with an engine when the others are done."""
    first = {item.path for item in items if any(item.get_closest_marker(name) for name in ENGINES)}
    items.sort(key=lambda item: item.path not in first)


@pytest.fixture
def site(tmp_path):
    """A folder of fake distributions, first on the path; what is imported from it is forgotten afterwards."""
    with installed(tmp_path / "site") as folder:
        yield folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        yield Path(path)


@pytest.fixture
def alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this test's caches are seen, and no configuration from outside is read."""
    monkeypatch.setenv("KVCORE_RUN_DIR", str(folder / "run"))
    monkeypatch.delenv("KVCORE_CONFIG", raising=False)
