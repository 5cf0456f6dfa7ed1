"""Fixtures of the core's tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcore.testing import installed


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
