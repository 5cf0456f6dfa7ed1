"""Sizes, parts, names, batches, listings: what a good server answers, and how many requests that costs."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3_place import BUCKET, make_s3, name_of, opened, prefix_of, put, raw_client
from s3_proxy import Proxy

from kvcore.api import Item, Loaded, ObjectKey, StorageError, Stored
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, make_key, source
from kvcore.testing.servers.s3 import JuiceFS
from kvcore_s3.names import Names
from kvcore_s3.presence import LIST_FROM
from kvcore_s3.storage import S3Storage
from moved import eventually, get, keys_of, kind

MIB = 1 << 20
PART = 5 * MIB
SMALL_PARTS = {"part_size": "5MiB"}


@pytest.fixture
def proxy(server: JuiceFS) -> Iterator[Proxy]:
    with Proxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


def once(proxy: Proxy, call: Callable[[], object]) -> Callable[[], None]:
    """`call`, and never again."""

    def run() -> None:
        proxy.meanwhile = None
        call()

    return run


def uploads(server: JuiceFS, prefix: str) -> list[str]:
    """Names of uploads in parts that are neither complete nor aborted."""
    page = raw_client(server.endpoint).list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    return [upload["Key"] for upload in page.get("Uploads", [])]


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "kvcore", "team/cache"])
def test_names_are_readable_bounded_and_reversible(prefix: str) -> None:
    names = Names(prefix)
    for key in (
        make_key(1),
        make_key(2, group=31),
        ObjectKey(bytes(16), bytes(16)),
        ObjectKey(b"\xff" * 16, b"-" * 64),
    ):
        name = names.name(key)
        assert name.startswith(f"{prefix}/{key.namespace.hex()}/" if prefix else f"{key.namespace.hex()}/")
        assert name.startswith(names.folder(key.namespace))
        assert len(name) <= len(prefix) + 172
        assert names.key(name) == key
    foreign = ("", "kvcore/", "x/readme.txt", f"other/{names.name(make_key(1))}", names.name(make_key(1)) + "0")
    assert [names.key(name) for name in foreign] == [None] * len(foreign)


def test_what_others_put_below_the_prefix_is_left_alone(server: JuiceFS, tmp_path: Path) -> None:
    client, prefix = raw_client(server.endpoint), prefix_of(tmp_path)
    for name in (f"{prefix}/README", f"{prefix}/{'0' * 32}/notes.txt", f"{prefix}x/{'0' * 32}/0-{'1' * 64}"):
        client.put_object(Bucket=BUCKET, Key=name, Body=b"not ours")
    with opened(server.endpoint, prefix=prefix) as driver:
        assert put(driver, keys_of(2)) == ["ok", "ok"]
        assert {entry.key for entry in driver.entries()} == set(keys_of(2))


def test_every_character_of_a_prefix(server: JuiceFS, tmp_path: Path) -> None:
    """What is quoted in a URL, and signed as it is quoted."""
    prefix = f"{prefix_of(tmp_path)}/A-z_0.9!*'()=+@,-"
    with opened(server.endpoint, prefix=prefix, **SMALL_PARTS) as driver:
        for nbytes in (1000, PART + 1):
            assert put(driver, keys_of(2), nbytes) == ["ok"] * 2
            assert get(driver, keys_of(3), nbytes) == ["ok", "ok", "missing"]
        assert driver.exists(keys_of(3)) == [True, True, False]
        assert {entry.key for entry in driver.entries()} == set(keys_of(2))
        driver.delete(keys_of(2))
        assert driver.entries() == []


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [PART - 1, PART, PART + 1, 2 * PART, 3 * PART + 12_345])
def test_large_objects_go_in_parts(server: JuiceFS, tmp_path: Path, nbytes: int) -> None:
    """Around the size of a part, in a room of its own size and in a larger one, cut elsewhere."""
    prefix, key, data = prefix_of(tmp_path), make_key(nbytes), content(nbytes, nbytes)
    with opened(server.endpoint, prefix=prefix, **SMALL_PARTS) as driver:
        (outcome,) = driver.store([source(key, data, (4096, PART + 7, PART + 8))])
        assert outcome == Stored()
        for room in (Room(nbytes, (4096,)), Room(nbytes + 3 * MIB, (1, MIB, 2 * PART)), Room(nbytes)):
            (loaded,) = driver.load([room.item(key)])
            assert loaded == Loaded(nbytes)
            assert hashlib.sha256(room.view[:nbytes]).digest() == hashlib.sha256(data).digest()
            assert room.clean_from(nbytes)
        assert driver.entries()[0].nbytes == nbytes
    got = raw_client(server.endpoint).get_object(Bucket=BUCKET, Key=name_of(key, prefix))["Body"].read()
    assert got == data
    assert uploads(server, prefix) == []


def test_an_object_larger_than_its_room_is_not_read(proxy: Proxy, tmp_path: Path) -> None:
    """The size is known from the head of the answer: the connection is closed, nothing is written into the room."""
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path), **SMALL_PARTS) as driver:
        for key, nbytes, room_bytes in ((make_key(1), 2 * MIB, MIB), (make_key(2), 4 * PART, 3 * PART)):
            (outcome,) = driver.store([source(key, content(key, nbytes))])
            assert outcome == Stored()
            proxy.requests.clear()
            room = Room(room_bytes)
            (loaded,) = driver.load([room.item(key)])
            assert kind(loaded) == "too_large"
            assert str(nbytes) in loaded.reason
            assert room.clean_from(0)
            assert proxy.requests == {"GET": 1}


@pytest.mark.parametrize("nbytes", [0, 1, 4096, MIB + 1])
@pytest.mark.parametrize("sign", ["always", "never"])
def test_payloads_signed_and_unsigned(proxy: Proxy, tmp_path: Path, sign: str, nbytes: int) -> None:
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path), sign_payload=sign) as driver:
        (outcome,) = driver.store([source(make_key(1), content(1, nbytes), (100, 4096))])
        assert outcome == Stored()
        assert get(driver, [make_key(2)]) == ["missing"]
        room = Room(nbytes + 1)
        assert driver.load([room.item(make_key(1))]) == [Loaded(nbytes)]
        assert bytes(room.view[:nbytes]) == content(1, nbytes)
    (head,) = [head for head in proxy.heads if head.startswith(b"PUT")]
    assert (b"UNSIGNED-PAYLOAD" in head) is (sign == "never")
    assert b"100-continue" not in head  # a round trip for nothing
    assert b"x-amz-checksum" not in head.lower()
    assert b"kvcore-s3/" in head


def test_an_empty_object_in_a_room_for_parts(proxy: Proxy, tmp_path: Path) -> None:
    """An empty object has no ranges that could be asked for."""
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path), **SMALL_PARTS) as driver:
        assert driver.store([source(make_key(1), b"")]) == [Stored()]
        proxy.requests.clear()
        room = Room(2 * PART)
        assert driver.load([room.item(make_key(1))]) == [Loaded(0)]
        assert room.clean_from(0)
        assert proxy.requests == {"GET": 2}


# -- overwritten and deleted meanwhile -------------------------------------------------------------------------------


def test_parts_of_two_versions_never_mix(proxy: Proxy, server: JuiceFS, tmp_path: Path) -> None:
    """Overwritten when the first part is under way: the others are refused by the server, and it is read anew."""
    prefix, key, nbytes = prefix_of(tmp_path), make_key(1), 6 * PART + 5
    old, new = content("old", nbytes), content("new", nbytes - MIB)
    with opened(proxy.endpoint, prefix=prefix, concurrency=1, **SMALL_PARTS) as driver:
        assert driver.store([source(key, old)]) == [Stored()]
        raw = raw_client(server.endpoint)
        proxy.meanwhile = once(proxy, lambda: raw.put_object(Bucket=BUCKET, Key=name_of(key, prefix), Body=new))
        room = Room(nbytes)
        (outcome,) = driver.load([room.item(key)])
        assert proxy.meanwhile is None
        assert outcome == Loaded(len(new))
        assert bytes(room.view[: len(new)]) == new
        assert any(b"if-match" in head.lower() for head in proxy.heads)


def test_an_object_overwritten_all_the_time_is_read_as_a_whole(proxy: Proxy, server: JuiceFS, tmp_path: Path) -> None:
    prefix, key, nbytes = prefix_of(tmp_path), make_key(1), 2 * PART + 5
    versions = [content(("version", i), nbytes) for i in range(8)]
    raw, written = raw_client(server.endpoint), iter(versions)

    def overwrite() -> None:
        raw.put_object(Bucket=BUCKET, Key=name_of(key, prefix), Body=next(written))

    with opened(proxy.endpoint, prefix=prefix, concurrency=1, **SMALL_PARTS) as driver:
        assert driver.store([source(key, content("first", nbytes))]) == [Stored()]
        proxy.meanwhile = overwrite
        room = Room(nbytes)
        (outcome,) = driver.load([room.item(key)])
        assert outcome == Loaded(nbytes)
        assert bytes(room.view) in versions
        assert next(written) in versions[3:]  # each try met another version, the last one was not in parts
        assert b"range:" not in proxy.heads[-1].lower()


def test_deleted_between_its_parts_is_missing(proxy: Proxy, server: JuiceFS, tmp_path: Path) -> None:
    prefix, key, nbytes = prefix_of(tmp_path), make_key(1), 6 * PART
    with opened(proxy.endpoint, prefix=prefix, concurrency=1, **SMALL_PARTS) as driver:
        assert driver.store([source(key, content(1, nbytes))]) == [Stored()]
        raw = raw_client(server.endpoint)
        proxy.meanwhile = once(proxy, lambda: raw.delete_object(Bucket=BUCKET, Key=name_of(key, prefix)))
        assert [kind(o) for o in driver.load([Room(nbytes).item(key)])] == ["missing"]
        assert proxy.meanwhile is None


def test_deleted_while_a_small_one_is_read(proxy: Proxy, server: JuiceFS, tmp_path: Path) -> None:
    """The whole object, or none."""
    prefix, key = prefix_of(tmp_path), make_key(1)
    with opened(proxy.endpoint, prefix=prefix) as driver:
        assert put(driver, [key], 4 * MIB) == ["ok"]
        raw = raw_client(server.endpoint)
        proxy.meanwhile = once(proxy, lambda: raw.delete_object(Bucket=BUCKET, Key=name_of(key, prefix)))
        assert get(driver, [key], 4 * MIB)[0] in ("ok", "missing")
        assert get(driver, [key], 4 * MIB) == ["missing"]


# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_thousand_keys_of_which_every_third_is_missing(proxy: Proxy, tmp_path: Path) -> None:
    keys = keys_of(1000)
    there = [key for i, key in enumerate(keys) if i % 3]
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path), deadline="30s") as driver:
        assert put(driver, there, 500) == ["ok"] * len(there)
        proxy.requests.clear()
        assert driver.exists(keys) == [i % 3 != 0 for i in range(1000)]
        assert proxy.requests == {"GET": 1}  # one listing
        assert get(driver, keys, 500) == ["ok" if i % 3 else "missing" for i in range(1000)]
        driver.delete(keys)
        assert driver.entries() == []


def test_few_keys_cost_a_head_each(proxy: Proxy, tmp_path: Path) -> None:
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path)) as driver:
        put(driver, keys_of(3))
        proxy.requests.clear()
        assert driver.exists(keys_of(4)) == [True, True, True, False]
        assert proxy.requests == {"HEAD": 4}
        assert driver.exists([]) == []
        other = [make_key(i, namespace=bytes([i]) * 16) for i in range(LIST_FROM)]  # a namespace each: no page helps
        assert driver.exists(other) == [False] * LIST_FROM


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ten_thousand_objects_are_listed(proxy: Proxy, tmp_path: Path) -> None:
    """And a namespace larger than a page is found out once, then asked by HEADs."""
    count = 10_000
    keys = [make_key(i, group=i % 2) for i in range(count)]
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path), deadline="60s") as driver:
        driver.timeout_s = 100
        for at in range(0, count, 500):
            items = [source(key, b"x" * (i % 50)) for i, key in enumerate(keys[at : at + 500])]
            assert driver.store(items) == [Stored()] * len(items)
        proxy.requests.clear()
        listed = {entry.key: entry.nbytes for entry in driver.entries()}
        assert listed == {key: i % 500 % 50 for i, key in enumerate(keys)}
        assert proxy.requests == {"GET": 10}
        asked = [*keys[:96], *(make_key(("never", i)) for i in range(32))]
        for gets in (1, 0):
            proxy.requests.clear()
            assert driver.exists(asked) == [True] * 96 + [False] * 32
            assert proxy.requests["GET"] == gets
            assert proxy.requests["HEAD"] >= 32


def test_a_storage_uses_no_more_requests_at_once_than_allowed(proxy: Proxy, tmp_path: Path) -> None:
    """Neither one call with many objects, nor many calls, nor objects in parts. Connections are kept."""
    with opened(proxy.endpoint, prefix=prefix_of(tmp_path), concurrency=4, **SMALL_PARTS) as driver:
        assert put(driver, keys_of(40), 1000) == ["ok"] * 40
        assert get(driver, keys_of(50), 1000) == ["ok"] * 40 + ["missing"] * 10
        assert 2 <= proxy.accepted <= 4 + 1  # boto3 has one of its own
        calls = [driver.submit("store", [source(make_key((j, i)), b"x" * 1000) for i in range(10)]) for j in range(4)]
        calls.append(driver.submit("store", [source(make_key("large"), content(1, 5 * PART))]))
        for call in calls:
            assert set(driver.wait(call, "store")) == {Stored()}
        assert get(driver, keys_of(40), 1000) == ["ok"] * 40
        assert proxy.accepted <= 4 + 1


# -- uploads that come to nothing ------------------------------------------------------------------------------------


def test_an_upload_left_behind_by_a_killed_process_is_aborted_at_open(
    server: JuiceFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of our names that are older than a day; others' and younger ones stay."""
    prefix, raw = prefix_of(tmp_path), raw_client(server.endpoint)
    ours, others = name_of(make_key(1), prefix), f"{prefix}/video.mp4"
    for name in (ours, others):
        raw.create_multipart_upload(Bucket=BUCKET, Key=name)
    with opened(server.endpoint, prefix=prefix):
        assert sorted(uploads(server, prefix)) == sorted([ours, others])
    monkeypatch.setattr("kvcore_s3.uploads.ABANDONED_S", 0.0)
    with Driver(make_s3(server.endpoint, prefix=prefix, passive=True)):
        assert len(uploads(server, prefix)) == 2  # `kvcore store` only looks
    with opened(server.endpoint, prefix=prefix):
        assert uploads(server, prefix) == [others]
    raw.abort_multipart_upload(
        Bucket=BUCKET,
        Key=others,
        UploadId=raw.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)["Uploads"][0]["UploadId"],
    )


def test_closed(server: JuiceFS, tmp_path: Path) -> None:
    storage = make_s3(server.endpoint, prefix=prefix_of(tmp_path))
    with pytest.raises(StorageError, match="closed"):
        storage.exists([make_key(1)])
    storage.open()
    storage.close()
    storage.close()
    for call in (storage.ping, lambda: storage.load([]), lambda: storage.store([]), lambda: storage.delete([])):
        with pytest.raises(StorageError, match="closed"):
            call()


def test_threads_end_with_the_storage(server: JuiceFS, tmp_path: Path) -> None:
    with opened(server.endpoint, prefix=prefix_of(tmp_path)) as driver:
        put(driver, keys_of(30))
        assert [t for t in threading.enumerate() if t.name == "kvcore-s3"]
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "kvcore-s3"])


def test_memory_of_the_caller_is_let_go(server: JuiceFS, tmp_path: Path) -> None:
    """No thread, connection or fault holds on to the buffers once the call has returned: the arena can be closed."""
    import mmap

    storage = make_s3(server.endpoint, prefix=prefix_of(tmp_path), **SMALL_PARTS)
    with Driver(storage):
        for nbytes in (10_000, 2 * PART):
            memory = mmap.mmap(-1, 3 * PART)
            view = memoryview(memory)
            item = Item(make_key(nbytes), [view[:4096], view[4096:nbytes]])
            assert storage.store([item]) == [Stored()]
            assert storage.load([item, Item(make_key("none"), [view[nbytes:]])])[0] == Loaded(nbytes)
            assert kind(storage.load([Item(make_key(nbytes), [view[:5000]])])[0]) == "too_large"
            for part in (*item.buffers, view):
                part.release()
            memory.close()  # BufferError while anything is exported


def test_traits() -> None:
    storage = make_s3("http://127.0.0.1:1", part_size="8MiB", concurrency=7)
    assert isinstance(storage, S3Storage)
    assert storage.persistent
    assert storage.shared
    assert storage.preferred_concurrency == 7
    assert storage.max_object_bytes == 8 * MIB * 10_000
    assert make_s3("http://127.0.0.1:1", part_size="4GiB").max_object_bytes == 5 << 40
