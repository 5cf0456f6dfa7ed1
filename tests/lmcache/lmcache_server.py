"""LMCache's own server with kvcore behind it, and a client of it that stands for an engine."""

import json
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from docs_blocks import lines
from kvcore.testing.servers import Server, free_port

HERE = Path(__file__).resolve().parent
PATIENCE_S = 300.0


class LMCacheServer(Server):
    """`lmcache server` whose only L2 adapter is kvcore's, by the line of kvcore-lmcache's README."""

    def __init__(self, python: Path, environment: Mapping[str, str], folder: Path, name: str, **params: Any) -> None:
        self.port, self.http, metrics = free_port(), free_port(), free_port()
        (line,) = lines("plugins/bridge_lmcache/README.md", "lmcache server")
        _, *words = shlex.split(line.replace("--l1-size-gb 20", "--l1-size-gb 0.125"))
        adapter = json.loads(words[-1]) | {"adapter_params": params}
        command = [python, "-m", "lmcache.cli.main", *words[:-1], json.dumps(adapter)]
        command += ["--port", self.port, "--http-port", self.http, "--no-l1-use-lazy", "--chunk-size", "64"]
        command += ["--supported-transfer-mode", "engine_driven", "--prometheus-port", metrics]
        super().__init__(name, list(map(str, command)), ready=self._healthy, folder=folder, env=environment)

    def start(self, timeout_s: float = PATIENCE_S) -> Self:
        """It imports half a Python installation first."""
        return super().start(timeout_s)

    def status(self) -> dict[str, Any]:
        """What kvcore's adapter reports in LMCache's `/status`, and how LMCache itself does."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/status", timeout=PATIENCE_S) as reply:
            whole = json.load(reply)
        (adapter,) = whole["storage_manager"]["l2_adapters"]
        objects = whole["storage_manager"]["l1_manager"]["total_object_count"]
        return {**adapter, "healthy": whole["is_healthy"], "l1_objects": objects}

    def clear_l1(self) -> None:
        """Empty LMCache's own memory, once nothing in it is in use: what is found next comes from kvcore."""

        def cleared(_: dict[str, Any]) -> bool:
            request = urllib.request.Request(f"http://127.0.0.1:{self.http}/cache/clear", method="POST")
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                assert json.load(reply)["status"] == "ok"
            return bool(self.status()["l1_objects"] == 0)

        self.until("empty", cleared)

    def until(self, what: str, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the adapter's status is so."""
        give_up = time.monotonic() + PATIENCE_S
        while not done(status := self.status()):
            assert time.monotonic() < give_up, f"not {what}: {status}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.05)
        return status

    def _healthy(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/healthcheck", timeout=5) as reply:
            return bool(reply.status == 200)


class Engine:
    """A process that stores and retrieves KV as two ranks of an engine do, see `engine_child.py`."""

    def __init__(self, python: Path, environment: Mapping[str, str], server: LMCacheServer) -> None:
        self._log = (server.log.parent / "engine.log").open("ab")
        self._process = subprocess.Popen(
            [python, HERE / "engine_child.py", f"tcp://127.0.0.1:{server.port}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=dict(environment), text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        self._process.stdout.close()
        self._log.close()

    def ask(self, what: str, sequence: int) -> Any:
        """`store` a sequence: the digest of its KV. `lookup`: chunks found. `retrieve`: the digest of what came.
        `tokens`: the ids of its prompt."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, sequence]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # LMCache prints on stdout, too
                answer = json.loads(line)
                assert "error" not in answer, answer["error"]
                return answer["answer"]
        raise AssertionError(f"the engine's process ended: {Path(self._log.name).read_text()[-3000:]}")
