"""`kvcore run vllm` starts a real server that uses kvcore, and after a restart reuses what it had computed."""

import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcore.cli import main
from kvcore.service.inspect import ask, caches
from kvcore.testing.servers import Server, free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

HERE = Path(__file__).resolve().parent
READY_S = 600.0
CHUNKS = 4
TOKENS = 128 * CHUNKS + 50
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": os.pathsep.join(map(str, (HERE / "offload_plugin", HERE.parents[1] / "benchmarks"))),
}


class Run(Server):
    """`kvcore run vllm` with a tiny model."""

    def __init__(self, folder: Path, model: Path, via: str) -> None:
        self.port = free_port()
        tier = {"storage": {"plugin": "disk", "path": str(folder / "cache"), "capacity": "1GiB"}, "read": "always"}
        values = {"l1": {"size": "64MiB"}, "l2": [tier], "chunk_tokens": 128, "lookup_timeout": "20s"}
        (folder / "kvcore.yaml").write_text(yaml.safe_dump(values))
        words = ["serve", str(model), "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--enable-prompt-tokens-details"]
        command = [sys.executable, "-m", "kvcore", "run", "vllm", "--via", via, "--config", "kvcore.yaml"]
        super().__init__("vllm", [*command, "--", *words], ready=self._healthy, folder=folder, env=ENVIRONMENT)

    def asked(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def complete(self, prompt: list[int]) -> tuple[str, int]:
        """The text, and how many tokens of the prompt were not computed."""
        body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        status, answer = self.asked("POST", "/v1/completions", body)
        assert status == 200, answer
        found = json.loads(answer)
        return found["choices"][0]["text"], (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    def _healthy(self) -> bool:
        return self.asked("GET", "/health")[0] == 200


def written(folder: Path) -> int:
    """Objects on the disk."""
    return sum(f.is_file() and f.stat().st_size > 16 << 10 for f in folder.rglob("*"))


def shown(folder: Path, prompt: list[int]) -> None:
    """The engine is asked through its own socket, with nothing configured: its last request came from the disk."""
    (cache,) = caches()
    assert cache.name in ("vllm", "vllm-tier")
    status = ask(cache, "/status")
    assert [tier["name"] for tier in status["tiers"]] == ["disk"]
    request = ask(cache, "/requests?limit=1")["requests"][0]
    assert (request["chunks"], request["answer"], request["retrieved"]) == (CHUNKS, CHUNKS, 128 * CHUNKS)
    assert request["sources"] == {"disk": CHUNKS}
    if status["kind"] == "engine":
        assert (request["tokens"], request["id"][:5]) == (len(prompt), "cmpl-")
    out = folder / "trace.jsonl"
    assert main(["record", str(out), "--past", "--seconds", "0"]) == 0
    assert [len(json.loads(line)["hash_ids"]) for line in out.read_text().splitlines()][-1] == CHUNKS


@pytest.mark.parametrize("via", ["connector", "tier"])
def test_a_server_started_by_kvcore_run(
    models: Path, tmp_path: Path, via: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tempfile.mkdtemp()  # a socket's path must be short
    monkeypatch.setenv("KVCORE_RUN_DIR", run)
    numbers = random.Random(5)
    prompt = [numbers.randrange(3, 1000) for _ in range(TOKENS)]
    server = Run(tmp_path, models / "tiny", via)
    server.start(READY_S)
    try:
        first, cached = server.complete(prompt)
        assert cached == 0
        give_up = time.monotonic() + 60
        while written(tmp_path / "cache") < CHUNKS:
            assert time.monotonic() < give_up, "what was computed is not on the disk"
            time.sleep(0.05)
        server.stop()
        server.start(READY_S)
        assert server.complete(prompt) == (first, 128 * CHUNKS)
        shown(tmp_path, prompt)
    finally:
        server.stop()
        shutil.rmtree(run, ignore_errors=True)
    added = json.loads(shlex.split(server.log.read_text().splitlines()[0].removeprefix("kvcore adds: "))[1])
    extra = added["kv_connector_extra_config"]
    if via == "connector":
        assert (added["kv_connector"], extra["kvcore.config"]) == ("KVCoreConnector", f"{tmp_path}/kvcore.yaml")
    else:
        assert (added["kv_connector"], extra["cpu_bytes_to_use"]) == ("OffloadingConnector", 64 << 20)
        assert [tier["config"] for tier in extra["secondary_tiers"]] == [f"{tmp_path}/kvcore.yaml"]
