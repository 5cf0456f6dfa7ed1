"""Real vLLM engines run in child processes, several scenarios in each: importing vLLM takes longer than a scenario."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import scenarios

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
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": str(CORE),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

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
def run_child(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs scenarios in one new process; their results by name. A failed scenario fails the test that asks for it."""

    def run(*names: str, timeout_s: int = 280, **environment: str) -> scenarios.Results:
        path = os.pathsep.join([str(HERE / "slow_plugin"), os.environ.get("PYTHONPATH", "")])
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVCORE_")}
        return scenarios.run(
            sys.executable,
            HERE,
            models,
            names,
            place=tmp_path_factory.mktemp("child"),
            environment={**clean, **ENVIRONMENT, "PYTHONPATH": path, **environment},
            timeout_s=timeout_s,
        )

    return run
