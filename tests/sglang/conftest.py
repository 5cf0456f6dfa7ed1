"""Real SGLang runs in child processes, in an environment of its own: it cannot share vLLM's. They are forked from one
that has imported it, and so are its ranks: importing it takes longer than a scenario."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import scenarios
from warm import Warm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tiny_models",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE / "cpu"),
}

Run = Callable[..., scenarios.Results]


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The Python of the environment that has SGLang."""
    python = Path(os.environ.get("KVCORE_TEST_SGLANG") or f"{sys.prefix}-sglang/bin/python")
    assert python.is_file(), f"{python} is not there: run `make setup-sglang`, or let KVCORE_TEST_SGLANG name a Python"
    return python


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test model, of `KVCORE_TEST_MODELS` or made anew."""
    given = os.environ.get("KVCORE_TEST_MODELS")
    folder = Path(given) if given else tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(ROOT / "examples/models/tiny.py"), str(folder), "tiny"], check=True)
    return folder / "tiny"


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of a process that runs SGLang."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith("KVCORE_")}, **ENVIRONMENT}


@pytest.fixture(scope="session")
def warm(sglang_python: Path, environment: dict[str, str]) -> Iterator[Warm]:
    """The process that has imported SGLang."""
    made = Warm(["engines", "scenarios"], environment, HERE, sglang_python)
    yield made
    made.close()


@pytest.fixture(scope="session")
def run_child(sglang_python: Path, tiny: Path, warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs scenarios in one new process; their results by name. A failed scenario fails the test that asks for it."""

    def run(*names: str, timeout_s: int = 600, **more: str) -> scenarios.Results:
        return scenarios.run(
            sglang_python,
            HERE,
            tiny,
            names,
            place=tmp_path_factory.mktemp("child"),
            environment=more,
            timeout_s=timeout_s,
            warm=warm,
        )

    return run
