"""Programs that `kvcore serve` runs beside itself: started, watched, started again and ended.

Each is the leader of a process group of its own, together with what it starts. In that group waits a small shell, too
(`_START`), at the end of a pipe whose other end only the server has: when the server is gone, however it ended, the
shell ends the group. It also keeps the group's number from being given to anybody else while we may still signal it.

One thread for each program, asleep while nothing happens. Nothing that a program does reaches the server but its
output, which is read at a bounded pace.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from select import POLLIN, poll
from typing import Any, NamedTuple

from kvcore.config import ScriptConfig
from kvcore.observe import Metrics
from kvcore.service.output import MAX_READ, READ_EVERY_S, Output, log
from kvcore.service.wake import Wake

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""
REAP_TIMES, REAP_EVERY_S = 50, 0.01
SHORTEST_READ = 0.02
"""Of `MAX_READ`. What a read of less costs the server is the call, not the bytes."""
OWN = "KVCORE_SERVER__"
"""Variables that begin so, in whatever case, are the server's alone: tokens, and addresses that mean it."""

_START = f"""
(
  exec 3<&0
  ( trap '' HUP INT TERM; read _; kill -TERM 0; sleep {GRACE_S:g}; kill -KILL 0 ) <&3 >/dev/null 2>&1 3<&- &
)
exec "$@" </dev/null
"""
"""The shell that becomes the program. What waits is nobody's child, so that a program that waits for all of its own is
not held up."""


class Pace(NamedTuple):
    """When a program is started again after it has ended, in seconds."""

    first_s: float = 1.0
    """After the first end; doubled with each that follows."""
    most_s: float = 60.0
    steady_s: float = 60.0
    """One that has run so long begins anew."""
    limit: int = 10
    """So many ends in a row, and it is left alone."""


class Children:
    """The programs of `plugins.run`. `start` once, then `stop` and `close`; all are harmless where there are none.

    Args:
        scripts: as configured, and found to be files.
        pace: of their restarts.
    """

    def __init__(self, scripts: Sequence[ScriptConfig], pace: Pace = Pace()) -> None:  # noqa: B008 - immutable
        self._scripts = scripts
        self._pace = pace
        self._children: list[_Child] = []

    def start(self, env: Mapping[str, str], metrics: Metrics) -> None:
        """Start them all. What cannot be started is tried again, and harms nobody.

        Args:
            env: all variables that they are given, beside their own.
            metrics: the server's.
        """
        named = zip(_names(self._scripts), self._scripts, strict=True)
        self._children = [_Child(name, script, env, metrics, self._pace) for name, script in named]
        for child in self._children:
            child.thread.start()

    def stop(self) -> None:
        """Ask them to end, and return at once. From any thread. Idempotent."""
        for child in self._children:
            child.stop()

    def close(self) -> None:
        """Wait for their end, for which they have `GRACE_S` from `stop` on. Idempotent."""
        self.stop()
        for child in self._children:
            child.close()

    def status(self) -> list[dict[str, Any]]:
        """Plain values, for people; one mapping each. From any thread."""
        return [child.status() for child in self._children]


def environment(base: Mapping[str, str], address: str, file: str | None, http: str | None) -> dict[str, str]:
    """What programs find: the server's own variables without its secrets, and where it is."""
    env = {name: value for name, value in base.items() if not name.upper().startswith(OWN)}
    for name in ("KVCORE_CONFIG", "KVCORE_HTTP"):
        env.pop(name, None)
    env |= {"KVCORE_SERVER": address, "PYTHONUNBUFFERED": "1"}
    if file is not None:
        env["KVCORE_CONFIG"] = os.path.abspath(file)
    if http is not None:
        env["KVCORE_HTTP"] = http
    return env


def _names(scripts: Sequence[ScriptConfig]) -> list[str]:
    """File names, with a number where one is taken."""
    names: list[str] = []
    for script in scripts:
        base = os.path.basename(script.path)
        count = sum(name == base or name.startswith(f"{base}#") for name in names)
        names.append(base if not count else f"{base}#{count + 1}")
    return names


class _Child:
    """One program, over all its runs. Its attributes are written by its thread only."""

    def __init__(self, name: str, script: ScriptConfig, env: Mapping[str, str], metrics: Metrics, pace: Pace) -> None:
        self.name = name
        self._script = script
        self._env = {**env, **{key: value.get_secret_value() for key, value in script.env.items()}}
        self._metrics = metrics
        self._pace = pace
        self._pid: int | None = None
        self._state = "waiting"
        self._since = time.time()
        self._starts = 0
        self._last = ""
        self._stop = threading.Event()
        self._wake = Wake()
        self.thread = threading.Thread(target=self._run, name=f"kvcore-run-{name}", daemon=True)

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()

    def close(self) -> None:
        if self.thread.ident is not None:
            self.thread.join(2 * GRACE_S)
        self._wake.close()

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": self._script.path,
            "state": self._state,
            "since": self._since,
            "pid": self._pid,
            "starts": self._starts,
            "last": self._last,
        }

    # -- on its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failed = 0
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                code = self._once()
            except Exception as error:  # out of processes, files or memory
                self._last = f"cannot be started: {error}"
                code = 1
            if self._stop.is_set():
                break
            failed = 1 if time.monotonic() - began >= self._pace.steady_s else failed + 1
            if not self._again(code, failed):
                return
        self._become("ended")

    def _again(self, code: int, failed: int) -> bool:
        """Wait until it is to be started again. False: it is not."""
        if self._script.restart == "never" or (self._script.restart == "failure" and code == 0):
            log.log(_level(code), "[%s] %s", self.name, self._last)
            self._become("ended")
            return False
        if failed >= self._pace.limit:
            text = "[%s] %s, %d times in a row: it is not started again before the server is"
            log.error(text, self.name, self._last, failed)
            self._become("failed")
            return False
        pause_s = min(self._pace.first_s * 2 ** (failed - 1), self._pace.most_s)
        log.log(_level(code), "[%s] %s; it is started again in %g s", self.name, self._last, pause_s)
        self._become("waiting")
        self._sleep(pause_s)
        return True

    def _once(self) -> int:
        """Run it from start to end; its exit status, negative for a signal."""
        reader, writer = os.pipe()  # `writer` is ours alone, and closed when we are gone
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _START, "sh", *_command(self._script)],
                stdin=reader,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=os.path.dirname(self._script.path),
                env=self._env,
                start_new_session=True,
            )
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self._starts += 1
        self._pid = process.pid
        self._metrics.add("helper_starts", 1, self.name)
        self._become("running")
        log.info("[%s] is started as process %d", self.name, process.pid)
        try:
            self._watch(process)
        finally:
            _kill(process.pid, signal.SIGKILL)  # before it is waited for: the number is the group's until then
            os.close(writer)
            code = process.wait()
            _reap(process.pid)
            self._pid = None
            if process.stdout is not None:
                process.stdout.close()
        self._last = _ending(code)
        return code

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        """Log what it says until it has ended, or is to end; then have its whole group end, within `GRACE_S`."""
        assert process.stdout is not None
        output, source = Output(self.name), process.stdout.fileno()
        os.set_blocking(source, False)
        ended = Wake()
        alive = open_ = True  # whether it runs; whether anybody of its group may still say something
        give_up: float | None = None  # once they have been asked to end
        try:
            threading.Thread(target=_wait, args=(process, ended), name=f"{self.thread.name}-end", daemon=True).start()
            while (alive or open_) and (give_up is None or time.monotonic() < give_up):
                if give_up is None and (self._stop.is_set() or not alive):
                    give_up = time.monotonic() + GRACE_S
                    _kill(process.pid, signal.SIGTERM)
                files: dict[Wake | int, bool] = {ended: alive, source: open_, self._wake: give_up is None}
                ready = _ready([file for file, wanted in files.items() if wanted], give_up)
                if source in ready:
                    open_ = _read(source, output)
                if ended in ready:
                    alive = False
        finally:
            output.close()
            ended.close()

    def _sleep(self, seconds: float) -> None:
        give_up = time.monotonic() + seconds
        while not self._stop.is_set() and time.monotonic() < give_up:
            _ready([self._wake], give_up)

    def _become(self, state: str) -> None:
        self._state, self._since = state, time.time()
        self._metrics.set("helper_up", float(state == "running"), self.name)


def _command(script: ScriptConfig) -> list[str]:
    return [sys.executable if script.path.endswith(".py") else "/bin/sh", script.path, *script.args]


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # one without a name
        return f"was killed by signal {-code}"


def _level(code: int) -> int:
    return logging.WARNING if code else logging.INFO


def _wait(process: "subprocess.Popen[bytes]", ended: Wake) -> None:
    process.wait()
    ended.set()


def _ready(files: Sequence[Wake | int], give_up: float | None) -> set[Wake | int]:
    """Which of them can be read, or have ended; empty when it is time to give up."""
    poller = poll()
    by_number = {file if isinstance(file, int) else file.fileno(): file for file in files}
    for number in by_number:
        poller.register(number, POLLIN)
    timeout_s = None if give_up is None else max(0.0, give_up - time.monotonic())
    return {by_number[number] for number, _ in poller.poll(None if timeout_s is None else timeout_s * 1000)}


def _read(source: int, output: Output) -> bool:
    """Log what there is. False: nobody can say anything there any more."""
    try:
        data = os.read(source, MAX_READ)
    except BlockingIOError:
        return True
    output.feed(data)
    time.sleep(READ_EVERY_S * max(len(data) / MAX_READ, SHORTEST_READ) if data else 0)
    return bool(data)


def _kill(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _reap(group: int) -> None:
    """Of a killed group, those that became ours when their parent ended: where we are a container's first process."""
    with suppress(ChildProcessError):
        for _ in range(REAP_TIMES):
            if os.waitpid(-group, os.WNOHANG) == (0, 0):
                time.sleep(REAP_EVERY_S)
