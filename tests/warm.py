"""A process that has imported an engine, which takes longer than most of what is done with it: whoever needs a process
with that engine has it forked. Each is a process of its own, as new as the engine was after its import.

As a script: `warm.py SOCKET MODULE...` imports the modules, serves the socket, and ends with its standard input.
"""

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SOCKET = "KVCORE_TEST_WARM"
"""Where those that were forked find who forks."""
START_S = 300.0


class Forked:
    """One process, forked there: `call(*arguments)`, both of which JSON can hold.

    Args:
        call: `module:function`.
        output: where its output is added; "" is the output of who forks.
        files: open files that it gets; their numbers follow the arguments.
    """

    def __init__(
        self,
        address: str,
        call: str,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        output: Path | str = "",
        files: Sequence[int] = (),
    ) -> None:
        self._made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._made.connect(address)
        self.code: int | None = None
        job = {"call": call, "arguments": arguments, "environment": dict(environment or {}), "output": str(output)}
        body = json.dumps(job).encode()
        socket.send_fds(self._made, [len(body).to_bytes(4, "little")], list(files))
        self._made.sendall(body)
        self.pid = int(self._line())

    def wait(self, timeout_s: float) -> int:
        """Its exit status, negative for a signal. Raises `subprocess.TimeoutExpired`."""
        if self.code is None:
            self._made.settimeout(timeout_s)
            try:
                self.code = int(self._line())
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s) from None
            self._made.close()
        return self.code

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            data = self._made.recv(1)
            if not data:
                raise EOFError("who forks is gone")
            line += data
        return line


class Warm:
    """The process that forks, started at once. Ended by `close`.

    Args:
        modules: what it imports, from `path` and the environment.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], path: Path, python: Path | str = sys.executable
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvw")  # short: a socket's path has at most 107 bytes
        self.address = f"{self._folder.name}/socket"
        self._log = Path(self._folder.name) / "log"
        with self._log.open("w") as stream:
            self._process = subprocess.Popen(
                [str(python), __file__, self.address, str(path), *modules],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**environment, SOCKET: self.address},
            )

    def start(self, call: str, *arguments: Any, **more: Any) -> Forked:
        """Have a process forked: see `Forked`."""
        self._ready()
        return Forked(self.address, call, *arguments, **more)

    def run(self, call: str, *arguments: Any, timeout_s: float, **more: Any) -> int:
        """The same, and wait for its end. One that takes longer is killed."""
        process = self.start(call, *arguments, **more)
        try:
            return process.wait(timeout_s)
        except BaseException:
            process.kill()
            raise

    def close(self) -> None:
        """End it; those that it has forked go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._folder.cleanup()

    def _ready(self) -> None:
        give_up = time.monotonic() + START_S
        while not os.path.exists(self.address):
            code = self._process.poll()
            assert code is None, f"the process that imports ended with {code}\n{self._log.read_text()[-6000:]}"
            assert time.monotonic() < give_up, f"it imports for longer than {START_S:g} s"
            time.sleep(0.05)


# -- in the process --------------------------------------------------------------------------------------------------


def main() -> None:
    address, path, *modules = sys.argv[1:]
    sys.path[0] = path  # instead of this file's own, whose folders bear the names of engines
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    gc.disable()  # nothing of what is imported is garbage
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)  # from now on it is there for others
        job = _serve(listener)
    if job is not None:
        _become(*job)
    os._exit(0)  # without freeing piece by piece all that was imported


def _serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for whoever asks; in the child, return with what it is to do. None: the end."""
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj is listener:
                    asking, _ = listener.accept()
                    job, files = _asked(asking)
                    pid = os.fork()
                    if not pid:
                        for fd, (_, other) in running.items():
                            os.close(fd)
                            other.close()
                        asking.close()
                        return job, files
                    for file in files:
                        os.close(file)
                    asking.sendall(b"%d\n" % pid)
                    ended = os.pidfd_open(pid)
                    running[ended] = pid, asking
                    selector.register(ended, selectors.EVENT_READ)
                    continue
                selector.unregister(key.fd)
                os.close(key.fd)
                pid, asking = running.pop(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with asking, suppress(OSError):  # perhaps nobody waits for it
                    asking.sendall(b"%d\n" % code)


def _asked(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, files, _, _ = socket.recv_fds(asking, 4, 16)
    body = b""
    while len(body) < int.from_bytes(head, "little"):
        body += asking.recv(1 << 16)
    return json.loads(body), files


def _become(job: dict[str, Any], files: list[int]) -> None:
    """What was asked for, and then the end of the process."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if job["output"]:
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
    os.environ.update(job["environment"])
    code = 0
    try:
        module, _, name = job["call"].partition(":")
        call: Callable[..., Any] = getattr(importlib.import_module(module), name)
        call(*job["arguments"], *files)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
