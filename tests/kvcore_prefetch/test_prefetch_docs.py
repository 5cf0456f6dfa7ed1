"""What docs/prefetch.md and the README show works."""

import re
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcore.config import load_config
from kvcore.engine import CacheEngine
from kvcore.plugins import Registry
from kvcore.testing import dist, installed
from kvcore.testing.chunks import hashes, put, spec

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "prefetch.md", ROOT / "plugins" / "hooks_prefetch" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_its_configuration_is_accepted(page: Path, tmp_path: Path) -> None:
    shown = re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.S | re.M)
    assert shown
    for text in shown:
        path = tmp_path / "kvcore.yaml"
        path.write_text(text)
        registry = Registry()
        config = load_config(str(path), registry=registry)
        registry.use_hooks(config.hooks)
        assert "prefetch" in str(yaml.safe_load(text)["hooks"])


def test_its_policy_of_your_own_takes_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n# file: hints.py\n(.*?)^```$", PAGES[0].read_text(), re.S | re.M)
    config: dict[str, Any] = {"l1.size": "8MiB", "l2": [{"storage": "memory"}], "min_object_size": "128KiB"}
    with tempfile.TemporaryDirectory(prefix="kv") as folder, installed(tmp_path / "site") as site:
        path = f"{folder}/hints"
        monkeypatch.setenv("HINTS_SOCKET", path)
        dist(site, "kvcore-hints", {"kvcore.hooks": {"hints": "kvcore_hints"}}, {"kvcore_hints": block})
        engine = CacheEngine.open(flags={**config, "hooks": ["hints"]})
        space = engine.register(spec())
        put(engine, space, hashes())
        engine.clear(space)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as router:
            router.sendto(b"no hint", path)
            router.sendto(" ".join(h.hex() for h in [space.namespace, *hashes()]).encode(), path)
        give_up = time.monotonic() + 30
        while engine.prefetcher.brought("hint").brought < len(hashes()):
            assert time.monotonic() < give_up
            time.sleep(0.01)
        engine.close()
