"""Engines and their workers for `test_chaos.py`, as processes that are forked from this one in a millisecond.

`python chaos_clients.py CONFIG` hears one JSON list a line and answers each with one. An engine looks up, retrieves,
reserves and publishes at random; its worker, a process of its own, copies by plan and checks every byte that the
generations say is to be believed. What must not happen is written to a file that all of them share.
"""

import ctypes
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from kvcore.api import ArenaError, LeaseError
from kvcore.config import Config, load_config
from kvcore.engine import attach_arena
from kvcore.plugins import Registry, registry_from_env
from kvcore.service.client import RemoteEngine
from kvcore.testing.chunks import spec

DOCUMENTS, CHUNKS, OBJECT_BYTES = 24, 8, 128 << 10
SLOW_S = 1.5
"""A call that takes longer is told. A reply may take 0.3 s in these tests; two cores are shared by ten processes."""
WAIT_S = 0.5
_PARTS = 4


def key(document: int, chunk: int) -> bytes:
    """The hash of a chunk of a document."""
    return hashlib.sha256(f"{document}.{chunk}".encode()).digest()


def pattern(document: int, chunk: int) -> bytes:
    """What the chunk's object holds."""
    return hashlib.sha256(f"bytes of {document}.{chunk}".encode()).digest() * (OBJECT_BYTES // 32)


class Diary:
    """One line of JSON per event, all processes' in one file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._counts: Counter[str] = Counter()

    def tell(self, *event: Any) -> None:
        os.write(self._file, (json.dumps(event) + "\n").encode())

    def count(self, name: str, by: int = 1) -> None:
        self._counts[name] += by

    def flush(self) -> None:
        self.tell("counts", self._counts)
        self._counts.clear()


# -- the worker --------------------------------------------------------------------------------------------------------


def work(jobs: Connection, diary: Diary, ran: random.Random) -> None:
    """Copies until its engine is gone; a copy that has begun is ended first, however late that is."""
    view: Any = None
    token = ""
    while True:
        try:
            kind, arena, descriptor, copies = jobs.recv()
        except (EOFError, OSError):
            return
        try:
            if arena != token:
                if view is not None:
                    view.close()
                view, token = None, ""
                if descriptor is None:
                    raise ArenaError("an arena that is not known")
                view, token = attach_arena(descriptor), arena
            done = _store(view, copies, ran) if kind == "store" else _load(view, copies, diary, ran)
        except ArenaError:  # the server is gone: the job has failed
            done = False
        try:
            jobs.send(done)
        except OSError:
            return


def _store(view: Any, copies: list[Any], ran: random.Random) -> bool:
    for slot, _, document, chunk in copies:
        data = pattern(document, chunk)
        for at in _parts(ran):
            view.buffer[slot + at : slot + at + OBJECT_BYTES // _PARTS] = data[at : at + OBJECT_BYTES // _PARTS]
    return True


def _load(view: Any, copies: list[Any], diary: Diary, ran: random.Random) -> bool:
    for slot, generation, document, chunk in copies:
        data = bytearray()
        for at in _parts(ran):
            data += view.buffer[slot + at : slot + at + OBJECT_BYTES // _PARTS]
        if view.generation(slot) != generation:
            diary.count("not believed")  # the engine computes it
        elif data != pattern(document, chunk):
            diary.tell("wrong", document, chunk, slot, generation, bytes(data[:8]).hex(), time.monotonic())
        else:
            diary.count("right")
    diary.flush()
    return True


def _parts(ran: random.Random) -> list[int]:
    """Offsets of an object's parts, and now and then a pause before one: nothing says that a copy is quick."""
    if ran.random() < 0.3:
        time.sleep(ran.random() * 0.02)
    return [i * (OBJECT_BYTES // _PARTS) for i in range(_PARTS)]


# -- the engine --------------------------------------------------------------------------------------------------------


class Client:
    """An engine's scheduler half: every call is timed, and none may raise."""

    def __init__(self, config: Config, registry: Registry, jobs: Connection, diary: Diary, ran: random.Random) -> None:
        self._engine: Any = RemoteEngine(config, registry, "chaos", lambda: None)
        self._space = self._engine.register(spec())
        self._jobs = jobs
        self._diary = diary
        self._ran = ran

    def run(self) -> None:
        """Until its worker is gone, or it is."""
        steps = 0
        while True:
            try:
                self._step()
            except (EOFError, OSError):
                return
            steps += 1
            if steps % 10 == 0:
                self._diary.flush()

    def _step(self) -> None:
        ran = self._ran
        document, count = ran.randrange(DOCUMENTS), ran.randint(1, CHUNKS)
        keys = [key(document, i) for i in range(count)]
        lookup = self._call(self._engine.lookup, self._space, keys)
        self._call(lookup.wait, WAIT_S)
        end = self._call(lookup.poll)
        self._diary.count("lookups")
        if end:
            try:
                copies = self._call(self._engine.retrieve, lookup, 0, self._blocks(end))
            except LeaseError:
                self._diary.count("late")
            else:
                self._copy("load", lookup.arena, document, copies)
        if ran.random() > 0.03:  # else its leases run out
            self._call(self._engine.release, lookup)
        plan = self._call(self._engine.reserve, self._space, keys, end or 0, count, self._blocks(count))
        if plan.copies:
            done = self._copy("store", plan.arena, document, plan.copies)
            if ran.random() > 0.03:  # else it never says so
                self._call(self._engine.publish, plan.id, done)
                self._diary.count("stored" if done else "not stored", len(plan.copies))
        elif not self._engine.descriptor():
            self._diary.count("alone")
            time.sleep(0.02)  # computes

    def _copy(self, kind: str, arena: str, document: int, copies: list[Any]) -> bool:
        descriptor = self._call(self._engine.descriptor)
        known = descriptor if descriptor is not None and descriptor["token"] == arena else None
        blocks = self._space.chunk_blocks
        self._jobs.send((kind, arena, known, [(c.slot, c.generation, document, c.blocks[0] // blocks) for c in copies]))
        return bool(self._jobs.recv())

    def _blocks(self, chunks: int) -> list[list[int]]:
        return [list(range(chunks * self._space.chunk_blocks))]

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        begun, waited = time.monotonic(), _waited_s()
        try:
            return call(*arguments)
        except LeaseError:
            raise
        except Exception as error:
            self._diary.tell("raised", call.__name__, repr(error), time.monotonic())
            os._exit(1)
        finally:
            ended = time.monotonic()
            if ended - begun > SLOW_S:
                self._diary.tell("slow", os.getpid(), call.__name__, begun, ended, _waited_s() - waited)


def _waited_s() -> float:
    """How long this thread has waited for a core so far: a busy machine is nobody's fault."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


# -- the process that forks them ---------------------------------------------------------------------------------------


def _forked(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with this process
            os.close(0)
            run()
        finally:
            os._exit(0)
    return pid


def _start(config: Config, registry: Registry, diary: str, seed: int) -> list[int]:
    """An engine's and its worker's process."""
    near, far = Pipe()

    def worker() -> None:
        near.close()
        work(far, Diary(diary), random.Random(seed + 1))

    def engine() -> None:
        far.close()
        Client(config, registry, near, Diary(diary), random.Random(seed)).run()

    pids = [_forked(engine), _forked(worker)]
    near.close()
    far.close()
    return pids


def main() -> None:
    """Children are waited for here only, so that no number of a process is ever another's."""
    children: set[int] = set()
    registry = registry_from_env()
    config = load_config(sys.argv[1], registry=registry)  # once for all: it takes far longer than a fork
    for line in sys.stdin:
        what, *rest = json.loads(line)
        answer: Any = None
        if what == "start":
            answer = _start(config, registry, *rest)
            children.update(answer)
        elif what == "kill":
            for pid in children.intersection(rest[0]):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                children.remove(pid)
        elif what == "signal":
            for pid in children.intersection(rest[0]):
                os.kill(pid, rest[1])
        elif what == "ended":
            answer = [pid for pid in children if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
