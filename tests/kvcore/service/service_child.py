"""Processes of the service's tests: clients and workers that are killed or paused. `python service_child.py WHAT ...`

Each says one line of JSON when it has got as far as its name says, and then waits for lines, or for its end.
"""

import json
import os
import socket
import sys
import time
from typing import Any

from served import back, blocks, contents, hashes, spec

from kvcore.engine import GroupSpec, ModelSpec, attach_arena
from kvcore.service import open_engine, open_store
from kvcore.service import store as stores


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def heard() -> str:
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    return line.strip()


def opened(config: str) -> Any:
    engine = open_engine(config, flags={"server.timeout": "5s"}, name="child")
    space = engine.register(spec())
    back(engine)
    return engine, space


def half_stored(config: str, count: str) -> None:
    """Has reserved, and copied half of each object."""
    engine, space = opened(config)
    keys = hashes(int(count))
    plan = engine.reserve(space, keys, 0, len(keys), blocks(space, len(keys)))
    view = attach_arena(engine.descriptor())
    for copy in plan.copies:
        half = space.groups[0].nbytes // 2
        view.buffer[copy.slot : copy.slot + half] = b"\xee" * half
    say([copy.slot for copy in plan.copies])
    heard()
    engine.publish(plan.id)
    say("published")
    heard()


def store_of(config: str, size: int) -> Any:
    """An object store of the server, and a space for objects of `size` bytes."""
    store = open_store(config, flags={"server.timeout": "5s"}, name="child")
    group = GroupSpec(("a",), (size,))
    spec = ModelSpec("test", "m", "w", "bfloat16", 2, "page", "cpu", "vec", 16, 1, (group,))
    space = store.register(spec, "test/1")
    while not store.stats()["kvcore_server_up"]:
        time.sleep(0.01)
    return store, space


def whole_put(config: str, size: str) -> None:
    """Has stored an object, whose every byte is 7."""
    store, space = store_of(config, int(size))
    say(store.store(space, hashes(1), [[memoryview(b"\7" * int(size))]]))
    heard()


def half_put(config: str, given: str) -> None:
    """An object store that has copied half of an object."""
    size = int(given)
    store, space = store_of(config, size)
    keys = hashes(5)

    def half(parts: Any, into: memoryview) -> bool:
        into[: size // 2] = b"\xee" * (size // 2)
        say([key.hex() for key in keys])
        heard()
        return False

    stores.copy_in = half
    store.store(space, keys, [[memoryview(bytearray(size))] for _ in keys])


def planned(config: str, count: str) -> None:
    """Has reserved for a worker in another process."""
    engine, space = opened(config)
    keys = hashes(int(count))
    plan = engine.reserve(space, keys, 0, len(keys), blocks(space, len(keys)))
    say({"descriptor": engine.descriptor(), "slots": [copy.slot for copy in plan.copies]})
    heard()


def worker(descriptor: str) -> None:
    """Has the arena mapped."""
    view = attach_arena(json.loads(descriptor), rank=3)
    say("attached")
    heard()
    view.close()


def reading(config: str, count: str) -> None:
    """Holds the leases of a lookup; told to, releases it and publishes what it never reserved."""
    engine, space = opened(config)
    lookup = engine.lookup(space, hashes(int(count)))
    copies = engine.retrieve(lookup, 0, blocks(space, int(count)))
    view = attach_arena(engine.descriptor())
    say(len(copies))
    heard()
    late = [copy for copy in copies if view.generation(copy.slot) != copy.generation]
    engine.release(lookup)
    engine.publish(1)
    say(len(late))
    heard()


def crowd(config: str, count: str) -> None:
    """So many engines, each with a lookup, a plan and a worker's mapping."""
    kept = []
    for i in range(int(count)):
        engine, space = opened(config)
        lookup = engine.lookup(space, hashes(4))
        plan = engine.reserve(space, hashes(1, 100 + i), 0, 1, blocks(space, 1))
        kept.append((engine, lookup, plan, attach_arena(engine.descriptor())))
    say(len(kept))
    heard()


def forked(config: str) -> None:
    """Has a child process that outlives it, and that has used the engine and closed it."""
    engine, space = opened(config)
    before = contents(engine, space, hashes(2))
    lookup = engine.lookup(space, hashes(2))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        engine.close()
        answers = [lookup.poll(), engine.lookup(space, hashes(2)).poll(), engine.descriptor()]
        plan = engine.reserve(space, hashes(3), 0, 3, blocks(space, 3))
        os.write(writer, json.dumps([*answers, plan.id]).encode())
        os.close(writer)
        sys.stdin.readline()  # stays until the test ends it
        os._exit(0)
    os.close(writer)
    in_child = json.loads(os.read(reader, 1000))
    say({"child": in_child, "pid": pid, "before": before, "after": contents(engine, space, hashes(2))})
    os._exit(0)


def forked_while_connecting(config: str) -> None:
    """Has a child process that was forked before the server, which is frozen, has answered; then stores half."""
    engine = open_engine(config, flags={"server.timeout": "5s"}, name="child")
    space = engine.register(spec())
    time.sleep(0.5)  # it is connected, and has said who it is
    pid = os.fork()
    if pid == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    say(pid)
    back(engine)
    say(len(engine.reserve(space, hashes(), 0, 8, blocks(space, 8)).copies))
    heard()


def squatting(path: str) -> None:
    """Listens on the server's path, as another user where it may become one."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)
        if os.geteuid() == 0:
            os.seteuid(65534)
        made.listen()
        say(os.geteuid())
        heard()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
