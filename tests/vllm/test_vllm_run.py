"""README's and kvcore-vllm's command lines, as they stand there: `kvcore run vllm` starts a real server that uses
kvcore, and one that is started by hand afterwards, by the line beside it, reuses what the first had computed."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_lines import Client, cpu_wheel_is_vllm, words

from docs_blocks import blocks, lines, spans
from kvcore.cli import main
from kvcore.service.inspect import ask, caches
from kvcore.testing.servers import Server, free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

HERE = Path(__file__).resolve().parent
PAGE = "plugins/engine_vllm/README.md"
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
}


class Started(Server, Client):
    """An engine with a tiny model, started by a line of a page."""

    def __init__(self, folder: Path, model: Path, name: str, line: str, env: Mapping[str, str]) -> None:
        Client.__init__(self, free_port())
        _, (program, *rest) = words(line, model, self.port)
        programs = {"kvcore": [sys.executable, "-m", "kvcore"], "python": [sys.executable]}
        command = [*programs.get(program, [str(Path(sys.executable).with_name(program))]), *rest]
        super().__init__(name, command, ready=self.healthy, folder=folder, env={**ENVIRONMENT, **env})


def configure(page: str, folder: Path, write: str = "all") -> None:
    """The page's file, small."""
    values = yaml.safe_load(next(block.text for block in blocks(page) if block.language == "yaml"))
    values["l1"]["size"] = "64MiB"
    (tier,) = values["l2"]
    tier["storage"] |= {"path": str(folder / "cache"), "capacity": "1GiB"}
    tier["write"] = write
    tier["read"] = "always"  # a model this small is often computed sooner than a busy machine reads
    values |= {"chunk_tokens": 128, "lookup_timeout": "20s"}
    (folder / "kvcore.yaml").write_text(yaml.safe_dump(values))


def connector(folder: Path) -> tuple[str, str, dict[str, str]]:
    """README: two lines, and what the processes find in their environment, with what docs/explain.md puts there. All is
    written at the end only."""
    configure("README.md", folder, write="evicted")
    (run,), (by_hand,) = lines("README.md", "kvcore run vllm"), lines("README.md", "vllm serve")
    env = {"PYTHONPATH": cpu_wheel_is_vllm(folder), "VLLM_SERVER_DEV_MODE": "1"}
    return run, by_hand.replace("/etc/kvcore.yaml", f"{folder}/kvcore.yaml"), env


def tier(folder: Path) -> tuple[str, str, dict[str, str]]:
    """kvcore-vllm's README: how the tier is started, by hand with the wheel for CPUs."""
    configure(PAGE, folder)
    (run,) = (span for span in spans(PAGE) if span.startswith("kvcore run vllm --via tier --config"))
    (by_hand,) = lines(PAGE, "VLLM_CPU_KVCACHE_SPACE=4 python -m")
    (transfer,) = (json.loads(block.text) for block in blocks(PAGE) if block.language == "json")
    transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] = 64 << 20
    path = os.pathsep.join(map(str, (HERE / "offload_plugin", HERE.parents[1] / "benchmarks")))
    assert by_hand.endswith("--kv-transfer-config ...")
    return run, by_hand.replace("...", shlex.quote(json.dumps(transfer))), {"PYTHONPATH": path}


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


def explained(engine: Client, prompt: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """docs/explain.md: a hit is seen after the restart, none while vLLM has it itself, one when it has forgotten."""
    page = "docs/explain.md"
    (reset,) = lines(page, "curl")
    (explain,) = (line for line in lines(page, "kvcore explain last") if "--url" not in line)

    def said() -> str:
        capsys.readouterr()
        assert main(shlex.split(explain)[1:]) == 0
        return capsys.readouterr().out

    every = f"{CHUNKS} of {CHUNKS} chunks ({CHUNKS} in "
    assert re.search(rf"^found +{re.escape(every)}disk\)", said(), re.M)
    engine.complete(prompt)
    assert re.search(r"^saved +nothing: the engine had it all itself$", said(), re.M)
    give_up = time.monotonic() + 60
    curl = [*shlex.split(reset.replace("127.0.0.1:8000", f"127.0.0.1:{engine.port}")), "-s"]
    while not json.loads(subprocess.run(curl, capture_output=True, check=True, timeout=60).stdout)["success"]:
        assert time.monotonic() < give_up, "vLLM does not forget"
    assert engine.complete(prompt)[1] == 128 * CHUNKS
    assert re.search(rf"^found +{re.escape(every)}l1\)", said(), re.M)


@pytest.mark.parametrize("via", [connector, tier])
def test_a_server_started_by_kvcore_run_and_one_by_hand(
    models: Path, tmp_path: Path, via: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tempfile.mkdtemp()  # a socket's path must be short
    monkeypatch.setenv("KVCORE_RUN_DIR", run_dir)
    run, by_hand, env = via(tmp_path)
    numbers = random.Random(5)
    prompt = [numbers.randrange(3, 1000) for _ in range(TOKENS)]
    first = Started(tmp_path, models / "tiny", "run", run, env)
    again = Started(tmp_path, models / "tiny", "by-hand", by_hand, env)
    try:
        first.start(READY_S)
        text, cached = first.complete(prompt)
        assert cached == 0
        give_up = time.monotonic() + 60
        while via is tier and written(tmp_path / "cache") < CHUNKS:
            assert time.monotonic() < give_up, "what was computed is not on the disk"
            time.sleep(0.05)
        assert via is tier or not written(tmp_path / "cache")
        os.kill(first.pid, signal.SIGTERM)  # it alone, as the package's README says
        while first.running:
            assert time.monotonic() < give_up, "vLLM does not end"
            time.sleep(0.05)
        assert written(tmp_path / "cache") >= CHUNKS
        again.start(READY_S)
        assert again.complete(prompt) == (text, 128 * CHUNKS)
        shown(tmp_path, prompt)
        if via is connector:
            explained(again, prompt, capsys)
    finally:
        first.stop()
        again.stop()
        shutil.rmtree(run_dir, ignore_errors=True)
    added = json.loads(shlex.split(first.log.read_text().splitlines()[0].removeprefix("kvcore adds: "))[1])
    extra = added["kv_connector_extra_config"]
    if via is connector:
        assert (added["kv_connector"], extra["kvcore.config"]) == ("KVCoreConnector", f"{tmp_path}/kvcore.yaml")
    else:
        assert (added["kv_connector"], extra["cpu_bytes_to_use"]) == ("OffloadingConnector", 64 << 20)
        assert [tier["config"] for tier in extra["secondary_tiers"]] == [f"{tmp_path}/kvcore.yaml"]
