"""Objects in a real pool: straight from and to the arena, staged, evicted, refused, pinned, copied, and counted."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mooncake_place import MIB, Pool, RawClient, body, get, names, put

from kvcore.api import MISSING, Context, Entry, Failed, Item, Loaded, ObjectKey, StorageError, Stored
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, aligned, content, make_key, source
from kvcore.testing.servers import free_port
from kvcore_mooncake.config import MooncakeConfig
from kvcore_mooncake.session import Session
from kvcore_mooncake.storage import MooncakeStorage
from moved import eventually, keys_of

pytestmark = pytest.mark.usefixtures("private")

HEADER_BYTES = 4096


@pytest.fixture(scope="module")
def raw(pool: Pool) -> Iterator[RawClient]:
    client = RawClient(pool)
    yield client
    client.close()


@pytest.fixture(scope="module")
def shared_driver(pool: Pool) -> Iterator[Driver]:
    """One for the module: a client takes a second to close."""
    with pool.driver() as driver:
        yield driver


@pytest.fixture
def driver(shared_driver: Driver) -> Driver:
    """An open storage."""
    return shared_driver


@pytest.fixture(autouse=True)
def emptied(raw: RawClient) -> None:
    """Each test finds the pool empty."""
    raw.empty()


def session_of(driver: Driver) -> Session:
    storage = driver.storage
    assert isinstance(storage, MooncakeStorage)
    with storage._opened.session() as session:
        return session


# -- memory ----------------------------------------------------------------------------------------------------------


def test_payloads_in_the_arena_are_not_copied(pool: Pool) -> None:
    """Headers are staged, payloads are not: 64 MiB move with 1 MiB of staging memory, and go where they belong."""
    keys, count, nbytes = keys_of(8), 8, 8 * MIB
    with pool.driver(staging_size="1MiB") as driver:
        arena = aligned((2 * count + 1) * nbytes)
        driver.storage.register_memory(arena)
        assert len(session_of(driver).regions) == 1
        payloads = [arena[i * nbytes : (i + 1) * nbytes] for i in range(count)]
        rooms = [arena[(count + i) * nbytes : (count + i + 1) * nbytes] for i in range(count)]
        for key, payload in zip(keys, payloads, strict=True):
            payload[:] = body(key, nbytes)
        header = memoryview(content("header", HEADER_BYTES))
        stored = driver.store([Item(k, [header, p.toreadonly()]) for k, p in zip(keys, payloads, strict=True)])
        assert stored == [Stored()] * count
        headers = [aligned(HEADER_BYTES) for _ in keys]
        items = [Item(k, [h, r]) for k, h, r in zip(keys, headers, rooms, strict=True)]
        assert driver.load(items) == [Loaded(HEADER_BYTES + nbytes)] * count
        assert all(h == header for h in headers)
        assert all(r == p for r, p in zip(rooms, payloads, strict=True))
        assert arena[2 * count * nbytes :] == bytes(nbytes)


def test_objects_in_the_arena_of_any_size(driver: Driver) -> None:
    """Rooms larger and smaller than the object, buffers half inside the arena, and across its end."""
    memory = aligned(4 * MIB)
    driver.storage.register_memory(memory[: 2 * MIB])
    for nbytes in (1, 511, 4096, 4097, 100_003, MIB + 1):
        key, data = make_key(nbytes), content(nbytes, nbytes)
        memory[100 : 100 + nbytes] = data
        assert driver.store([Item(key, [memory[100 : 100 + nbytes]])]) == [Stored()]
        for start in (0, 2 * MIB - nbytes, 2 * MIB - nbytes // 2, 2 * MIB):
            for extra in (0, 1, 5000):
                room = memory[start : start + nbytes + extra]
                room[:] = bytes(len(room))
                assert driver.load([Item(key, [room])]) == [Loaded(nbytes)]
                assert room[:nbytes] == data
                assert room[nbytes:] == bytes(extra)
        if nbytes > 1:
            (outcome,) = driver.load([Item(key, [memory[: nbytes - 1]])])
            assert isinstance(outcome, Failed)
            assert outcome.kind == "too_large"
            assert f"object of {nbytes} bytes, room for {nbytes - 1}" in outcome.reason


def test_two_storages_register_the_same_arena(pool: Pool) -> None:
    arena = aligned(2 * MIB)
    arena[:MIB] = content("arena", MIB)
    key = make_key("both")
    with pool.driver() as one, pool.driver() as two:
        for driver in (one, two):
            driver.storage.register_memory(arena)
        assert one.store([Item(key, [arena[:MIB]])]) == [Stored()]
        assert two.load([Item(key, [arena[MIB:]])]) == [Loaded(MIB)]
        assert arena[MIB:] == arena[:MIB]


def test_little_staging_memory_is_shared(pool: Pool) -> None:
    """Eight callers, each with a third of it: they wait for each other. An object that can never fit is refused."""
    keys = keys_of(32)
    with pool.driver(staging_size="3MiB") as driver:
        calls = [driver.submit("store", [source(k, body(k, MIB)) for k in keys[i::8]]) for i in range(8)]
        for call in calls:
            assert driver.wait(call, "store") == [Stored()] * 4
        assert get(driver, keys, MIB) == ["ok"] * 32
        large = keys_of(33)[32]
        (stored,) = driver.store([source(large, body(large, 4 * MIB))])
        assert isinstance(stored, Failed)
        assert stored.kind == "full"
        assert "`staging_size` is 3 MiB: raise it" in stored.reason
        assert driver.load([Room(4 * MIB).item(large), Room(MIB).item(keys[0])]) == [MISSING, Loaded(MIB)]


# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_thousand_keys_every_third_missing(driver: Driver) -> None:
    keys = keys_of(1000)
    held = [key for i, key in enumerate(keys) if i % 3]
    assert set(put(driver, held, 5000)) == {"stored"}
    assert driver.exists(keys) == [i % 3 != 0 for i in range(1000)]
    assert get(driver, keys, 5000) == ["ok" if i % 3 else "missing" for i in range(1000)]
    driver.delete(keys[::2])
    assert driver.exists(keys) == [i % 3 != 0 and i % 2 != 0 for i in range(1000)]


def test_a_leased_object_is_deleted(driver: Driver, raw: RawClient) -> None:
    """A question or a load leases it, for 2 s here; Mooncake's own `remove` refuses it then."""
    keys = keys_of(2)
    put(driver, keys)
    assert driver.exists(keys) == [True, True]
    assert get(driver, keys) == ["ok", "ok"]
    assert raw.store.remove(names(driver, keys)[0]) == -706
    driver.delete(keys)
    assert driver.exists(keys) == [False, False]


def test_an_object_that_is_there_is_kept(driver: Driver, raw: RawClient) -> None:
    key = make_key("kept")
    assert put(driver, [key]) == ["stored"]
    assert driver.store([source(key, b"another")]) == [Stored()]
    assert raw.get(names(driver, [key])[0]) == body(key)


def test_keys_have_the_prefix(driver: Driver, raw: RawClient) -> None:
    key = make_key("prefix")
    put(driver, [key])
    assert raw.get(f"kvcore/{key.name}") == body(key)


# -- what the master's HTTP port says --------------------------------------------------------------------------------


def test_listing_leases_nothing_and_leaves_others_out(pool: Pool, raw: RawClient) -> None:
    keys = keys_of(450)
    raw.put("other/thing", b"x")
    raw.put("kvcore/thing", b"x")
    with pool.driver(admin_address=pool.master.admin_address) as driver:
        assert set(put(driver, keys, 5000)) == {"stored"}
        assert sorted(driver.entries()) == sorted(Entry(key, 5000) for key in keys)
        assert raw.store.remove(names(driver, keys)[0]) == 0
        assert len(driver.entries()) == 449
        usage = driver.usage()
        assert usage is not None
        assert (usage.objects, usage.capacity_bytes) == (451, 256 * MIB)
        assert 449 * 5000 <= usage.nbytes < 256 * MIB


def test_without_the_http_port(pool: Pool, driver: Driver) -> None:
    assert driver.usage() is None
    with pytest.raises(NotImplementedError, match="set `admin_address`"):
        driver.call("list")
    for address, complaint in ((f"127.0.0.1:{free_port()}", "refused"), (pool.master.address, "does not answer")):
        storage = pool.storage(admin_address=address)
        with pytest.raises(StorageError, match=rf"{address} \(`admin_address`\).*{complaint}"):
            storage.usage()
        with pytest.raises(StorageError, match=complaint):
            list(storage.list())


# -- a pool that is full ---------------------------------------------------------------------------------------------


def test_more_than_the_pool_holds(private: None, tmp_path: Path) -> None:
    """Some of what was stored is gone at once: a miss, never an error, never wrong bytes. Mooncake evicts in the
    background: what comes faster is refused as `full`."""
    keys = keys_of(80)
    with Pool(tmp_path / "pool", 32 * MIB) as pool, pool.driver() as driver:
        stored = [outcome for i in range(0, 80, 4) for outcome in put(driver, keys[i : i + 4], MIB)]
        assert set(stored) <= {"stored", "full"}
        outcomes = get(driver, keys, MIB)
        assert set(outcomes) == {"ok", "missing"}
        assert 8 < outcomes.count("ok") < stored.count("stored")


def test_a_pool_full_of_pinned_objects_refuses(private: None, tmp_path: Path) -> None:
    """`full`, which is an answer and no fault of the tier; what is pinned stays."""
    keys = keys_of(40)
    with Pool(tmp_path / "pool", 16 * MIB) as pool, pool.driver(pin="hard") as driver:
        outcomes = [put(driver, [key], MIB)[0] for key in keys]
        assert set(outcomes) == {"stored", "full"}
        held = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == "stored"]
        assert 8 <= len(held) <= 16
        assert get(driver, held, MIB) == ["ok"] * len(held)
        (outcome,) = driver.store([source(keys[-1], body(keys[-1], MIB))])
        assert outcome == Failed("no space in any segment of the pool (Mooncake error -200)", "full")


def test_soft_pins_outlive_others(private: None, tmp_path: Path) -> None:
    pinned, others = keys_of(30)[:10], [make_key(("other", i)) for i in range(100)]
    with Pool(tmp_path / "pool", 64 * MIB, lease_ms=100) as pool:
        with pool.driver(pin="soft") as driver:
            assert put(driver, pinned, MIB) == ["stored"] * 10
        with pool.driver() as driver:
            for key in others:
                put(driver, [key], MIB)
            assert get(driver, pinned, MIB) == ["ok"] * 10
            assert "missing" in get(driver, others, MIB)


# -- placement -------------------------------------------------------------------------------------------------------


def test_replicas_and_the_preferred_segment(private: None, tmp_path: Path) -> None:
    keys = keys_of(8)
    with Pool(tmp_path / "pool", 64 * MIB, holders=2) as pool:
        raw = RawClient(pool)
        with pool.driver(replica_num=2) as driver:
            assert put(driver, keys) == ["stored"] * 8
            assert all(len(set(raw.places(name))) == 2 for name in names(driver, keys))
        raw.empty()
        places = []
        for segment in pool.master.segments():
            with pool.driver(preferred_segment=segment) as driver:
                assert put(driver, keys) == ["stored"] * 8
                places.append({place for name in names(driver, keys) for place in raw.places(name)})
            raw.empty()
        assert [len(found) for found in places] == [1, 1]
        assert places[0] != places[1]
        raw.close()


def test_a_segment_of_its_own(private: None, tmp_path: Path) -> None:
    """Without a holder the pool is what its users give; it goes with them."""
    keys = keys_of(4)
    with Pool(tmp_path / "pool", 0, holders=0) as pool:
        with pool.driver() as driver:
            assert put(driver, keys[:1]) == ["full"]
        with pool.driver(global_segment_size="32MiB") as giver, pool.driver() as user:
            assert not giver.storage.persistent
            assert user.storage.persistent
            assert len(pool.master.segments()) == 1
            assert put(user, keys[:2]) == ["stored"] * 2
            assert put(giver, keys[2:]) == ["stored"] * 2
            assert get(giver, keys) == get(user, keys) == ["ok"] * 4
            giver.close()
            eventually(lambda: get(user, keys) == ["missing"] * 4)
            assert pool.master.segments() == []


def test_the_json_file_serves(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mooncake.json"
    settings: dict[str, Any] = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 0,
        "local_buffer_size": "1mb",
        "master_server_address": pool.master.address,
    }
    path.write_text(json.dumps(settings))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    key = make_key("file")
    with Driver(MooncakeStorage(MooncakeConfig(), Context())) as driver:
        assert put(driver, [key]) == ["stored"]
        assert get(driver, [key]) == ["ok"]


# -- closing ---------------------------------------------------------------------------------------------------------


def test_closing_during_traffic(pool: Pool) -> None:
    """Calls end, be it with an error; the process does not."""
    keys = keys_of(16)
    ended = []
    with pool.driver() as driver:
        assert set(put(driver, keys, MIB)) == {"stored"}

        def work(key: ObjectKey) -> None:
            room = Room(MIB)
            try:
                while True:
                    driver.storage.load([room.item(key)])
            except Exception as error:
                ended.append(str(error))

        workers = [threading.Thread(target=work, args=(key,), daemon=True) for key in keys[:6]]
        for worker in workers:
            worker.start()
        driver.close()
        for worker in workers:
            worker.join(10)
    assert ended == ["the storage is not open"] * 6
