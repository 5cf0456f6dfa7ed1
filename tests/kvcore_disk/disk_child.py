"""Writers in processes of their own. `python disk_child.py` forks one per line of its input, so that a start is cheap.

A line is JSON: `{"run": NAME, ...}` forks a child that calls the function of that name below and answers with its
process id; `{"kill": PID}` kills that child, waits until it is gone, and answers with its exit status.
"""

import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Self

from disk_place import make_disk

from kvcore.api import ObjectKey
from kvcore.testing.memory import content, make_key, source
from kvcore_disk.account import Account

KEYS = 60
MAX_BYTES = 600_000
_DIGEST_BYTES = 32


def blob(seed: object, nbytes: int) -> bytes:
    """An object that can be judged alone: a digest, and what it is the digest of."""
    body = content(seed, 97) * (nbytes // 97 + 1)
    return hashlib.sha256(body[:nbytes]).digest() + body[:nbytes]


def is_whole(data: bytes) -> bool:
    return hashlib.sha256(data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]


def key_of(number: int) -> ObjectKey:
    return make_key(("child", number))


class Children:
    """The forking process, seen from a test. A context manager: kills what it has started."""

    def __enter__(self) -> Self:
        command = f"import sys; sys.path[:] = {sys.path!r}; from disk_child import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._running: set[int] = set()
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in list(self._running):
            self.kill(pid)
        self._process.communicate(timeout=10)

    def run(self, name: str, **arguments: Any) -> int:
        """Fork a child that calls the function `name` of this file."""
        pid = self._ask({"run": name, **arguments})
        self._running.add(pid)
        return pid

    def kill(self, pid: int, signum: int = signal.SIGKILL) -> int:
        """Kill a child and wait for it. With `signum=0` wait only. Its exit status: negative for a signal."""
        self._running.discard(pid)
        return self._ask({"kill": pid, "signal": signum})

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def main() -> None:
    with tempfile.TemporaryDirectory() as path:
        make_disk(Path(path), "1MiB")  # imports what each child would else import for itself: longer than some may live
    for line in sys.stdin:
        request = json.loads(line)
        if "kill" in request:
            os.kill(request["kill"], request["signal"])
            _, status = os.waitpid(request["kill"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                _child(request)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _child(request: dict[str, Any]) -> None:
    status = 1
    try:
        globals()[request.pop("run")](**request)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


# What children do.


def write(root: str, capacity: str, seed: int, seconds: float, threads: int = 2) -> None:
    """Store, overwrite and delete objects of many sizes for `seconds`, then close."""
    storage = make_disk(Path(root), capacity)
    storage.open()
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        version = 0
        while time.monotonic() < end:
            version += 1
            batch = chance.sample(range(KEYS), 2)
            storage.store(
                [
                    source(key_of(i), blob((seed, number, version, i), chance.randrange(MAX_BYTES)), (4096,))
                    for i in batch
                ]
            )
            if chance.random() < 0.2:
                storage.delete([key_of(chance.randrange(KEYS))])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    storage.close()


def open_and_close(root: str, capacity: str, times: int) -> None:
    """Open, store and close, again and again."""
    for i in range(times):
        storage = make_disk(Path(root), capacity)
        storage.open()
        storage.store([source(key_of(i), blob(("open", os.getpid(), i), 50_000))])
        storage.close()


def limited(root: str, report: str) -> None:
    """Store small and large objects where the system allows files of 64 KiB only; writes the outcomes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))
    storage = make_disk(Path(root), "8MiB")
    storage.open()
    outcomes = storage.store([source(key_of(i), blob(i, 30_000 + 60_000 * i)) for i in range(3)])
    used = storage.usage().nbytes
    storage.close()
    Path(report).write_text(json.dumps([[str(o) for o in outcomes], used]))


def hold_the_lock(root: str, ready: str) -> None:
    """Enter the account's lock, say so, and wait to be killed."""
    with Account(root).locked():
        Path(ready).touch()
        time.sleep(60)


def fork_and_wait(root: str, report: str) -> None:
    """Open, reserve a write, fork a child that outlives this process, and wait to be killed."""
    storage = make_disk(Path(root), "8MiB")
    storage.open()
    storage.store([source(key_of(0), blob(0, 10_000))])
    account = storage._account
    assert account is not None
    with account.locked():
        Path(account.begin(100_000)).touch()
    pid = os.fork()
    if pid == 0:
        refused = str(storage.store([source(key_of(1), blob(1, 1000))])[0])
        Path(f"{report}.part").write_text(json.dumps([os.getpid(), refused]))
        os.rename(f"{report}.part", report)
    time.sleep(60)
