"""How ranks tell the scheduler's half what has ended.

TensorRT-LLM carries metadata to the workers but nothing back, except which requests it may free or go on with. So each
rank sends a datagram per plan to a Unix socket of the scheduler's process: all ranks of an engine are on one node.
"""

import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

Kind = Literal["attached", "loaded", "saved"]
_KINDS = ("attached", "loaded", "saved")
_MAX_BYTES = 4096
TICK_S = 1.0
SEND_TIMEOUT_S = 5.0


class Report(NamedTuple):
    """A rank has ended a plan (`id` is its number), or has mapped an arena (`id` is its token)."""

    rank: int
    kind: Kind
    id: "int | str"
    ok: bool = True


class Inbox:
    """The scheduler's end.

    Args:
        heard: called with each report. tick: called about once a second. Both on a thread of the inbox.
    """

    def __init__(self, heard: Callable[[Report], None], tick: Callable[[], None]) -> None:
        self._heard, self._tick = heard, tick
        self._folder = tempfile.mkdtemp(prefix="kvcore-trtllm-")  # only this user may enter
        self.address = os.path.join(self._folder, "reports")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.settimeout(TICK_S)
        self._open = True
        self._thread = threading.Thread(target=self._run, name="kvcore-reports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it. Idempotent."""
        if not self._open:
            return
        self._open = False
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"", self.address)  # the thread wakes
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        while self._open:
            try:
                message = self._socket.recv(_MAX_BYTES)
            except TimeoutError:
                self._tick()
                continue
            except OSError:
                return
            report = _read(message)
            if report is not None:
                self._heard(report)


def _read(message: bytes) -> Report | None:
    """A report; None for anything that a rank has not written."""
    try:
        report = Report(*json.loads(message))
    except (ValueError, TypeError):
        return None
    sound = type(report.rank) is int and report.kind in _KINDS and isinstance(report.id, int | str)
    return report if sound and type(report.ok) is bool else None


class Outbox:
    """A rank's end. Thread-safe."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(SEND_TIMEOUT_S)

    def send(self, report: Report) -> None:
        """Tell it. Raises `OSError` when the scheduler's process is gone."""
        message: list[Any] = list(report)
        self._socket.sendto(json.dumps(message).encode(), self.address)

    def close(self) -> None:
        """End it. Idempotent."""
        self._socket.close()
