"""Real vLLM over every store, and over one that was written a moment ago."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from texts import same

from kvcore.testing.servers import ServerError
from kvcore.testing.servers.mooncake import mooncake_binary
from kvcore.testing.servers.network import PrivateNetwork

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NO_LEAKS = {"leases": 0, "staging": 0, "quarantined": 0, "plans": 0, "requests": 0}
REUSED = [1408, 512, 384, 0, 1408]


def judge(result: Any, plain: Any) -> None:
    """A second engine reused what the first one had stored, and said the same."""
    expected = [plain["long"], *plain["prompts"]]
    assert same(result["cold"], expected)
    assert same(result["hot"], expected)
    assert result["hot_cached"] == REUSED
    assert result["from_store"] > 0
    assert result["cold_leaks"] == result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


@pytest.fixture(scope="module")
def plain(run_child: Any) -> Any:
    return run_child("plain")["plain"]


@pytest.mark.parametrize("store", ["redis", "s3", "mooncake", "nixl"])
def test_a_store_serves_a_restarted_engine(run_child: Any, plain: Any, store: str, tmp_path: Path) -> None:
    if store == "mooncake":
        try:
            mooncake_binary("mooncake_master")
            with PrivateNetwork():
                pass
        except ServerError as error:
            pytest.skip(f"NOT TESTED: {error}")
    name = f'store_serves:{{"store": "{store}", "folder": "{tmp_path}"}}'
    judge(run_child(name)[name], plain)


def test_a_package_made_by_new_plugin_serves(
    run_child: Any, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, kept = tmp_path / "site", tmp_path / "kept"
    run = [sys.executable, "-m"]
    subprocess.run([*run, "kvcore", "new-plugin", "storage", "shelf", "--path", tmp_path], check=True)
    (package,) = (p.parent for p in tmp_path.glob("*/pyproject.toml"))
    install = ["pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site, package]
    subprocess.run([*run, *install], check=True)
    monkeypatch.setenv("PYTHONPATH", str(site))
    name = f'stored_serves:{{"storage": {{"plugin": "shelf", "path": "{kept}"}}}}'
    judge(run_child(name)[name], plain)
    assert any(kept.iterdir())
