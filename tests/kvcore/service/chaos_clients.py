"""Engines and their workers for `chaos.py`, as processes that are forked from this one in a millisecond.

`python chaos_clients.py CONFIG` hears one JSON list a line and answers each with one. An engine looks up, retrieves,
reserves and publishes at random; its worker, a process of its own, copies by plan and checks every byte that the
generations say is to be believed. What must not happen is written to a file that all of them share. SIGUSR1 has an
engine rest, SIGUSR2 go on.
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
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from kvcore.api import ArenaError, LeaseError
from kvcore.config import Config, load_config
from kvcore.engine import GroupSpec, ModelSpec, attach_arena
from kvcore.plugins import Registry, registry_from_env
from kvcore.service.client import RemoteEngine
from kvcore.service.store import RemoteStore
from kvcore.testing.chunks import spec

DOCUMENTS, CHUNKS, OBJECT_BYTES = 24, 8, 128 << 10
MODELS = {
    "plain": spec(),
    "windowed": ModelSpec(
        "test", "n", "w", "bfloat16", 2, "LBHNC", "CPU", "vec", 32, 1,
        (GroupSpec(("a", "b"), (64 << 10, 64 << 10)), GroupSpec(("c",), (192 << 10,), window_tokens=64)),
    ),
}  # fmt: skip
"""Objects of `OBJECT_BYTES`; of two sizes."""
SLOW_S = 1.5
"""A call that takes longer is told. A reply may take 0.3 s in these tests; two cores are shared by ten processes."""
WAIT_S = 0.5
_PARTS = 4


def key(document: int, chunk: int) -> bytes:
    """The hash of a chunk of a document."""
    return hashlib.sha256(f"{document}.{chunk}".encode()).digest()


def pattern(label: str, nbytes: int) -> bytes:
    """What the object with this label holds."""
    return hashlib.sha256(f"bytes of {label}".encode()).digest() * (nbytes // 32)


class Rest:
    """Whether engines rest. Set by signals, from before there is any."""

    now = False

    @classmethod
    def obey(cls) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: setattr(cls, "now", True))
        signal.signal(signal.SIGUSR2, lambda *_: setattr(cls, "now", False))


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
            if arena != token or kind == "rest":
                if view is not None:
                    view.close()
                view, token = None, ""
                if kind == "rest":
                    jobs.send(True)
                    continue
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
    for slot, _, label, nbytes in copies:
        data = pattern(label, nbytes)
        for at in _parts(ran, nbytes):
            view.buffer[slot + at : slot + at + nbytes // _PARTS] = data[at : at + nbytes // _PARTS]
    return True


def _load(view: Any, copies: list[Any], diary: Diary, ran: random.Random) -> bool:
    for slot, generation, label, nbytes in copies:
        data = bytearray()
        for at in _parts(ran, nbytes):
            data += view.buffer[slot + at : slot + at + nbytes // _PARTS]
        if view.generation(slot) != generation:
            diary.count("not believed")  # the engine computes it
        elif data != pattern(label, nbytes):
            diary.tell("wrong", label, slot, generation, bytes(data[:8]).hex(), time.monotonic())
        else:
            diary.count("right")
            diary.count("bytes", nbytes)
    diary.flush()
    return True


def _parts(ran: random.Random, nbytes: int) -> list[int]:
    """Offsets of an object's parts, and now and then a pause before one: nothing says that a copy is quick."""
    if ran.random() < 0.3:
        time.sleep(ran.random() * 0.02)
    return [i * (nbytes // _PARTS) for i in range(_PARTS)]


# -- the engine --------------------------------------------------------------------------------------------------------


class Client:
    """An engine's scheduler half: every call is timed, and none may raise.

    Attributes:
        slow_s: a call that takes longer is told.

    Args:
        tenants, models: whose KV it looks up and stores, and of which of `MODELS`.
        tidy: it ends every lease itself. Otherwise some are left to run out.
        guests: so often it comes with a tenant that is never heard of again.
        documents: so many there are.
    """

    slow_s = SLOW_S

    def __init__(
        self,
        config: Config,
        registry: Registry,
        jobs: Connection,
        diary: Diary,
        ran: random.Random,
        tenants: Sequence[str] = ("",),
        models: Sequence[str] = ("plain",),
        tidy: bool = False,
        guests: float = 0.0,
        documents: int = DOCUMENTS,
    ) -> None:
        self._engine: Any = RemoteEngine(config, registry, "chaos", lambda: None)
        self._spaces = [(f"{t}.{m}", self._engine.register(MODELS[m], t)) for t in tenants for m in models]
        self._jobs = jobs
        self._diary = diary
        self._ran = ran
        self._forgets = 0.0 if tidy else 0.03
        self._guests = guests
        self._documents = documents
        self._took: list[float] = []

    def run(self) -> None:
        """Until its worker is gone, or it is."""
        steps = 0
        while True:
            try:
                if Rest.now:
                    self._rest()
                self._step()
            except (EOFError, OSError):
                return
            steps += 1
            if steps % 10 == 0:
                self._diary.tell("took", self._took)
                self._diary.flush()
                self._took.clear()

    def _rest(self) -> None:
        """Its worker lets go of the arena: while one has it mapped, the server may have to keep slots for it."""
        self._jobs.send(("rest", "", None, []))
        self._jobs.recv()
        while Rest.now:
            time.sleep(0.02)

    def _step(self) -> None:
        ran = self._ran
        label, space = ran.choice(self._spaces)
        if ran.random() < self._guests:
            label = f"guest {ran.getrandbits(32)}"
            space = self._call(self._engine.register, MODELS["plain"], label)
        document, count = ran.randrange(self._documents), ran.randint(1, CHUNKS)
        label = f"{label}.{document}"
        keys = [key(document, i) for i in range(count)]
        begun = time.monotonic()
        lookup = self._call(self._engine.lookup, space, keys)
        aborted = ran.random() < self._forgets
        if not aborted:
            self._call(lookup.wait, WAIT_S)
        end = self._call(lookup.poll)
        if end is not None:
            self._took.append(round(1000 * (time.monotonic() - begun), 2))
        self._diary.count("lookups")
        if end:
            try:
                copies = self._call(self._engine.retrieve, lookup, 0, self._blocks(space, end))
            except LeaseError:
                self._diary.count("late")
            else:
                self._copy("load", lookup.arena, space, label, copies)
        if aborted or ran.random() >= self._forgets:  # else its leases run out
            self._call(self._engine.release, lookup)
        plan = self._call(self._engine.reserve, space, keys, end or 0, count, self._blocks(space, count))
        if plan.copies:
            done = self._copy("store", plan.arena, space, label, plan.copies)
            if ran.random() >= self._forgets:  # else it never says so
                self._call(self._engine.publish, plan.id, done)
                self._diary.count("stored" if done else "not stored", len(plan.copies))
        elif not self._engine.descriptor():
            self._diary.count("alone")
            time.sleep(0.02)  # computes

    def _copy(self, kind: str, arena: str, space: Any, label: str, copies: list[Any]) -> bool:
        descriptor = self._call(self._engine.descriptor)
        known = descriptor if descriptor is not None and descriptor["token"] == arena else None
        wanted = []
        for c in copies:
            chunk = c.blocks[0] // space.chunk_blocks
            wanted.append((c.slot, c.generation, f"{label}.{chunk}.{c.group}", space.groups[c.group].nbytes))
        self._jobs.send((kind, arena, known, wanted))
        return bool(self._jobs.recv())

    def _blocks(self, space: Any, chunks: int) -> list[list[int]]:
        return [list(range(chunks * space.chunk_blocks))] * len(space.groups)

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
            if ended - begun > self.slow_s:
                self._diary.tell("slow", os.getpid(), call.__name__, begun, ended, _waited_s() - waited, self.slow_s)


class StoreClient(Client):
    """An engine that owns its host memory: its objects go between its buffers and the server's arena."""

    slow_s = 2 * SLOW_S  # a load waits for the tiers itself

    def __init__(self, *args: Any, tenants: Sequence[str] = ("",), **how: Any) -> None:
        super().__init__(*args, tenants=tenants, **how)
        self._store = RemoteStore(self._engine)
        self._pages = [(t, self._store.register(MODELS["plain"], "chaos/1", t)) for t in tenants]

    def _step(self) -> None:
        tenant, space = self._ran.choice(self._pages)
        document, count = self._ran.randrange(self._documents), self._ran.randint(1, CHUNKS)
        keys = [key(document, i) for i in range(count)]
        data = [pattern(f"{tenant}.page.{document}.{i}", OBJECT_BYTES) for i in range(count)]
        pages = [bytearray(OBJECT_BYTES) for _ in keys]
        there = self._call(self._store.load, space, keys, [[memoryview(page)] for page in pages])
        for i in range(count):
            if there[i] and pages[i] != data[i]:
                self._diary.tell("wrong", tenant, document, i, bytes(pages[i][:8]).hex(), time.monotonic())
        self._diary.count("right", sum(there))
        self._diary.count("bytes", sum(there) * OBJECT_BYTES)
        missing = [i for i in range(count) if not there[i]]
        given = [[memoryview(data[i])] for i in missing]
        self._diary.count("stored", sum(self._call(self._store.store, space, [keys[i] for i in missing], given)))
        self._call(self._store.exists, space, keys)
        if not self._engine.descriptor():
            self._diary.count("alone")
            time.sleep(0.02)  # computes


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


def _start(config: Config, registry: Registry, diary: str, seed: int, how: dict[str, Any]) -> list[int]:
    """An engine's and its worker's process; `how`: see `Client`, or with `store` a `StoreClient`."""
    near, far = Pipe()

    def worker() -> None:
        near.close()
        work(far, Diary(diary), random.Random(seed + 1))

    def engine() -> None:
        far.close()
        kind = StoreClient if how.pop("store", False) else Client
        kind(config, registry, near, Diary(diary), random.Random(seed), **how).run()

    pids = [_forked(engine), _forked(worker)]
    near.close()
    far.close()
    return pids


def main() -> None:
    """Children are waited for here only, so that no number of a process is ever another's."""
    Rest.obey()
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
