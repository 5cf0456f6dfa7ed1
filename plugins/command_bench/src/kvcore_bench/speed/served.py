"""A `kvcore serve` process to measure, with small objects, and engines that use it."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvcore import __version__
from kvcore.config import Address, load_config
from kvcore.engine import GroupSpec, ModelSpec, Space
from kvcore.plugins import Registry
from kvcore.service import wire
from kvcore.service.address import connect
from kvcore.service.client import RemoteEngine
from kvcore.testing.servers import Server, ServerError

CHUNKS = 128
BLOCK_TOKENS = 16
_SMALL = 4096


def model(block_bytes: int = _SMALL, layers: int = 1) -> ModelSpec:
    """A model whose layers have blocks of so many bytes."""
    group = GroupSpec(tuple(f"layer.{i}" for i in range(layers)), (block_bytes,) * layers)
    return ModelSpec(
        engine="bench", model="bench", weights="", dtype="bfloat16", element_bytes=2, layout="bench", backend="bench",
        isa="bench", block_tokens=BLOCK_TOKENS, ranks=1, groups=(group,),
    )  # fmt: skip


class Served:
    """A server whose L1 has `slots` slots of `object_bytes`, and one engine. A context manager.

    Attributes:
        config: its file. ready_s: seconds from the start of its process to its answer. engine, space: the engine's.
    """

    def __init__(
        self, slots: int, object_bytes: int = _SMALL, spec: ModelSpec | None = None, chunk_tokens: int = BLOCK_TOKENS
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvb")  # short: a socket's path has at most 107 bytes
        folder = Path(self._folder.name)
        self.config = folder / "kvcore.yaml"
        size = -(-max(slots * object_bytes * 33 // 32, 64 << 20) >> 20)
        values = {
            "server": {"url": f"unix://{folder}/s", "timeout": "10s"},  # what we measure shall not be cut off
            "l1": {"size": f"{size}MiB", "lease": "600s"},
            "l2": [],
            "chunk_tokens": chunk_tokens,
            "log_level": "warning",
        }
        self.config.write_text(json.dumps(values))  # YAML, too
        command = [sys.executable, "-m", "kvcore", "serve", "--config", str(self.config)]
        self._server = Server("serve", command, ready=partial(_welcomed, f"{folder}/s"), folder=folder)
        self._arena_kib = size << 10
        with ExitStack() as undo:
            undo.callback(self._folder.cleanup)
            undo.callback(self._server.stop)
            begun = time.perf_counter()
            self._server.start()
            self.ready_s = time.perf_counter() - begun
            self.engine = undo.enter_context(closing(engine_of(self.config)))
            self.space = self.engine.register(spec or model())
            wait_for(self.engine)
            self._undo = undo.pop_all()

    def settled(self) -> Self:
        """Once its arena is faulted in, so that this does not run beside what is measured."""
        end = time.monotonic() + 60
        while self._status("RssShmem") < self._arena_kib and time.monotonic() < end:
            time.sleep(0.02)
        return self

    def fill(self, objects: int, seed: int = 1) -> list[list[bytes]]:
        """Publish so many objects, whole prompts of `CHUNKS`; the prompts' hashes."""
        ran = random.Random(seed)  # noqa: S311 - test data
        prompts = []
        blocks = [range(CHUNKS * self.space.chunk_blocks)]
        for _ in range(objects // CHUNKS):
            hashes = [ran.randbytes(32) for _ in range(CHUNKS)]
            plan = self.engine.reserve(self.space, hashes, 0, CHUNKS, blocks)
            if len(plan.copies) != CHUNKS:
                raise AssertionError(f"a chunk found no room: {plan.skipped}")
            self.engine.publish(plan.id)
            prompts.append(hashes)
        return prompts

    def rss_mib(self) -> float:
        """What the server takes beside its arena."""
        return (self._status("RssAnon") + self._status("RssFile")) / 1024

    def cpu_ms(self) -> float:
        """CPU time that the server's threads have taken so far."""
        folder = Path(f"/proc/{self._server.pid}/task")
        return sum(int((task / "schedstat").read_text().split()[0]) for task in folder.iterdir()) / 1e6

    def close(self) -> None:
        """End the server. Idempotent."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _status(self, field: str) -> int:
        lines = Path(f"/proc/{self._server.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


class Askers:
    """Processes with engines that look prompts up one after another, as many at once as there are processes.

    Args:
        served: what they ask. prompts: what they ask for. processes: how many. engines: of each of them.
    """

    def __init__(self, served: Served, prompts: Sequence[Sequence[bytes]], processes: int, engines: int) -> None:
        words = [sys.executable, "-m", "kvcore_bench.speed.served", str(served.config), str(engines)]
        self._processes = [
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            for _ in range(processes)
        ]
        for process in self._processes:
            self._say(process, [[h.hex() for h in p] for p in prompts])
        for process in self._processes:
            self._hear(process)

    def rate(self, seconds: float) -> float:
        """Lookups in a second, of all together."""
        for process in self._processes:
            self._say(process, seconds)
        return sum(float(self._hear(process)) for process in self._processes)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def _say(self, process: "subprocess.Popen[bytes]", value: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(value).encode() + b"\n")
        process.stdin.flush()

    def _hear(self, process: "subprocess.Popen[bytes]") -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError("a process that looks up has ended")
        return json.loads(line)


def engine_of(config: Path) -> RemoteEngine:
    """An engine that uses the server of this file, when it is there."""
    registry = Registry()
    return RemoteEngine(load_config(str(config), env={}, registry=registry), registry, "bench", lambda: None)


def wait_for(engine: RemoteEngine) -> None:
    """Until it is connected. Raises `ServerError`."""
    end = time.monotonic() + 30
    while engine.descriptor() is None:
        if time.monotonic() > end:
            raise ServerError("the server does not let an engine in")
        time.sleep(0.001)


def _welcomed(path: str) -> bool:
    """Does a server let us in?"""
    with connect(Address(path), 1.0) as probe:
        probe.settimeout(1.0)
        probe.sendall(wire.frame(wire.Hello(wire.PROTOCOL, __version__, "bench", os.getpid())))
        return bool(probe.recv(4))


def look_up(engine: RemoteEngine, space: Space, hashes: Sequence[bytes]) -> None:
    """One lookup, all of it found, and its release: what an engine says to the server for a hit."""
    lookup = engine.lookup(space, hashes)
    if lookup.poll() != len(hashes):
        raise AssertionError(f"a resident chunk was not found: {lookup.misses}")
    engine.release(lookup)


def _ask(config: Path, count: int) -> None:
    """One of the `Askers`."""
    engines = [engine_of(config) for _ in range(count)]
    spaces = [engine.register(model()) for engine in engines]
    for engine in engines:
        wait_for(engine)
    prompts = [[bytes.fromhex(h) for h in prompt] for prompt in json.loads(sys.stdin.readline())]
    for engine, space in zip(engines, spaces, strict=True):
        look_up(engine, space, prompts[0])
    print(json.dumps(os.getpid()), flush=True)
    for line in sys.stdin:
        seconds, begun, done = float(json.loads(line)), time.perf_counter(), 0
        while (passed := time.perf_counter() - begun) < seconds:
            i = done % count
            look_up(engines[i], spaces[i], prompts[done % len(prompts)])
            done += 1
        print(json.dumps(done / passed), flush=True)


if __name__ == "__main__":
    _ask(Path(sys.argv[1]), int(sys.argv[2]))
