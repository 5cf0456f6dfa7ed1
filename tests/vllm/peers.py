"""A second engine, in a process of its own, that does what it is told: one call and one answer per line of JSON.

In a scenario: `with Peer(model, extra) as peer: peer.call("run", [prompt], 16)`.
"""

import json
import os
import signal
import socket
import subprocess
import time
from types import TracebackType
from typing import Any, Self

from engines import engine

ANSWER_S = 240.0


class Peer:
    """The process. It starts at once; the first answer says that its engine is there."""

    def __init__(self, model: str, extra: dict[str, Any], **kwargs: Any) -> None:
        from warm import SOCKET, Forked  # which whoever only imports this need not find

        ours, theirs = socket.socketpair()
        with theirs:
            log = os.readlink("/proc/self/fd/1")
            self.process = Forked(
                os.environ[SOCKET], "peers:work", model, extra, kwargs, environment=os.environ, output=log,
                files=[theirs.fileno()],
            )  # fmt: skip
        ours.settimeout(ANSWER_S)
        self._socket = ours
        self._lines = ours.makefile("r")
        self._asked = 1  # its first answer comes unasked

    def ask(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Begin a call."""
        self._socket.sendall(json.dumps([name, args, kwargs]).encode() + b"\n")
        self._asked += 1

    def answer(self) -> Any:
        """The answer to the last call that was begun. Raises `EOFError` when the process is gone."""
        line = ""
        for _ in range(self._asked):
            line = self._lines.readline()
            if not line:
                raise EOFError(f"the other engine ended with {self.process.wait(10)}")
        self._asked = 0
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"in the other engine: {answer['error']}")
        return answer["result"]

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Ask, and wait for the answer."""
        self.ask(name, *args, **kwargs)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._lines.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()


class Calls:
    """What the other engine can do."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def run(self, prompts: list[Any], max_tokens: int, transfer: dict[str, Any] | None = None) -> dict[str, Any]:
        """Texts, cached tokens, and what a router gets back."""
        texts, cached = self.engine.run(prompts, max_tokens, transfer=transfer)
        return {"texts": texts, "cached": cached, "answered": self.engine.answered}

    def settle(self) -> None:
        """Step until nothing is under way."""
        self.engine.settle()

    def slow_saves(self, seconds: float) -> None:
        """From now on the copies of a save take so much longer."""
        worker = _worker()
        copy = worker._copier._save

        def slowly(*job: Any) -> bool:
            time.sleep(seconds)
            done: bool = copy(*job)
            return done

        worker._copier._save = slowly

    def die_saving(self) -> None:
        """Be killed in the middle of the next copy: half of its objects are in the arena, nobody has been told."""
        worker = _worker()

        def half(job: Any) -> bool:
            worker._arenas.cache(job.arena).store(job.copies[: max(1, len(job.copies) // 2)])
            os.kill(os.getpid(), signal.SIGKILL)
            return True

        worker._copy_out = half


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker


def work(model: str, extra: dict[str, Any], kwargs: dict[str, Any], fd: int) -> None:
    """Be the other engine, until nobody asks any more."""
    with socket.socket(fileno=fd) as ours, ours.makefile("rw") as lines, engine(model, extra, **kwargs) as made:
        calls = Calls(made)
        print(json.dumps({"result": None}), file=lines, flush=True)
        for line in lines:
            name, args, kwargs = json.loads(line)
            try:
                answer = {"result": getattr(calls, name)(*args, **kwargs)}
            except Exception as error:
                answer = {"error": repr(error)}
            print(json.dumps(answer), file=lines, flush=True)
