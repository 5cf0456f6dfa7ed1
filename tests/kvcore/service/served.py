"""What the tests of the service share: engines of a server, known bytes through them, processes that can be killed."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvcore.engine import Engine, GroupSpec, ModelSpec, Space, attach_arena
from kvcore.service import open_engine
from kvcore.service.client import RemoteEngine
from kvcore.testing.chunks import hashes, spec
from kvcore.testing.servers.kvcore import KVCoreServer

SOON_S = 10.0
CONFIG: dict[str, Any] = {
    "l1": {"size": "8MiB"},
    "l2": [{"storage": "memory"}],
    "min_object_size": "128KiB",
    "lookup_timeout": "20s",  # others may be busy on this machine
}
WINDOWED = ModelSpec(
    "test", "m", "w", "bfloat16", 2, "LBHNC", "CPU", "vec", 32, 1,
    (GroupSpec(("a", "b"), (64 << 10, 64 << 10)), GroupSpec(("c",), (128 << 10,), window_tokens=64)),
)  # fmt: skip


def until(true: Callable[[], Any], what: str, timeout_s: float = SOON_S) -> Any:
    """Wait until `true()` is; its value."""
    give_up = time.monotonic() + timeout_s
    while not (value := true()):
        assert time.monotonic() < give_up, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)
    return value


def engine_of(server: KVCoreServer, **flags: Any) -> RemoteEngine:
    """An engine that uses the server, connected or not. It is patient: others may be busy on this machine."""
    engine = open_engine(str(server.config), flags={"server.timeout": "5s", **flags}, name="test")
    assert isinstance(engine, RemoteEngine)
    return engine


def connected(server: KVCoreServer, model: ModelSpec | None = None, tenant: str = "", **flags: Any) -> Any:
    """An engine that is connected, and a space that the server knows."""
    engine = engine_of(server, **flags)
    space = engine.register(model or spec(), tenant)
    back(engine)
    engine.clear(space)  # its answer comes behind that to the registration
    assert space.namespace
    return engine, space


def back(engine: Engine, but: str = "") -> str:
    """Wait until the engine has an arena, another one than `but`; its token."""
    return str(until(lambda: (d := engine.descriptor()) and d["token"] != but and d["token"], "a connection"))


def blocks(space: Space, count: int) -> list[list[int]]:
    """Block ids of so many chunks, in every group."""
    return [list(range(count * space.chunk_blocks))] * len(space.groups)


def put(engine: Engine, space: Space, keys: Sequence[bytes], first: int = 0) -> int:
    """Store chunks whose every byte is `first` + their index + 1; how many objects that were."""
    plan = engine.reserve(space, keys, 0, len(keys), blocks(space, len(keys)))
    view = attach_arena(engine.descriptor())
    for copy in plan.copies:
        size = space.groups[copy.group].nbytes
        view.buffer[copy.slot : copy.slot + size] = bytes([first + copy.blocks[0] // space.chunk_blocks + 1]) * size
    view.close()
    engine.publish(plan.id)
    return len(plan.copies)


def contents(engine: Engine, space: Space, keys: Sequence[bytes], first: int = 0) -> list[int]:
    """First byte of each object that a lookup promises; all its bytes are equal, and the slot is the one promised."""
    lookup = engine.lookup(space, keys, first)
    assert lookup.wait(SOON_S)
    if lookup.poll() == first:
        engine.release(lookup)
        return []
    copies = engine.retrieve(lookup, first * space.chunk_blocks, blocks(space, len(keys)))
    view = attach_arena(engine.descriptor())
    found = []
    for copy in copies:
        data = bytes(view.buffer[copy.slot : copy.slot + space.groups[copy.group].nbytes])
        assert data == data[:1] * len(data)
        assert view.generation(copy.slot) == copy.generation
        found.append(data[0])
    view.close()
    engine.release(lookup)
    return found


def nothing_held(server: KVCoreServer) -> bool:
    """Nobody is connected, no lease is held, nothing is quarantined."""
    found = server.metrics()
    names = ("kvcore_sessions", "kvcore_leases", 'kvcore_l1_bytes{state="quarantined"}')
    return all(found.get(name, 0.0) == 0.0 for name in names)


class Child:
    """A process of `service_child.py`: says a line when it has done what it was asked for, and hears lines."""

    def __init__(self, *arguments: Any) -> None:
        script = Path(__file__).with_name("service_child.py")
        words = [a if isinstance(a, str) else json.dumps(a) for a in arguments]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def heard(self) -> Any:
        """The next line it says, from JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child has ended"
        return json.loads(line)

    def tell(self, word: str) -> None:
        """Have it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


__all__ = ["CONFIG", "SOON_S", "WINDOWED", "Child", "back", "blocks", "connected", "contents", "engine_of", "hashes",
           "nothing_held", "put", "spec", "until"]  # fmt: skip
