"""Real vLLM engines run in child processes, several scenarios in each. They are forked from one that has imported vLLM,
which takes longer than a scenario."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

import scenarios
from warm import Warm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODELS = ("tiny", "swa", "idefics3")
CORE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % (os.cpu_count() or 1)
"""Each of the processes that run tests has a core of its own for its engines."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": str(CORE),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",  # else vLLM compiles what it needs for log probabilities, in every process anew
}
PLAIN = "plain"
"""The scenario without kvcore, which many compare with: it says the same each time."""

Run = Callable[..., scenarios.Results]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the test models: `KVCORE_TEST_MODELS`, or made anew."""
    given = os.environ.get("KVCORE_TEST_MODELS")
    folder = Path(given) if given else tmp_path_factory.mktemp("models")
    maker = ROOT / "examples" / "models" / "tiny.py"
    if not all((folder / name / "config.json").is_file() for name in MODELS):
        subprocess.run([sys.executable, str(maker), str(folder), *MODELS], check=True)
    return folder


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of a process that runs vLLM."""
    path = os.pathsep.join([str(HERE / "slow_plugin"), os.environ.get("PYTHONPATH", "")])
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVCORE_")}
    return {**clean, **ENVIRONMENT, "PYTHONPATH": path}


@pytest.fixture(scope="session")
def warm(environment: dict[str, str]) -> Iterator[Warm]:
    """The process that has imported vLLM."""
    made = Warm(["engines", "peers", "scenarios"], environment, HERE)
    yield made
    made.close()


@pytest.fixture(scope="session")
def run_child(models: Path, warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs scenarios in one new process; their results by name. A failed scenario fails the test that asks for it."""
    kept = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        kept = kept.parent  # of all that run tests

    def run(*names: str, timeout_s: int = 280, **more: str) -> scenarios.Results:
        files = {name: kept / f"{quote(name)}.json" for name in names if name.partition(":")[0] == PLAIN}
        known = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
        results = scenarios.run(
            sys.executable,
            HERE,
            models,
            [name for name in names if name not in known],
            place=tmp_path_factory.mktemp("child"),
            environment=more,
            timeout_s=timeout_s,
            warm=warm,
        )
        for name, file in files.items():
            if "error" not in results.get(name, {"error": ""}):
                written = file.with_suffix(f".{os.getpid()}")
                written.write_text(json.dumps(results[name]))
                written.rename(file)
        results.update(known)
        return results

    return run
