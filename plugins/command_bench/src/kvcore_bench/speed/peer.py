"""The peer's side: a script that runs in the peer's own environment and takes a sample when asked.

A script (`benchmarks/peer/GROUP.py`) reads lines and answers each with one JSON object on a line. First comes the
setting, in JSON: the answer is `{"peer": "name version", "rows": [...]}`. Then come names of rows: the answer is a
sample, `{"value": ...}` in the row's unit, or `{"error": ...}`.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcore.api.errors import KVCoreError

READY_S = 120.0
SAMPLE_S = 120.0


class PeerError(KVCoreError):
    """The peer cannot be measured."""


class Peer:
    """One running script of the peer. A context manager; samples are None once it has failed.

    Args:
        python: the interpreter of the peer's environment.
        script: the script of one group.
        setting: what the script needs to know, JSON-serialisable.
        say: where a failure is told.
    """

    def __init__(self, python: str, script: Path, setting: dict[str, Any], say: Callable[[str], None]) -> None:
        self.name = ""
        self.rows: list[str] = []
        self._say = say
        self._text = b""
        self._process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        try:
            ready = self._ask(json.dumps(setting), READY_S)
            self.name, self.rows = ready["peer"], ready["rows"]
        except (OSError, PeerError, KeyError) as error:
            self.close()
            say(f"the peer's {script.name} did not start ({error}): its columns stay empty")

    def sampler(self, row: str) -> Callable[[], float | None] | None:
        """Takes a sample of `row`; None when the peer has no such row."""
        return (lambda: self._sample(row)) if row in self.rows else None

    def close(self) -> None:
        """End the script."""
        self.rows = []
        with suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _sample(self, row: str) -> float | None:
        if row not in self.rows:
            return None
        try:
            answer = self._ask(row, SAMPLE_S)
            if "value" in answer:
                return float(answer["value"])
            raise PeerError(answer.get("error", "no value"))
        except (OSError, PeerError) as error:
            self._say(f"the peer failed on {row}: {error}")
            self.rows.remove(row)
            return None

    def _ask(self, line: str, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        return self._read(timeout_s)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout
        fd, end = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._text:
            if not select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
                raise PeerError(f"no answer in {timeout_s:g} s")
            data = os.read(fd, 65536)
            if not data:
                raise PeerError("it ended")
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise PeerError(f"it said {line[:80]!r}") from None
        return answer


def find_scripts(given: str | None) -> Path:
    """The folder of the peer's scripts: `given`, or `benchmarks/peer` here or in kvcore's source tree.
    Raises `PeerError`."""
    here = Path(__file__).resolve()
    places = [Path(given)] if given else [Path("benchmarks/peer"), *(p / "benchmarks/peer" for p in here.parents[:7])]
    for place in places:
        if (place / "keys.py").is_file():
            return place.resolve()
    raise PeerError(
        f"{given} holds no peer scripts"
        if given
        else "--peer needs the scripts of benchmarks/peer: run it in a "
        "checkout of kvcore, or name their folder with --peer-scripts"
    )


def _environment() -> dict[str, str]:
    # Our own modules must not be found by the peer's interpreter.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return {**env, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": env.get("PYTHONDONTWRITEBYTECODE", "")}


def check_python(python: str) -> None:
    """Raises `PeerError` when `python` does not run."""
    try:
        subprocess.run([python, "-c", "pass"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerError(
            f"--peer {python}: not a working Python interpreter ({error}); ours is {sys.executable}"
        ) from None
