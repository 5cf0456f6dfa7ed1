"""Across processes: a real model whose prefix comes from disk in another process, and caches that share a server."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers_small import cached, gqa, plain, tokens, yaml

from kvcore.testing.servers.kvcore import KVCoreServer
from kvcore_transformers import PrefixCache

HERE = Path(__file__).resolve().parent
MAKER = HERE.parents[1] / "examples" / "models" / "smollm2.py"
TOKENS = 192


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real model: in `KVCORE_TEST_MODELS`, or made anew."""
    given = os.environ.get("KVCORE_TEST_MODELS")
    folder = (Path(given) if given else tmp_path_factory.mktemp("models")) / "smollm2-f32"
    subprocess.run([sys.executable, str(MAKER), str(folder), "--dtype", "float32"], check=True, capture_output=True)
    return folder


def child(config: str, model: Path) -> dict[str, Any]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "transformers_child.py"), config, str(model), str(TOKENS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_real_model_in_another_process_says_the_same_from_disk(smollm2: Path, tmp_path: Path) -> None:
    config = yaml(tmp_path, f"[{{storage: {{plugin: disk, path: {tmp_path}/disk}}}}]")
    cold = child(config, smollm2)
    assert (cold["reused"], cold["refused"], cold["waiting"]) == (0, "", 0)
    assert cold["text"] == cold["plain"]
    hot = child(config, smollm2)
    assert hot["refused"] == ""
    assert hot["reused"] >= TOKENS - 32
    assert hot["text"] == cold["text"]


@pytest.fixture
def server() -> Iterator[KVCoreServer]:
    folder = Path(tempfile.mkdtemp(prefix="kvh"))  # a socket's path is short
    made = KVCoreServer(folder, {"l1": {"size": "64MiB"}, "l2": [], "chunk_tokens": 32, "lookup_timeout": "20s"})
    made.start()
    yield made
    made.stop()
    shutil.rmtree(folder, ignore_errors=True)


def connected(model: Any, server: KVCoreServer) -> PrefixCache:
    cache = PrefixCache(model, str(server.config), flags={"server.timeout": "5s"})
    wait(cache)
    return cache


def wait(cache: PrefixCache) -> None:
    give_up = time.monotonic() + 30
    while cache.engine.descriptor() is None:
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_server_is_shared_and_may_be_killed(server: KVCoreServer) -> None:
    model, prompt = gqa(), tokens(100)
    expected = plain(model, prompt)
    with connected(model, server) as one, connected(gqa(), server) as two:
        assert torch.equal(cached(one, prompt), expected)
        assert torch.equal(cached(two, prompt), expected)
        assert (two.last.reused_tokens, two.last.refused) == (96, "")
        server.kill()
        assert torch.equal(cached(two, prompt), expected)
        assert two.last.reused_tokens == 0
        server.start()
        wait(two)
        for _ in range(2):
            assert torch.equal(cached(two, prompt), expected)
        assert two.last.reused_tokens == 96


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "kvcore.yaml"
    path.write_text(f"server: unix://{tempfile.gettempdir()}/kvcore-nobody-{os.getpid()}.sock\n")
    with PrefixCache(gqa(), str(path)) as cache:
        assert torch.equal(cached(cache, tokens(100)), plain(cache.model, tokens(100)))
        assert cache.last.reused_tokens == 0
