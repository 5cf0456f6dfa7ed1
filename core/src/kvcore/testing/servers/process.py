"""One real server process for a test: started on loopback, killed, frozen, restarted, ended by its pid."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

READY_S = 60.0
STOP_S = 10.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class ServerError(Exception):
    """A server did not start; the message ends with the last lines it wrote."""


class Server:
    """A server process. `start` returns when it answers. It ends with the thread that started it, however that ends.

    Args:
        name: for messages and the log's file name.
        command: argument list; a fixed port and folder, so that `start` after `kill` gives the same server back.
        ready: does it answer? Asked until it says True; an `OSError` counts as False.
        folder: where its output goes (`NAME.log`); also its working directory.
        env: variables on top of this process's.
        prefix: a command that runs it elsewhere, such as `["ip", "netns", "exec", "ns0"]`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        ready: Callable[[], bool],
        folder: Path,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = [*prefix, *map(str, command)]
        self._ready = ready
        self._folder = folder
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The running process. Raises `ServerError` when there is none."""
        if self._process is None or self._process.poll() is not None:
            raise ServerError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """It has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = READY_S) -> Self:
        """Start the process and wait until it answers. Raises `ServerError`."""
        if self.running:
            raise ServerError(f"{self.name} is running already: end it first with `kill` or `stop`")
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    cwd=self._folder,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,  # noqa: PLW1509 - one call into libc, no locks
                )
        except OSError as error:
            raise ServerError(f"{self.name}: {self._command[0]} cannot be run: {error.strerror}") from None
        give_up = time.monotonic() + timeout_s
        # Is it still there? Else someone else answers on its port.
        while (code := self._process.poll()) is not None or not self._answers():
            if code is not None or time.monotonic() > give_up:
                self.kill()
                what = f"ended with {code}" if code is not None else f"did not answer within {timeout_s:g} s"
                raise ServerError(f"{self.name} {what}; its last lines:\n{self._tail()}")
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        """End it politely, then by force. Harmless when it does not run."""
        if self.running:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, also of what it started, and wait until it is gone."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait(STOP_S)

    def freeze(self) -> None:
        """SIGSTOP: it holds its connections and answers nothing, once this has returned."""
        self._signal(signal.SIGSTOP)
        give_up = time.monotonic() + STOP_S
        while self.running and not _stopped(self.pid) and time.monotonic() < give_up:
            time.sleep(0.001)  # its threads stop one by one

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            return self._ready()
        except OSError:
            return False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)  # the group that start_new_session made: only what we started

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


_given: set[int] = set()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now. None twice: a client that is left over from a server that has
    ended would find the next one."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in _given:
            _given.add(port)
            return port


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Does someone accept connections there?"""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def _stopped(pid: int) -> bool:
    """Has every thread of the process stopped? (Its state stands behind its name, which may hold anything.)"""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # a thread has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
