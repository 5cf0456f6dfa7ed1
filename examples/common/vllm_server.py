"""vLLM's OpenAI server as a process, on a free port of loopback."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from kvcore.testing.servers import Server, ServerError, free_port

READY_S = 300.0
TAIL_LINES = 20
DIED = "died unexpectedly"
"""What vLLM says of a process of its own. Tracebacks of those that waited for it follow, often many lines."""
ENVIRONMENT = {
    # Everyone computes on one core: left alone, vLLM binds its threads differently with and without a connector.
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class VllmServer(Server):
    """One engine. `start` returns at once, so that several can come up side by side; then `wait` for each.

    Args:
        folder: for its log.
        name: for messages, and its log's name.
        model: the model's directory.
        transfer: vLLM's `kv_transfer_config`, or None for vLLM alone.
        arguments: more words of its command line.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        model: Path,
        transfer: Mapping[str, Any] | None = None,
        *,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command: list[str | Path] = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--model", model, "--served-model-name", "model"]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "8192", "--seed", "0"]
        command += ["--enable-prompt-tokens-details", *arguments]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        super().__init__(name, command, ready=lambda: True, folder=folder, env={**ENVIRONMENT, **(env or {})})

    def wait(self, timeout_s: float = READY_S) -> None:
        """Until it answers. Raises `ServerError`."""
        until = time.monotonic() + timeout_s
        while not self._healthy():
            if not self.running or time.monotonic() > until:
                text = "\n".join(telling(self.log.read_text(errors="replace").splitlines()))
                raise ServerError(f"{self.name} did not come up; what its log says ({self.log}):\n{text}")
            time.sleep(0.2)

    def _healthy(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def telling(lines: Sequence[str]) -> list[str]:
    """The last lines of an engine's log, after the one that says how one of its processes has died."""
    cause = next((line for line in lines if DIED in line), None)
    tail = list(lines[-TAIL_LINES:])
    if cause is None:
        return tail
    why = ["(-9: killed from outside, as a rule because memory ran out)"] if "-9" in cause.partition(DIED)[2] else []
    return [cause, *why, "...", *tail]


def kvcore(config: Path, role: str = "kv_both") -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for kvcore with this file."""
    return {
        "kv_connector": "KVCoreConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"kvcore.config": str(config)},
    }
