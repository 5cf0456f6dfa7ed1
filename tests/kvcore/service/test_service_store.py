"""The object store of a server: what one process stores others load, into their own buffers, and never a wrong byte."""

import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from served import CONFIG, Child, hashes, nothing_held
from served import until as within

from kvcore.api import ConfigError
from kvcore.engine import ArenaView, GroupSpec, ModelSpec, ObjectStore, StoreSpace
from kvcore.engine.attach import _ServedView
from kvcore.engine.copying import copy_out
from kvcore.service import open_store
from kvcore.service import store as stores
from kvcore.service.store import RemoteStore
from kvcore.testing.servers.kvcore import KVCoreServer

NBYTES = 3 * 7919 + 5
PATIENCE_S = 60.0
Open = Callable[..., RemoteStore]


def until(true: Callable[[], Any], what: str) -> Any:
    return within(true, what, PATIENCE_S)


def model(*groups: GroupSpec) -> ModelSpec:
    return ModelSpec(
        "test", "m", "w", "bfloat16", 2, "page", "cpu", "vec", 16, 1, groups or (GroupSpec(("a",), (NBYTES,)),)
    )


def content(seed: object) -> bytes:
    return random.Random(str(seed)).randbytes(NBYTES)


def parts(data: bytes, pieces: int = 3) -> list[memoryview]:
    """Copies of consecutive ranges of `data`, of odd sizes, at odd addresses."""
    rng = random.Random(len(data))
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(pieces - 1))
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        room = memoryview(bytearray(end - begin + 1))[1:]
        room[:] = data[begin:end]
        found.append(room)
    return found


def put(store: ObjectStore, space: StoreSpace, keys: list[bytes], pieces: int = 3) -> list[bool]:
    return store.store(space, keys, [parts(content(k), pieces) for k in keys])


def got(store: ObjectStore, space: StoreSpace, keys: list[bytes], pieces: int = 4) -> list[bool]:
    """What `load` says; what it says is there has been compared with what was stored."""
    into = [parts(bytes(NBYTES), pieces) for _ in keys]
    arrived = store.load(space, keys, into)
    for key, there, data in zip(keys, arrived, into, strict=True):
        assert not there or b"".join(data) == content(key)
    return arrived


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:

        def open_(server: KVCoreServer, **flags: Any) -> RemoteStore:
            store = open_store(str(server.config), flags={"server.timeout": "5s", **flags}, name="test")
            assert isinstance(store, RemoteStore)
            stack.callback(store.close)
            until(lambda: store.stats()["kvcore_server_up"], "a connection")
            return store

        yield open_


def test_what_one_stores_another_loads(server: KVCoreServer, opened: Open) -> None:
    one, other = opened(server), opened(server)
    mine, same = one.register(model(), "test/1"), other.register(model(), "test/1")
    keys = hashes(9)
    assert one.exists(mine, keys) == got(one, mine, keys) == [False] * 9
    stored = [keys[i] for i in (0, 1, 3, 4, 8)]
    assert put(one, mine, stored) == [True] * 5
    there = [key in stored for key in keys]
    until(lambda: other.exists(same, keys) == there, "what was published is there")
    assert other.prefix(same, keys) == 2
    assert got(other, same, keys) == there
    assert got(other, same, keys[::-1]) == there[::-1]
    assert got(other, same, [keys[0], keys[0], keys[2], keys[0]]) == [True, True, False, True]
    assert put(other, same, [keys[0], keys[5], keys[5]]) == [True] * 3, "what is there is as good as stored"
    assert server.metrics()["kvcore_l1_objects"] == 6, "an object is one block, whatever `min_object_size` says"
    other.delete(same, [keys[0], keys[7], keys[8]])
    assert one.exists(mine, keys) == [False, True, False, True, True, True, False, False, False]
    one.close()
    other.close()
    until(lambda: nothing_held(server), "everything is released")
    assert got(one, mine, keys) == one.exists(mine, keys) == put(one, mine, keys) == [False] * 9


def test_what_another_process_stored_is_there_after_its_end(server: KVCoreServer, opened: Open) -> None:
    store = opened(server)
    space = store.register(model(), "test/1")
    with Child("whole_put", str(server.config), str(NBYTES)) as child:
        assert child.heard() == [True]
    into = parts(bytes(NBYTES))
    until(lambda: store.load(space, hashes(1), [into]) == [True], "it is there")
    assert b"".join(into) == b"\7" * NBYTES


def test_groups_tenants_and_schemes_are_apart(server: KVCoreServer, opened: Open) -> None:
    store = opened(server, chunk_tokens=64)
    two = model(GroupSpec(("a",), (NBYTES,)), GroupSpec(("b",), (NBYTES,), window_tokens=32))
    mine = store.register(two, "test/1")
    keys = hashes(4)
    assert store.store(mine, keys, [parts(content(k)) for k in keys], group=1) == [True] * 4
    assert store.exists(mine, keys, group=1) == [True] * 4
    assert store.exists(mine, keys) == [False] * 4
    assert store.exists(store.register(two, "test/2"), keys, group=1) == [False] * 4
    assert store.exists(store.register(two, "test/1", tenant="alice"), keys, group=1) == [False] * 4
    assert (
        store.exists(mine, keys, group=2) == store.load(mine, keys, [parts(bytes(NBYTES))] * 4, group=2) == [False] * 4
    )
    mixed = [b"x" * 16, b"y" * 64, b"short", keys[0]]
    assert put(store, store.register(model(), "test/1"), mixed) == [True, True, False, True]


def test_the_servers_tiers_are_found_by_a_store_without_a_server(folder: Path, opened: Open) -> None:
    tiers = [{"storage": {"plugin": "disk", "path": str(folder / "disk"), "capacity": "64MiB"}}]
    keys = hashes(6)
    with KVCoreServer(folder, {**CONFIG, "l2": tiers}) as server:
        store = opened(server)
        space = store.register(model(), "test/1")
        assert put(store, space, keys) == [True] * 6
    config = folder / "local.json"
    config.write_text(
        '{"lookup_timeout": "20s", "l2": [{"storage": {"plugin": "disk", "path": "%s"}}]}' % (folder / "disk")
    )
    local = open_store(str(config))
    assert got(local, local.register(model(), "test/1"), keys) == [True] * 6
    local.close()
    assert got(store, space, keys) == [False] * 6
    with KVCoreServer(folder, {**CONFIG, "l2": tiers}):  # another server, with what is on disk
        until(lambda: store.stats()["kvcore_server_up"], "a connection")
        assert store.prefix(space, keys) == 6
        assert got(store, space, keys) == [True] * 6
        store.delete(space, keys)
        assert store.exists(space, keys) == [False] * 6


def test_without_a_server_everything_is_a_miss_at_once(folder: Path) -> None:
    config = folder / "kvcore.json"
    config.write_text('{"server": "unix://%s"}' % (folder / "none.sock"))
    store = open_store(str(config))
    space = store.register(model(), "test/1")
    keys = hashes(64)
    begun = time.monotonic()
    assert store.exists(space, keys) == got(store, space, keys) == put(store, space, keys) == [False] * 64
    store.delete(space, keys)
    assert time.monotonic() - begun < 5
    assert store.stats()['kvcore_miss_chunks_total{reason="no_server"}'] == 2 * 64
    store.close()
    config.write_text('{"server": ["unix:///a.sock", "unix:///b.sock"]}')
    with pytest.raises(ConfigError, match="2 servers"):
        open_store(str(config))


def test_more_than_l1_holds_goes_through_it_in_batches(server: KVCoreServer, opened: Open) -> None:
    store = opened(server)
    space = store.register(model(), "test/1")
    keys = hashes(600)  # 14 MiB through 8 MiB
    for at in range(0, 600, 100):
        assert put(store, space, keys[at : at + 100], pieces=1) == [True] * 100
        assert store._engine.drain() == 0
    assert got(store, space, keys, pieces=1) == [True] * 600


def test_a_call_with_more_than_l1_holds_waits_for_the_tiers(server: KVCoreServer, opened: Open) -> None:
    store = opened(server)
    space = store.register(model(), "test/1")
    keys = hashes(600)
    assert put(store, space, keys, pieces=1) == [True] * 600
    assert store._engine.drain() == 0
    assert sum(n for name, n in server.metrics().items() if name.startswith("kvcore_tier_dropped_total")) == 0
    for at in range(0, 600, 100):
        assert got(store, space, keys[at : at + 100], pieces=1) == [True] * 100


def test_a_slot_that_goes_to_another_during_the_copy_is_no_hit(
    folder: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KVCoreServer(folder, {**CONFIG, "l1": {"size": "8MiB", "lease": "1s"}, "l2": []}) as server:
        store, other = opened(server), opened(server)
        space, same = store.register(model(), "test/1"), other.register(model(), "test/1")
        keys = hashes(2)
        assert put(store, space, keys) == [True] * 2
        paused = []

        def late(source: memoryview, into: Any) -> bool:
            def gone() -> bool:
                other.delete(same, keys)
                return server.metrics()["kvcore_l1_objects"] == 0

            if not paused:  # as a process that is stopped for longer than its lease
                paused.append(until(gone, "the lease has ended"))
                until(lambda: other.store(same, hashes(2, 100), [[memoryview(bytearray(NBYTES))]] * 2), "others")
            return copy_out(source, into)

        monkeypatch.setattr(stores, "copy_out", late)
        assert got(store, space, keys) == [False, False]
        assert paused
        assert got(store, space, keys) == [False, False]
        assert put(store, space, keys) == got(store, space, keys) == [True] * 2


def test_a_client_that_is_killed_while_it_copies_leaves_no_object(server: KVCoreServer, opened: Open) -> None:
    store = opened(server)
    space = store.register(model(), "test/1")
    for _ in range(3):
        with Child("half_put", str(server.config), str(NBYTES)) as child:
            keys = [bytes.fromhex(h) for h in child.heard()]
            assert store.exists(space, keys) == got(store, space, keys) == [False] * len(keys)
        until(lambda: all(put(store, space, keys)), "its keys are free")  # noqa: B023
        assert got(store, space, keys) == [True] * len(keys)
        assert store._engine.drain() == 0  # while a tier is written, they are in use, and stay
        store.delete(space, keys)
        assert store.exists(space, keys) == [False] * len(keys)
    until(lambda: server.metrics()['kvcore_l1_bytes{state="quarantined"}'] == 0, "its slots are free")


def test_a_server_that_is_killed_under_load_never_gives_a_wrong_byte(folder: Path, opened: Open) -> None:
    server = KVCoreServer(folder, {**CONFIG, "l1": {"size": "2MiB"}})
    keys = hashes(120)  # more than L1 holds
    stop = threading.Event()
    failures: list[BaseException] = []
    hits = [0]
    with server:
        members = [opened(server) for _ in range(3)]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        store = members[seed]
        space = store.register(model(), "test/1")
        try:
            while not stop.is_set():
                chosen = rng.sample(keys, 8)
                if rng.random() < 0.5:
                    put(store, space, chosen)
                else:
                    hits[0] += sum(got(store, space, chosen))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            before = hits[0]
            with server:
                until(lambda: hits[0] > before + 20 or failures, "objects are loaded")  # noqa: B023
                server.kill()
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not failures


def test_for_want_of_files_all_is_a_miss(server: KVCoreServer, opened: Open) -> None:
    """Whoever has the server's memory mapped goes on."""
    mapped, fresh = opened(server), opened(server)
    space, same = mapped.register(model(), "test"), fresh.register(model(), "test")
    keys = hashes(4)
    assert put(mapped, space, keys[:3]) == [True] * 3
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        assert mapped.exists(space, keys) == [True, True, True, False]
        assert got(mapped, space, keys) == [True, True, True, False]
        assert put(fresh, same, keys[3:]) == [False]
        assert got(fresh, same, keys) == [False] * 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert put(fresh, same, keys[3:]) == [True]
    assert got(fresh, same, keys) == [True] * 4


def test_an_arena_whose_end_cannot_be_watched_is_not_used(
    server: KVCoreServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory would stay taken after the server's end, as long as nobody asks."""
    store = opened(server)
    space = store.register(model(), "test")

    def lack(view: ArenaView, lost: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(_ServedView, "watch", lack)
        assert put(store, space, hashes(1)) == [False]
    within(lambda: not server.metrics()["kvcore_leases"], "what was reserved is given back")
    assert put(store, space, hashes(1)) == [True]
    assert got(store, space, hashes(1)) == [True]
