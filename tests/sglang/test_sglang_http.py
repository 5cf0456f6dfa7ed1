"""SGLang's own HTTP server, started by the command of the README, and by `kvcore run`."""

import json
import random
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from answers import same

from docs_blocks import lines
from kvcore.testing.servers import Server, free_port
from kvcore_sglang.integration import USAGE

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 90.0
KEY = "secret"
ON_A_CPU = """--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none
--dtype float32 --page-size 16 --max-total-tokens 2048 --mem-fraction-static 0.2 --max-running-requests 4
--disable-cuda-graph --skip-server-warmup --host 127.0.0.1 --enable-cache-report --enable-metrics
--hicache-write-policy write_through --hicache-storage-prefetch-policy wait_complete"""
PROMPT = [random.Random(7).randrange(3, 1000) for _ in range(400)]
"""Longer than SGLang's own `prefetch_threshold`, 256 tokens."""
STORED = ("sglang:kvcore_tier_operations_total", 'op="store"', 'outcome="ok"', 'tp_rank="0"')


class Http:
    """The server, asked."""

    def __init__(self, port: int, log: Path) -> None:
        self.log = log
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: Any = None, method: str | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.read().decode()

    def generate(self) -> tuple[list[Any], int]:
        """The answer's text, and how many tokens came from the storage."""
        parameters = {"temperature": 0, "max_new_tokens": 8}
        body = {"input_ids": PROMPT, "sampling_params": parameters, "return_logprob": True}
        answer = json.loads(self.ask("/generate", body))
        meta = answer["meta_info"]
        total = sum(item[0] for item in meta["output_token_logprobs"])
        return [answer["output_ids"], total], (meta.get("cached_tokens_details") or {}).get("storage", 0)

    def forget(self) -> None:
        """Empty SGLang's own levels, which it refuses while something is under way."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.ask("/flush_cache", method="POST")
                return
            except urllib.error.HTTPError:
                assert time.monotonic() < until
                time.sleep(0.1)

    def number(self, *parts: str) -> float:
        """Sum of the metrics whose name and labels hold these."""
        lines = [line for line in self.ask("/metrics").splitlines() if line[:1] != "#"]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(part in line for part in parts))

    def comes_to(self, value: float, *parts: str) -> None:
        """Wait for a number: kvcore's are handed over once a second."""
        until = time.monotonic() + PATIENCE_S
        while (found := self.number(*parts)) != value:
            assert time.monotonic() < until, f"{parts}: {found}, not {value}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the configuration and the pages."""
    made = tmp_path_factory.mktemp("http")
    (made / "kvcore.yaml").write_text(f"l2:\n  - storage: {{plugin: disk, path: {made}/pages, capacity: 1GiB}}\n")
    return made


@contextmanager
def served(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[Http]:
    """A server for the time of a block."""
    port = free_port()
    command = [*command, *ON_A_CPU.split(), "--port", str(port), "--admin-api-key", KEY]
    asked = Http(port, folder / "sglang.log")
    server = Server("sglang", command, ready=lambda: bool(asked.ask("/model_info")), folder=folder, env=environment)
    try:
        server.start(timeout_s=600)
        yield asked
    finally:
        server.stop()


@pytest.fixture(scope="module")
def first(sglang_python: Path, tiny: Path, environment: dict[str, str], folder: Path) -> dict[str, Any]:
    """A server started by the command of the README: cold, from the storage, after it was emptied."""
    out: dict[str, Any] = {}
    (line,) = lines("plugins/engine_sglang/README.md", "python -m sglang.launch_server")
    assert shlex.split(line) == shlex.split(USAGE)
    python, *words = shlex.split(line.replace("MODEL", str(tiny)))
    assert python == "python"
    with served([str(sglang_python), *words], folder, environment) as http:
        out["cold"] = http.generate()
        http.forget()
        out["hot"] = http.generate()
        http.comes_to(25, *STORED)
        out["prefetched"] = http.number("sglang:prefetched_tokens_total")
        http.ask("/hicache/storage-backend/clear", method="POST")
        http.forget()
        out["cleared"] = http.generate()
        http.comes_to(24, "sglang:kvcore_hit_chunks_total", 'source="disk"')
        http.comes_to(50, *STORED)
        out["faults"] = http.number("sglang:kvcore_faults_total")
    return out


def test_the_command_of_the_readme(first: dict[str, Any]) -> None:
    (cold, none), (hot, loaded), (cleared, again) = first["cold"], first["hot"], first["cleared"]
    assert (none, loaded, again) == (0, 384, 0)
    assert same([hot, cleared], [cold, cold])
    assert (first["prefetched"], first["faults"]) == (384, 0)


def test_a_server_started_by_kvcore_run(
    first: dict[str, Any], sglang_python: Path, tiny: Path, environment: dict[str, str], folder: Path
) -> None:
    """After a restart, it finds what the other has stored."""
    command = [str(sglang_python), "-m", "kvcore", "run", "sglang", "--config", "kvcore.yaml", "--", "serve", str(tiny)]
    with served(command, folder, environment) as http:
        hot, loaded = http.generate()
        faults = http.number("sglang:kvcore_faults_total")
    assert (loaded, faults) == (384, 0)
    assert same([hot], [first["cold"][0]])
    said = http.log.read_text()
    assert "kvcore adds: --enable-hierarchical-cache --hicache-storage-backend dynamic " in said
    assert f'"config":"{folder}/kvcore.yaml"' in said
