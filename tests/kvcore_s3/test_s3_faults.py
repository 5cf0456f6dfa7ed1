"""Servers that are killed, frozen, away, cut off or broken: every call ends in time with an outcome for each key, and
the same storage goes on when they are back."""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_place import BUCKET, make_s3, name_of, opened, prefix_of, put, raw_client
from s3_proxy import Proxy

from kvcore.api import Failed, StorageError, Stored
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, make_key, source
from kvcore.testing.servers import free_port
from kvcore.testing.servers.proxy import Way
from kvcore.testing.servers.s3 import JuiceFS
from moved import eventually, get, keys_of, kind, takes

MIB = 1 << 20
PART = 5 * MIB
HASTY = {"connect_timeout": "500ms", "read_timeout": "500ms", "deadline": "3s"}


@pytest.fixture
def proxy(server: JuiceFS) -> Iterator[Proxy]:
    with Proxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


def fails(driver: Driver, method: str, *args: object) -> str:
    """The whole call fails; why."""
    with pytest.raises(StorageError) as caught:
        driver.entries() if method == "list" else driver.call(method, *args)
    return str(caught.value)


# -- killed, frozen, away --------------------------------------------------------------------------------------------


def test_killed_and_back(own: JuiceFS) -> None:
    """Refused connections are known at once; what was stored is there again, and a retry hides a short absence."""
    keys = keys_of(8)
    with opened(own.endpoint) as driver:
        assert put(driver, keys) == ["ok"] * 8
        own.kill()
        with takes(0, 2):
            assert get(driver, keys) == ["io"] * 8
            assert put(driver, keys) == ["io"] * 8
            assert own.endpoint in fails(driver, "exists", keys)
            fails(driver, "ping")
            fails(driver, "delete", keys)
            fails(driver, "list")
        own.start()
        assert get(driver, keys) == ["ok"] * 8
        driver.call("ping")
        assert put(driver, keys_of(9)) == ["ok"] * 9
        assert driver.exists([*keys_of(9), make_key("never")]) == [True] * 9 + [False]


def test_frozen_and_thawed(own: JuiceFS) -> None:
    """Each call ends at its deadline, however many keys it has; afterwards no stale answer is taken for another's."""
    keys = keys_of(64)
    with opened(own.endpoint, concurrency=8, **HASTY) as driver:
        assert put(driver, keys[:32]) == ["ok"] * 32
        own.freeze()
        for call in (lambda: get(driver, keys), lambda: put(driver, keys)):
            with takes(0.5, 3):
                assert call() == ["timeout"] * 64
        with takes(0.5, 3):
            assert "Read timeout" in fails(driver, "exists", keys)
        own.thaw()
        assert get(driver, keys[:32]) == ["ok"] * 32
        eventually(lambda: driver.exists(keys[:4]) == [True] * 4)


def test_frozen_in_the_middle_of_an_object(own: JuiceFS) -> None:
    with Proxy(int(own.endpoint.rpartition(":")[2])) as proxy, opened(proxy.endpoint, **HASTY) as driver:
        assert put(driver, keys_of(1), 16 * MIB) == ["ok"]
        proxy.meanwhile = own.freeze
        with takes(0.5, 3):
            assert get(driver, keys_of(1), 16 * MIB) == ["timeout"]
        proxy.meanwhile = None
        own.thaw()
        assert get(driver, keys_of(1), 16 * MIB) == ["ok"]


def test_killed_in_the_middle_of_an_object(own: JuiceFS) -> None:
    """The caller's buffers hold half of it, which is no `Loaded`."""
    with Proxy(int(own.endpoint.rpartition(":")[2])) as proxy, opened(proxy.endpoint, **HASTY) as driver:
        assert put(driver, keys_of(2), 16 * MIB) == ["ok", "ok"]
        proxy.meanwhile = own.kill
        assert get(driver, keys_of(2), 16 * MIB) == ["io", "io"]
        proxy.meanwhile = None
        own.start()
        assert get(driver, keys_of(2), 16 * MIB) == ["ok", "ok"]


def test_unreachable_from_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The storage opens, with a warning, and is of use as soon as the server is: the bucket is made then."""
    port = free_port()
    with caplog.at_level(logging.WARNING), opened(f"http://127.0.0.1:{port}", create_bucket=True) as driver:
        (record,) = caplog.records
        assert f"http://127.0.0.1:{port}" in record.getMessage()
        assert "as soon as it answers" in record.getMessage()
        assert get(driver, keys_of(3)) == ["io"] * 3
        fails(driver, "exists", keys_of(3))
        assert "Could not connect" in fails(driver, "store", [source(make_key(1), b"x")])
        with JuiceFS(tmp_path, port=port):
            assert put(driver, keys_of(3)) == ["ok"] * 3
            assert get(driver, keys_of(3)) == ["ok"] * 3


def test_frozen_from_the_start(own: JuiceFS, caplog: pytest.LogCaptureFixture) -> None:
    own.freeze()
    with takes(0.5, 3), caplog.at_level(logging.WARNING):
        driver = opened(own.endpoint, **HASTY).__enter__()
    assert "Read timeout" in caplog.text
    own.thaw()
    with driver:
        eventually(lambda: put(driver, keys_of(2)) == ["ok"] * 2)


def test_what_is_wrong_is_said_once_the_server_is_there(tmp_path: Path) -> None:
    """Opened while it was away: the first store says what an open would have said."""
    port = free_port()
    with opened(f"http://127.0.0.1:{port}") as driver, JuiceFS(tmp_path, port=port):
        assert "create_bucket" in fails(driver, "store", [source(make_key(1), b"x")])
        assert "create_bucket" in fails(driver, "ping")


# -- connections that are cut ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [100_000, 4 * MIB, 2 * PART + 5])
def test_a_reply_cut_once_is_asked_for_again(proxy: Proxy, tmp_path: Path, nbytes: int) -> None:
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path), part_size="5MiB") as driver:
        assert put(driver, keys_of(1), nbytes) == ["ok"]
        proxy.cut_replies_after, proxy.cuts_left = 50_000, 1
        assert get(driver, keys_of(1), nbytes) == ["ok"]
        assert proxy.cuts_left <= 0


def test_replies_that_are_always_cut(proxy: Proxy, tmp_path: Path) -> None:
    """The large object fails; the small ones of the same batch, whose replies pass, do not."""
    keys = keys_of(6)
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path)) as driver:
        assert put(driver, keys[:5], 10_000) == ["ok"] * 5
        assert put(driver, keys[5:], MIB) == ["ok"]
        proxy.cut_replies_after = 50_000
        room = [Room(MIB) for _ in keys]
        outcomes = driver.load([r.item(key) for r, key in zip(room, keys, strict=True)])
        assert [kind(o) for o in outcomes] == ["ok"] * 5 + ["io"]
        assert name_of(keys[5], prefix_of(tmp_path)) in str(outcomes[5])


@pytest.mark.parametrize("nbytes", [200_000, 2 * PART + 5])
def test_a_request_cut_once_is_sent_again(proxy: Proxy, tmp_path: Path, nbytes: int) -> None:
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path), part_size="5MiB") as driver:
        proxy.cut_requests_after, proxy.cuts_left = 100_000, 1
        assert put(driver, keys_of(1), nbytes) == ["ok"]
        assert proxy.cuts_left <= 0
        assert get(driver, keys_of(1), nbytes) == ["ok"]


@pytest.mark.parametrize("nbytes", [200_000, 2 * PART + 5])
def test_half_written_objects_are_never_found(proxy: Proxy, server: JuiceFS, tmp_path: Path, nbytes: int) -> None:
    """Neither in a new place nor over an older one; an upload in parts is aborted."""
    prefix, (fresh, kept) = prefix_of(tmp_path), keys_of(2)
    raw = raw_client(server.endpoint)
    with opened(proxy.endpoint, prefix=prefix, part_size="5MiB") as driver:
        assert put(driver, [kept], 3000) == ["ok"]
        proxy.cut_requests_after = 100_000
        outcomes = driver.store([source(key, content(key, nbytes)) for key in (fresh, kept)])
        assert [kind(o) for o in outcomes] == ["io", "io"]
        assert get(driver, [fresh], nbytes) == ["missing"]
        assert get(driver, [kept], 3000) == ["ok"]
        proxy.cut_requests_after = None
        eventually(lambda: not raw.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads"))
        assert put(driver, [fresh, kept], nbytes) == ["ok", "ok"]
        assert get(driver, [fresh, kept], nbytes) == ["ok", "ok"]


def test_an_upload_whose_server_died_is_aborted_when_it_is_back(own: JuiceFS) -> None:
    raw = raw_client(own.endpoint)

    def uploads() -> list[object]:
        return list(raw.list_multipart_uploads(Bucket=BUCKET, Prefix="kvcore/").get("Uploads", []))

    options = {"part_size": "5MiB", "concurrency": 1, **HASTY}
    with Proxy(int(own.endpoint.rpartition(":")[2])) as proxy, opened(proxy.endpoint, **options) as driver:
        proxy.cut_requests_after = 3 * MIB
        call = driver.submit("store", [source(make_key(1), content(1, 4 * PART))])
        eventually(lambda: len(uploads()) == 1)
        own.kill()
        assert [kind(o) for o in driver.wait(call, "store")] == ["io"]
        proxy.cut_requests_after = None
        own.start()
        assert len(uploads()) == 1
        assert put(driver, keys_of(1)) == ["ok"]  # what works reminds it of what did not
        eventually(lambda: uploads() == [])


# -- a server that does not want -------------------------------------------------------------------------------------


def test_the_bucket_vanishes(server: JuiceFS) -> None:
    raw = raw_client(server.endpoint)
    raw.create_bucket(Bucket="fleeting")
    with opened(server.endpoint, bucket="fleeting") as driver:
        raw.delete_bucket(Bucket="fleeting")
        loads = driver.load([Room(100).item(key) for key in keys_of(2)])
        stores = driver.store([source(key, b"x") for key in keys_of(2)])
        for outcome in (*loads, *stores):
            assert isinstance(outcome, Failed)
            assert outcome.kind == "io"
            assert "NoSuchBucket" in outcome.reason
            assert "create_bucket" in outcome.reason
        assert "NoSuchBucket" in fails(driver, "list")
        raw.create_bucket(Bucket="fleeting")
        assert put(driver, keys_of(2)) == ["ok"] * 2


def test_a_server_that_fails_inside(tmp_path: Path) -> None:
    """It has run out of inodes and answers 500, three times: `io`, and what it has is loaded all the same."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(JuiceFS(tmp_path, inodes=60))
        proxy = stack.enter_context(Proxy(int(server.endpoint.rpartition(":")[2])))
        driver = stack.enter_context(opened(proxy.endpoint, create_bucket=True))
        keys = keys_of(60)
        there = next(i for i, key in enumerate(keys) if put(driver, [key]) != ["ok"])
        assert there > 5
        proxy.requests.clear()
        (outcome,) = driver.store([source(make_key("more"), b"x")])
        assert isinstance(outcome, Failed)
        assert outcome.kind == "io"
        assert "500 InternalError" in outcome.reason
        assert proxy.requests == {"PUT": 3}
        assert get(driver, keys[:there]) == ["ok"] * there


def test_a_deadline_for_a_batch_that_is_too_much(proxy: Proxy, tmp_path: Path) -> None:
    """What was reached is stored; the rest fails as `timeout`, in time."""
    keys = keys_of(2000)
    options = {"connect_timeout": "100ms", "read_timeout": "400ms", "deadline": "1s", "concurrency": 2}
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path), **options) as driver:
        with takes(0.3, 1.5):
            found = put(driver, keys, 10)
        assert set(found) == {"ok", "timeout"}
        assert found.index("timeout") > 5


@pytest.mark.parametrize("bytes_s", [MIB, 10_000])
def test_a_reply_that_trickles(proxy: Proxy, tmp_path: Path, bytes_s: int) -> None:
    """The server is never silent for long, but the deadline comes all the same."""
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path), **HASTY) as driver:
        assert put(driver, keys_of(1), 16 * MIB) == ["ok"]
        proxy.reply_bytes_s = bytes_s
        with takes(2, 4):
            assert get(driver, keys_of(1), 16 * MIB) == ["timeout"]


class Thirsty(Proxy):
    """Takes requests slowly, and never stops taking."""

    def passes(self, way: Way, data: bytes, passed: dict[Way, int]) -> None:
        super().passes(way, data, passed)
        if way == "requests":
            time.sleep(0.2)


def test_a_request_that_is_taken_slowly(server: JuiceFS, tmp_path: Path) -> None:
    options = {**HASTY, "connect_timeout": "2s", "part_size": "32MiB"}
    with (
        Thirsty(int(server.endpoint.rpartition(":")[2])) as proxy,
        opened(proxy.endpoint, prefix=prefix_of(tmp_path), **options) as driver,
        takes(2, 4),
    ):
        assert put(driver, keys_of(1), 32 * MIB) == ["timeout"]


def test_closed_while_it_hangs(own: JuiceFS) -> None:
    """`close` does not wait for calls that hang, and they end by themselves."""
    storage = make_s3(own.endpoint, **HASTY)
    with Driver(storage) as driver:
        assert put(driver, keys_of(4)) == ["ok"] * 4
        own.freeze()
        calls = [driver.submit("load", [Room(10_000).item(key)]) for key in keys_of(4)]
        with takes(0, 2):
            driver.close()
        for call in calls:
            try:
                outcomes = call.result(20)
            except StorageError:
                continue
            assert [kind(o) for o in outcomes] in (["timeout"], ["io"])
        own.thaw()


def test_stored_is_what_the_server_has_taken(own: JuiceFS) -> None:
    """Killed as soon as a store has returned: the object is there afterwards."""
    with opened(own.endpoint) as driver:
        for i in range(3):
            assert driver.store([source(make_key(i), content(make_key(i), 300_000))]) == [Stored()]
            own.kill()
            own.start()
            assert get(driver, [make_key(i)], 300_000) == ["ok"]
