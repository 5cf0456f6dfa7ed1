"""One NIXL agent with one backend: registers memory and moves bytes, and returns when NIXL lets go of them."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from kvcore.api import StorageError

MAX_IO_BYTES = 16 << 20
"""Longer pieces are cut: cuFile's batches take no more, and the rate of one large file does not suffer."""
MIN_POOL = 16_384
"""The least I/Os that NIXL's POSIX backend must hold. One call has half as many at most; with a full pool NIXL begins a
transfer by half, calls it failed, and goes on with that half."""
_POOL = "ios_pool_size"
_RETRIES = {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "3"}
_numbers = itertools.count()


class Backend(NamedTuple):
    """What this package knows of one of NIXL's backends.

    Args:
        plugin: NIXL's name for it.
        remote: the kind of its far side, `FILE` or `OBJ`.
        shared: one agent serves all calls at once; else each call has its own, whose queue nobody else waits for.
        any_memory: registering costs next to nothing (1 us), so memory outside the arena is registered for one call
            instead of being copied.
        jobs: objects in flight per call.
        tested: it has run in the tests.
    """

    plugin: str
    remote: Literal["FILE", "OBJ"]
    shared: bool
    any_memory: bool
    jobs: int
    tested: bool


BACKENDS = {
    "posix": Backend("POSIX", "FILE", shared=False, any_memory=True, jobs=64, tested=True),
    "obj": Backend("OBJ", "OBJ", shared=True, any_memory=False, jobs=64, tested=True),
    # cuFile pins what is registered, which is slow, and twice is an error; it has 16 batches, one per object in flight
    "gds": Backend("GDS", "FILE", shared=True, any_memory=False, jobs=4, tested=False),
    "gds_mt": Backend("GDS_MT", "FILE", shared=True, any_memory=False, jobs=16, tested=False),
}


class Piece(NamedTuple):
    """Bytes that lie at `address` in memory, and from `offset` on in a file or an object."""

    address: int
    nbytes: int
    offset: int


class Job(NamedTuple):
    """One object to move. `device` is a file's descriptor or, with an object's key in `name`, a number of its own."""

    device: int
    name: str
    pieces: Sequence[Piece]


class Agent:
    """Several threads may use a `shared` backend's agent at once, any other's one at a time.

    Raises `StorageError` when NIXL cannot give this backend.
    """

    def __init__(self, library: Any, backend: Backend, params: dict[str, str]) -> None:
        self._backend = backend
        self._name = f"kvcore-{os.getpid()}-{next(_numbers)}"  # NIXL wants a name, although nobody else knows of it
        sync = library.nixl_thread_sync_t
        config = library.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=sync.NIXL_THREAD_SYNC_RW if backend.shared else sync.NIXL_THREAD_SYNC_NONE,
        )
        self._agent = library.nixl_agent(self._name, config)
        self._check_params(params)
        try:
            with _few_retries() if backend.remote == "OBJ" else contextlib.nullcontext():
                self._agent.create_backend(backend.plugin, params)
        except Exception as error:  # NIXL's errors have no common base
            hint = "cuFile (libcufile) and an NVIDIA driver" if "GDS" in backend.plugin else "other `params`"
            raise StorageError(
                f"NIXL cannot start its backend {backend.plugin} ({error}; its lines on stderr say why): it needs "
                f"{hint}, or choose another `backend`"
            ) from error
        self.sound = True
        """False: something failed, so that its queue is better given up with it."""

    def register(self, address: int, nbytes: int) -> Any:
        """Let this memory be moved from and to, until `forget`. Raises `StorageError`."""
        return self._register([(address, nbytes, 0, "")], "DRAM")

    def forget(self, token: Any) -> None:
        """Undo `register`."""
        try:
            self._agent.deregister_memory(token)
        except Exception:
            self.sound = False

    def find(self, names: Sequence[str]) -> list[bool]:
        """Which objects the bucket holds. Raises `StorageError` when NIXL did not get an answer for each."""
        try:
            answers = self._agent.query_memory(
                [(0, 0, 0, n) for n in names], self._backend.plugin, self._backend.remote
            )
        except Exception as error:
            raise StorageError(f"NIXL cannot ask for objects ({error}; its lines on stderr say why)") from error
        return [answer is not None for answer in answers]

    def move(
        self,
        way: Literal["READ", "WRITE"],
        jobs: Sequence[Job],
        memory: Sequence[tuple[int, int]] = (),
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[str]:
        """Move all jobs at once; for each, what went wrong, or "". Raises `StorageError` when nothing was begun.

        It returns, or raises, only when NIXL touches none of the memory any more, however long that takes: whoever
        waits for the caller has a deadline of its own.

        Args:
            memory: address and length of what must be registered for this call.
            meanwhile: called once all is under way.
        """
        remote = [(0, max(p.offset + p.nbytes for p in j.pieces), j.device, j.name) for j in jobs if j.pieces]
        with contextlib.ExitStack() as stack:
            if memory:
                stack.callback(self.forget, self._register([(*m, 0, "") for m in dict.fromkeys(memory)], "DRAM"))
            if remote:
                stack.callback(self.forget, self._register(remote, self._backend.remote))
            transfers = [_Transfer() for _ in jobs]
            try:
                for job, transfer in zip(jobs, transfers, strict=True):
                    if job.pieces:
                        self._post(transfer, way, job)
                meanwhile()
            finally:
                self._wait(transfers)
        if any(t.error for t in transfers):
            self.sound = False
        return [t.error for t in transfers]

    def _post(self, transfer: "_Transfer", way: str, job: Job) -> None:
        """Begin one job. Its own descriptor list, not one for the whole batch: NIXL then says which object failed."""
        agent = self._agent
        try:
            pieces = [part for piece in job.pieces for part in _cut(piece)]
            local = agent.get_xfer_descs([(p.address, p.nbytes, 0) for p in pieces], "DRAM")
            remote = agent.get_xfer_descs([(p.offset, p.nbytes, job.device) for p in pieces], self._backend.remote)
            transfer.handle = agent.initialize_xfer(way, local, remote, self._name)
            transfer.follow(agent.transfer)
        except Exception as error:
            transfer.error = _text(error)

    def _wait(self, transfers: Sequence["_Transfer"]) -> None:
        begun = time.perf_counter()
        for transfer in transfers:
            if transfer.busy:
                transfer.follow(self._agent.check_xfer_state)
        while busy := [t for t in transfers if t.busy]:
            time.sleep(_pause_s(time.perf_counter() - begun))
            for transfer in busy:
                transfer.follow(self._agent.check_xfer_state)
        for transfer in transfers:
            # Never one under way: NIXL would free what its queue still points to.
            if transfer.handle is not None:
                try:
                    transfer.handle.release()
                except Exception:
                    self.sound = False

    def _register(self, descriptors: list[tuple[int, int, int, str]], kind: str) -> Any:
        try:
            return self._agent.register_memory(descriptors, kind)
        except Exception as error:
            self.sound = False
            raise StorageError(f"NIXL refuses to register {kind} for {self._backend.plugin}: {_text(error)}") from error

    def _check_params(self, params: dict[str, str]) -> None:
        """NIXL itself takes a misspelt parameter without a word. Only some backends say which they have."""
        known = self._agent.get_plugin_params(self._backend.plugin)
        wrong = sorted(params.keys() - known.keys()) if known else []
        if wrong:
            raise StorageError(
                f"`params`: NIXL's {self._backend.plugin} has no {', '.join(wrong)}; it has {', '.join(sorted(known))}"
            )
        pool = params.get(_POOL, str(MIN_POOL))
        if not pool.isdecimal() or int(pool) < MIN_POOL:
            raise StorageError(
                f"`params`: {_POOL} {pool} is too small, {MIN_POOL} or more is needed; NIXL's default will do"
            )


class _Transfer:
    """The state of one job."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.busy = False
        self.error = ""

    def follow(self, ask: Callable[[Any], str]) -> None:
        """Take over the state that NIXL's `ask` tells."""
        try:
            state = ask(self.handle)
        except Exception as error:
            state, self.error = "ERR", _text(error)
        self.busy = state == "PROC"
        if state not in ("PROC", "DONE"):
            self.error = self.error or "NIXL says ERR"


def _pause_s(elapsed_s: float) -> float:
    """How long to wait before the next question: late by 3 % or 1 ms, without a core spent on asking."""
    return min(max(elapsed_s / 32, 50e-6), max(elapsed_s / 256, 1e-3), 0.05)


def _cut(piece: Piece) -> Iterator[Piece]:
    for at in range(0, piece.nbytes, MAX_IO_BYTES):
        yield Piece(piece.address + at, min(MAX_IO_BYTES, piece.nbytes - at), piece.offset + at)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


_environment = threading.Lock()


@contextlib.contextmanager
def _few_retries() -> Iterator[None]:
    """The AWS client in NIXL reads these variables when it is made. Without them it tries a dead server for 26 s.

    They are set for the C library alone: `os.environ`, and with it every other AWS client here, stays as it is.
    """
    if any(name in os.environ for name in _RETRIES):
        yield
        return
    with _environment:
        for name, value in _RETRIES.items():
            os.putenv(name, value)
        try:
            yield
        finally:
            for name in _RETRIES:
                os.unsetenv(name)
