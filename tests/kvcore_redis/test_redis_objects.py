"""Batches, round trips, sizes, listings and times to live, against a real server."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_place import connections, make_redis, opened, put

from kvcore.api import Item, Loaded, ObjectKey, Stored, Usage
from kvcore.testing.memory import Room, aligned, content, make_key, source
from kvcore.testing.servers.redis import RedisCluster, RedisServer
from kvcore_redis.config import RedisConfig
from kvcore_redis.storage import MAX_OBJECT_BYTES
from kvcore_redis.stream import Stream
from moved import eventually, get, keys_of, kind


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """How often something was sent and how often something was awaited, in order, in runs."""
    seen: list[str] = []
    send, receive = Stream.send, Stream.receive

    def note(word: str) -> None:
        if seen[-1:] != [word]:
            seen.append(word)

    monkeypatch.setattr(Stream, "send", lambda self, parts: (note("send"), send(self, parts))[1])
    monkeypatch.setattr(Stream, "receive", lambda self, into: (note("receive"), receive(self, into))[1])
    return seen


def test_exists_of_128_keys_is_one_round_trip(server: RedisServer, tmp_path: Path, trips: list[str]) -> None:
    keys = keys_of(128)
    with opened(server.url, f"{tmp_path}:") as driver:
        put(driver, keys[::2], 100)
        trips.clear()
        assert driver.exists(keys) == [True, False] * 64
        assert trips == ["send", "receive"]


def test_exists_of_128_keys_is_one_round_trip_per_node(cluster: RedisCluster, tmp_path: Path, trips: list[str]) -> None:
    keys = keys_of(128)
    with opened(cluster.url, f"{tmp_path}:", cluster=True) as driver:
        put(driver, keys[::2], 100)
        trips.clear()
        assert driver.exists(keys) == [True, False] * 64
        assert trips == ["send", "receive"] * 3


def test_a_load_of_many_waits_once_for_each_group(server: RedisServer, tmp_path: Path, trips: list[str]) -> None:
    """While one group of replies comes, the next one is asked for."""
    keys = keys_of(40)
    with opened(server.url, f"{tmp_path}:") as driver:
        put(driver, keys, 100_000)
        trips.clear()
        assert get(driver, keys, 100_000) == ["ok"] * 40
        assert trips.count("send") == 3  # four groups of 1 MiB: the first two together, then one for each that was read


def test_every_third_of_1000_keys_is_missing(server: RedisServer, tmp_path: Path) -> None:
    keys = keys_of(1000)
    with opened(server.url, f"{tmp_path}:") as driver:
        put(driver, [key for i, key in enumerate(keys) if i % 3], 777)
        expected = ["ok" if i % 3 else "missing" for i in range(1000)]
        assert get(driver, keys, 777) == expected
        assert driver.exists(keys) == [found == "ok" for found in expected]
        driver.delete(keys)
        assert not any(driver.exists(keys))
        assert connections(driver) == 1


def test_10000_objects_are_listed(server: RedisServer, tmp_path: Path) -> None:
    """All of ours with their sizes, none of the neighbours', whatever the prefix holds."""
    prefix = f"{tmp_path}*[a-z]?\\^:"
    keys = keys_of(10_000)
    with opened(server.url, prefix) as driver, opened(server.url, f"{tmp_path}xay?\\^:") as neighbour:
        put(neighbour, keys[:5], 10)
        for begin in range(0, len(keys), 1000):
            outcomes = driver.store([source(k, b"x" * (begin + i)) for i, k in enumerate(keys[begin : begin + 1000])])
            assert all(isinstance(outcome, Stored) for outcome in outcomes)
        entries = driver.entries()
        assert {entry.key: entry.nbytes for entry in entries} == {key: i for i, key in enumerate(keys)}
        assert len(entries) == 10_000
        now = time.time()
        assert all(entry.used_s is not None and now - 300 < entry.used_s <= now for entry in entries)
        assert driver.usage() == Usage(sum(range(10_000)), 10_000, None)
        driver.delete(keys)
        assert driver.entries() == []
        assert len(neighbour.entries()) == 5


@pytest.mark.parametrize("header", [0, 1, 4096, 5000])
@pytest.mark.parametrize("nbytes", [0, 1, 4083, 4084, 4085, 65_535, 4 << 20, (4 << 20) + 1, 33_554_433])
def test_unusual_sizes(server: RedisServer, tmp_path: Path, header: int, nbytes: int) -> None:
    """Around the sizes where the reader's buffer and the groups end; the neighbours in the batch arrive as well."""
    keys = keys_of(3)
    data = [content((i, nbytes), size) for i, size in enumerate((10, header + nbytes, 10))]
    with opened(server.url, f"{tmp_path}:") as driver:
        outcomes = driver.store([source(k, d, (header,)) for k, d in zip(keys, data, strict=True)])
        assert all(isinstance(outcome, Stored) for outcome in outcomes)
        rooms = [Room(len(d) + 3, (header,), offset=1) for d in data]
        loads = driver.load([room.item(key) for room, key in zip(rooms, keys, strict=True)])
        for room, outcome, expected in zip(rooms, loads, data, strict=True):
            assert outcome == Loaded(len(expected))
            assert bytes(room.view[: len(expected)]) == expected
            assert room.clean_from(len(expected))
        driver.delete(keys)


def test_more_than_a_server_takes_is_not_sent(server: RedisServer, tmp_path: Path, trips: list[str]) -> None:
    giant = aligned(MAX_OBJECT_BYTES)  # never touched: no memory is taken
    keys = keys_of(3)
    with opened(server.url, f"{tmp_path}:") as driver:
        trips.clear()
        (outcome,) = driver.store([Item(keys[0], [memoryview(b"header"), giant])])
        assert kind(outcome) == "too_large"
        assert trips == []
        outcomes = driver.store([source(keys[1], b"a"), Item(keys[0], [giant, giant]), source(keys[2], b"b")])
        assert [kind(o) for o in outcomes] == ["ok", "too_large", "ok"]
        assert get(driver, keys[:1], 100) == ["missing"]


def test_time_to_live(server: RedisServer, tmp_path: Path) -> None:
    keys = keys_of(3)
    with (
        opened(server.url, f"{tmp_path}:", ttl="300ms") as mortal,
        opened(server.url, f"{tmp_path}:again:") as immortal,
    ):
        put(mortal, keys, 100_000)
        put(immortal, keys, 100)
        assert 0 < int(str(server.ask("PTTL", f"{tmp_path}:{keys[0].name}"))) <= 300
        eventually(lambda: get(mortal, keys, 100_000) == ["missing"] * 3)
        assert get(immortal, keys, 100) == ["ok"] * 3
        assert server.ask("PTTL", f"{tmp_path}:again:{keys[0].name}") == -1


def test_who_examines_a_store_does_not_use_it(server: RedisServer, tmp_path: Path) -> None:
    """The time of last use stays, where the server can do that."""
    key = make_key("old")
    name = f"{tmp_path}:{key.name}"
    with opened(server.url, f"{tmp_path}:") as driver:
        put(driver, [key])
    time.sleep(1.2)
    examiner = make_redis(server.url, f"{tmp_path}:", passive=True)
    examiner.open()
    (entry,) = examiner.list()
    room = Room(10_000)
    assert examiner.load([room.item(key)]) == [Loaded(10_000)]
    assert examiner.exists([key]) == [True]
    examiner.close()
    assert entry.used_s is not None
    assert 1 <= time.time() - entry.used_s < 30
    if "valkey" in str(server.ask("INFO", "server")):
        assert int(str(server.ask("OBJECT", "IDLETIME", name))) >= 1


def test_too_many_keys_to_count(server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_redis.storage.MAX_COUNTED", 2)
    with opened(server.url, f"{tmp_path}:") as driver:
        put(driver, keys_of(3), 10)
        assert driver.usage() is None


def test_what_a_storage_says_about_itself() -> None:
    storage = make_redis("redis://h", connections=7)
    assert (storage.persistent, storage.shared, storage.zero_copy) == (True, True, False)
    assert storage.preferred_concurrency == 7
    assert storage.max_object_bytes == 512 << 20
    assert RedisConfig().connections == 4
    storage.close()  # it was never opened


def test_names_in_the_store(server: RedisServer, tmp_path: Path) -> None:
    """They are part of the format: other releases and machines must find them."""
    key = ObjectKey(bytes(range(16)), b"\xab" * 32, 5)
    with opened(server.url, f"{tmp_path}:") as driver:
        put(driver, [key], 10)
        name = f"{tmp_path}:000102030405060708090a0b0c0d0e0f-5-{'ab' * 32}"
        assert server.ask("STRLEN", name) == 10
        assert server.ask("TYPE", name) == "string"
