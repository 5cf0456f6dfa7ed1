"""Real LMCache runs in child processes, in an environment of its own: it cannot share vLLM's."""

import os
import sys
from pathlib import Path

import pytest

ENVIRONMENT = {
    "LMCACHE_LOG_LEVEL": "INFO",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


@pytest.fixture(scope="session")
def lmcache_python() -> Path:
    """The Python of the environment that has LMCache."""
    python = Path(os.environ.get("KVCORE_TEST_LMCACHE") or f"{sys.prefix}-lmcache/bin/python")
    assert python.is_file(), (
        f"{python} is not there: run `make setup-lmcache`, or let KVCORE_TEST_LMCACHE name a Python"
    )
    return python


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of a process that runs LMCache."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVCORE_", "LMCACHE_", "PYTEST_"))}
    return {**clean, **ENVIRONMENT}
