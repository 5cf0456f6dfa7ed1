"""The stand-in is found first: TensorRT-LLM itself is not installed where these tests run. Engines, and a server."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "standin"))

from trtllm_runtime import BLOCK, Patient, Replace, Runtime, Start, warm

from kvcore.testing.servers.kvcore import KVCoreServer
from kvcore_trtllm.worker import WorkerHalf

COMMON: dict[str, Any] = {"l1": {"size": "8MiB"}, "chunk_tokens": 2 * BLOCK, "lookup_timeout": "20s"}


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Replaces a copy of all workers, `load` or `save`, by `new(worker, job, original)`. Before an engine starts."""

    def put(which: str, new: Any) -> None:
        name = {"load": "_copy_in", "save": "_copy_out"}[which]
        original = getattr(WorkerHalf, name)
        monkeypatch.setattr(WorkerHalf, name, lambda half, job: new(half, job, lambda: original(half, job)))

    return put


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts an engine with a cache of its own, on a disk where `l2` says so; ready when every rank has its arena."""
    made: list[Runtime] = []

    def begin(
        ranks: int = 1, config: str = "", l2: str = "[]", lease: str = "60s", ready: bool = True, **more: Any
    ) -> Runtime:
        path = tmp_path / "kvcore.yaml"
        l1 = f"{{size: 8MiB, lease: {lease}}}"
        path.write_text(f"l1: {l1}\nchunk_tokens: {2 * BLOCK}\nlookup_timeout: 20s\nl2: {l2}\n")
        monkeypatch.setenv("KVCORE_CONFIG", config or str(path))
        engine = Runtime(ranks, scheduler=Patient, **more)
        made.append(engine)
        if ready:
            warm(engine)
        return engine

    yield begin
    faults = [engine.faults() for engine in made]
    for engine in made:
        engine.close()
    assert not any(faults), "nothing here is an error of the connector"


@pytest.fixture
def server() -> Iterator[KVCoreServer]:
    folder = Path(tempfile.mkdtemp(prefix="kvt"))  # a socket's path is short
    address = {"url": f"unix://{folder}/kvcore.sock", "timeout": "20s"}  # a busy machine is no server that hangs
    l2 = [{"storage": {"plugin": "disk", "path": str(folder / "disk")}}]
    made = KVCoreServer(folder, {**COMMON, "server": address, "l2": l2})
    made.start()
    yield made
    made.stop()
    shutil.rmtree(folder, ignore_errors=True)
