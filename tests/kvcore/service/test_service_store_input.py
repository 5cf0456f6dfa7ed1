"""What a caller hands to an object store, right or wrong: the same answers with tiers in this process and a server."""

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from served import CONFIG, hashes
from test_service_store import NBYTES, content, got, model, parts, put, until

from kvcore.api import ConfigError, LayoutError
from kvcore.engine import GroupSpec, ObjectStore, StoreSpace
from kvcore.engine.copying import copy_in, copy_out
from kvcore.service import open_store
from kvcore.service import store as stores
from kvcore.testing.servers.kvcore import KVCoreServer

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A store of this process, whose spaces are no others'."""
    path = tmp_path_factory.mktemp("other") / "kvcore.yaml"
    path.write_text("l2: [{storage: memory}]\nlookup_timeout: 20s\n")
    store = open_store(str(path))
    yield store
    store.close()


@pytest.fixture(params=["local", "served"])
def store(request: pytest.FixtureRequest, folder: Path) -> Iterator[ObjectStore]:
    if request.param == "local":
        path = folder / "local.yaml"
        path.write_text("l2: [{storage: memory}]\nlookup_timeout: 20s\n")
        made = open_store(str(path))
        assert made.wait_ready(0)
        yield made
        made.close()
        return
    with KVCoreServer(folder, CONFIG) as server:
        made = open_store(str(server.config), flags={"server.timeout": "5s"})
        assert made.wait_ready(PATIENCE_S)
        yield made
        made.close()


def test_iterators_are_walked_through_once(store: ObjectStore) -> None:
    secret, space = store.register(model(), "test/1", "alice"), store.register(model(), "test/1", "bob")
    keys = hashes(400)  # more than L1 holds: what bob stores lies where alice's was
    for at in range(0, 400, 40):  # what tiers have not written yet stays in L1, which may be full for a moment
        some = keys[at : at + 40]
        until(lambda: all(store.store(secret, some, [[memoryview(b"\xaa" * NBYTES)]] * 40)), "room")  # noqa: B023
    few = keys[:9]
    keep: Any = store.store

    def once() -> Any:
        return keep(space, iter(few), iter([iter(parts(content(key))) for key in few]))

    until(lambda: once() == [True] * 9, "room")
    assert got(store, space, few) == [True] * 9
    into = [parts(bytes(NBYTES)) for _ in few]
    assert store.load(space, iter(few), (iter(room) for room in into)) == [True] * 9  # type: ignore[arg-type]
    assert [b"".join(room) for room in into] == [content(key) for key in few]
    assert store.exists(space, iter(keys[:11])) == [True] * 9 + [False] * 2  # type: ignore[arg-type]
    assert store.prefix(space, dict.fromkeys(few, 0).keys()) == 9  # type: ignore[arg-type]
    store.delete(space, (key for key in few[1:]))  # type: ignore[arg-type]

    def failing() -> Iterator[memoryview]:
        yield parts(content(keys[1]), 1)[0]
        raise RuntimeError("the caller's own")

    one = parts(content(keys[2]))
    mixed: Any = [failing(), one]
    assert store.store(space, keys[1:3], mixed) == [False, True]


def test_a_slot_that_is_not_all_written_is_never_seen(
    server: KVCoreServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Should a buffer change between the check and the copy."""
    store = open_store(str(server.config), flags={"server.timeout": "5s"})
    assert store.wait_ready(PATIENCE_S)
    space = store.register(model(), "test/1")
    keys = hashes(3)

    def shorter(payload: Sequence[memoryview], into: memoryview) -> bool:
        return copy_in(payload[:-1], into)

    def released(payload: Sequence[memoryview], into: memoryview) -> bool:
        payload[0].release()
        return copy_in(payload, into)

    for copy in (shorter, released):
        monkeypatch.setattr(stores, "copy_in", copy)
        assert put(store, space, keys) == [False] * 3
        assert store.exists(space, keys) == [False] * 3
    monkeypatch.undo()
    assert "buffers were released" in caplog.text
    assert put(store, space, keys) == [True] * 3
    monkeypatch.setattr(stores, "copy_out", lambda source, into: copy_out(source, into[1:]))
    assert got(store, space, keys) == [False] * 3
    monkeypatch.undo()
    assert got(store, space, keys) == [True] * 3
    store.close()


def test_a_store_of_a_server_can_be_waited_for(folder: Path) -> None:
    server = KVCoreServer(folder, CONFIG)
    store = open_store(str(server.config))
    try:
        begun = time.monotonic()
        assert not store.wait_ready(0.05)
        assert not store.wait_ready(-1)
        assert not store.wait_ready(float("nan"))
        assert time.monotonic() - begun < 5
        with server:
            assert store.wait_ready(PATIENCE_S)
            assert put(store, store.register(model(), "test/1"), hashes(2)) == [True] * 2, "from the first call on"
    finally:
        store.close()
    assert not store.wait_ready(PATIENCE_S), "closed: it will never be"


BAD_TENANTS: list[Any] = [None, 7, b"alice", "\ud800", "x" * 257, "x" * 5000, "a\nb"]
BAD_KEYS: list[Any] = [None, 7, "", "a b", "k" * 201]


def test_what_cannot_be_a_tenant_or_a_scheme_is_refused(store: ObjectStore) -> None:
    for tenant in BAD_TENANTS:
        with pytest.raises(ConfigError, match=r"the tenant is .*at most 256 printable characters") as refusal:
            store.register(model(), "test/1", tenant)
        assert len(str(refusal.value)) < 500
    for keys in BAD_KEYS:
        with pytest.raises(ConfigError, match="the key scheme is"):
            store.register(model(), keys)
    for field in ("engine", "model", "weights", "dtype", "layout", "backend", "isa"):
        spec = model()
        object.__setattr__(spec, field, None)
        with pytest.raises(LayoutError, match=f"{field} is None: give text"):
            store.register(spec, "test/1")
    assert store.register(model(), "test/1", "x" * 256).tenant == "x" * 256


def test_what_cannot_be_asked_is_a_miss_and_a_line(
    store: ObjectStore, other: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    two = model(GroupSpec(("a",), (NBYTES,)), GroupSpec(("b",), (NBYTES,)))
    space = store.register(two, "test/1")
    foreign: list[Any] = [other.register(two, "test/1"), None, StoreSpace(two, "test/1", "", object())]
    keys = hashes(2)
    with caplog.at_level(logging.WARNING, "kvcore"):
        for where, group in [*((each, 0) for each in foreign), *((space, g) for g in (-1, 2, None, 0.0, "0"))]:
            for move in (store.load, store.store):
                assert move(where, keys, [parts(content(k)) for k in keys], group) == [False] * 2  # type: ignore[arg-type]
            assert store.exists(where, keys, group) == [False] * 2  # type: ignore[arg-type]
            assert store.prefix(where, keys, group) == 0  # type: ignore[arg-type]
            store.delete(where, keys, group)  # type: ignore[arg-type]
        odd: list[Any] = [None, [1], "a" * 32, bytearray(32)]
        assert store.exists(space, odd) == [False] * 4
        assert store.load(space, odd, [parts(bytes(NBYTES))] * 4) == [False] * 4
        store.delete(space, odd)
        unfit: list[Any] = [None, [None, 7], [b"x", "y"], [[], []]]
        for buffers in unfit:
            assert store.store(space, keys, buffers) == [False] * 2
    told = [record.message for record in caplog.records]
    assert len([line for line in told if "that this store did not make" in line]) == 1
    assert len([line for line in told if "groups are 0 to 1" in line]) == 1
    assert len([line for line in told if "are refused" in line]) == 1
    for call in (store.exists, store.prefix, store.delete):
        with pytest.raises(TypeError, match="'NoneType' object is not iterable"):
            call(space, None)  # type: ignore[arg-type]


def test_an_object_that_l1_cannot_hold_is_named_with_both_sizes(
    server: KVCoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(str(server.config), flags={"server.timeout": "5s"})
    assert store.wait_ready(PATIENCE_S)
    nbytes = 9 << 20  # of 8 MiB
    space = store.register(model(GroupSpec(("a",), (nbytes,))), "test/1")
    for _ in range(3):
        assert store.store(space, hashes(1), [[memoryview(bytearray(nbytes))]]) == [False]
    lines = [r.message for r in caplog.records if f"{nbytes} bytes" in r.message]
    assert len(lines) == 1
    assert str(8 << 20) in lines[0]
    store.close()


def test_in_a_fork_everything_is_a_miss_and_one_line(store: ObjectStore) -> None:
    space = store.register(model(), "test/1")
    keys = hashes(2)
    assert put(store, space, keys) == [True] * 2
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            lines: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
            logging.getLogger("kvcore").addHandler(handler)
            answers = [put(store, space, keys), got(store, space, keys), store.exists(space, keys)]
            os.write(writing, json.dumps([answers, lines, store.wait_ready(PATIENCE_S)]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answers, lines, ready = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert answers == [[False] * 2] * 3
    assert len(lines) == 1
    assert "fork" in lines[0]
    assert not ready
    assert got(store, space, keys) == [True] * 2
