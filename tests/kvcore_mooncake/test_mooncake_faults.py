"""Masters and holders that die, freeze, come back or were never there: each call ends in time with an outcome per key,
no fault holds the interpreter up, and everything comes back by itself."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mooncake_place import MIB, Pool, RawClient, body, freeze, get, make_storage, names, put, within

from kvcore.api import Failed, Item, StorageError, StorageUnavailable
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, aligned
from kvcore.testing.servers import free_port
from kvcore.testing.servers.mooncake import MooncakeHolder
from moved import eventually, keys_of

pytestmark = pytest.mark.usefixtures("private")

CALL_S = 20.0
"""A call to a dead or frozen master or holder takes 2 to 5 s, by Mooncake's own deadlines."""
QUICK_S = 5.0
"""Once the master is known to be silent, a call takes up to 1 s."""


@contextmanager
def no_longer_than(limit_s: float) -> Iterator[None]:
    """The body must not hold the interpreter's lock longer than this: an engine would stand still."""
    stop, longest = threading.Event(), 0.0

    def tick() -> None:
        nonlocal longest
        last = time.monotonic()
        while not stop.is_set():
            time.sleep(0.002)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        stop.set()
        ticker.join()
    assert longest < limit_s, f"no other thread ran for {longest:.2f} s"


# -- the master ------------------------------------------------------------------------------------------------------


def test_a_master_that_is_not_there_yet(own_pool: Pool) -> None:
    """Opening says so, soon and without holding anyone up, and may be tried again until it works."""
    own_pool.master.kill()
    storage = own_pool.storage()
    for _ in range(2):
        with no_longer_than(2.0), within(QUICK_S), pytest.raises(StorageUnavailable, match=own_pool.master.address):
            storage.open()
    own_pool.master.start()
    with Driver(storage) as driver:
        keys = keys_of(3)
        eventually(lambda: put(driver, keys) == ["stored"] * 3)
        assert get(driver, keys) == ["ok"] * 3


def test_a_master_that_is_frozen_at_open(own_pool: Pool) -> None:
    """It accepts connections: Mooncake's library would wait, and let no other thread run."""
    freeze(own_pool.master)
    storage = own_pool.storage()
    with no_longer_than(1.5), within(QUICK_S), pytest.raises(StorageUnavailable, match="does not answer"):
        storage.open()
    own_pool.master.thaw()
    storage.open()
    storage.ping()
    storage.close()


def test_an_address_where_nobody_listens() -> None:
    storage = make_storage(f"127.0.0.1:{free_port()}")
    with within(QUICK_S), pytest.raises(StorageUnavailable, match="does not answer: start it, or correct"):
        storage.open()
    with pytest.raises(StorageError, match="not open"):
        storage.exists(keys_of(1))
    storage.close()


def test_master_killed_and_started_again(own_pool: Pool) -> None:
    """Every call fails in time; then all is forgotten, which is a miss, and what is stored anew is found."""
    keys = keys_of(4)
    with own_pool.driver() as driver:
        assert put(driver, keys) == ["stored"] * 4
        own_pool.master.kill()
        with within(CALL_S), no_longer_than(2.0):
            assert get(driver, keys) == ["io"] * 4
        with within(QUICK_S), pytest.raises(StorageError, match=own_pool.master.address):
            driver.store([])
        for method, argument in (("exists", keys), ("load", []), ("delete", keys), ("ping", None)):
            with within(QUICK_S), pytest.raises(StorageError, match="does not answer"):
                driver.call(method, *([] if argument is None else [argument]))
        own_pool.master.start()
        eventually(lambda: put(driver, keys_of(1)) == ["stored"])
        assert get(driver, keys[1:]) == ["missing"] * 3
        assert put(driver, keys) == ["stored"] * 4
        assert get(driver, keys) == ["ok"] * 4


def test_master_frozen_and_thawed(own_pool: Pool) -> None:
    keys = keys_of(4)
    with own_pool.driver() as driver:
        assert put(driver, keys) == ["stored"] * 4
        freeze(own_pool.master)
        with within(CALL_S), no_longer_than(1.5), pytest.raises(StorageError, match="did not answer in time"):
            driver.exists(keys)
        with within(QUICK_S), pytest.raises(StorageError, match="does not answer"):
            driver.exists(keys)
        own_pool.master.thaw()
        eventually(lambda: driver.exists(keys) == [True] * 4)
        assert get(driver, keys) == ["ok"] * 4


def test_closing_when_the_master_is_gone(own_pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """A client with a segment would try for 18 s to take it off the list, and let no other thread run."""
    with own_pool.driver(global_segment_size="16MiB") as driver:
        assert put(driver, keys_of(1)) == ["stored"]
        with driver.storage._client.session() as session:
            left = session.store
        own_pool.master.kill()
        with caplog.at_level(logging.WARNING), within(QUICK_S), no_longer_than(2.0):
            driver.close()
        assert "left to the end of the process" in caplog.text
    own_pool.master.start()
    left.close()  # or this process takes long to end


# -- holders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_holders(private: None, tmp_path: Path) -> Iterator[Pool]:
    """A lease shorter than a frozen holder is waited for; a holder is given up long after a test has ended."""
    with Pool(tmp_path / "pool", 64 * MIB, holders=2, lease_ms=1000, client_ttl_s=60) as pool:
        yield pool


@pytest.mark.parametrize("how", [MooncakeHolder.kill, freeze], ids=["kill", "freeze"])
def test_one_of_two_holders_is_lost(two_holders: Pool, how: Callable[[MooncakeHolder], None]) -> None:
    """Its objects fail, in time; those of the other holder load, though a frozen neighbour outlasts their lease."""
    keys = keys_of(24)
    with two_holders.driver() as driver:
        assert put(driver, keys) == ["stored"] * 24
        raw = RawClient(two_holders)
        places = [raw.places(name) for name in names(driver, keys)]
        raw.close()
        assert len({*map(tuple, places)}) == 2, "one holder has all of the 24 objects"
        how(two_holders.holders[0])
        with within(CALL_S), no_longer_than(1.5):
            outcomes = get(driver, keys)
        by_place = {place: {o for o, p in zip(outcomes, places, strict=True) if p == [place]} for (place,) in places}
        lost = [found for found in by_place.values() if found != {"ok"}]
        assert len(lost) == 1, by_place
        assert lost[0] <= {"io", "timeout", "missing"}


def test_a_thawed_holder_writes_nothing_late(two_holders: Pool) -> None:
    """A load that failed has let go of the caller's memory, whatever the holder still sends."""
    key = keys_of(1)[0]
    with two_holders.driver() as driver:
        arena = aligned(8 * MIB)
        driver.storage.register_memory(arena)
        arena[: 4 * MIB] = body(key, 4 * MIB)
        driver.store([Item(key, [arena[: 4 * MIB]])])
        for holder in two_holders.holders:
            freeze(holder)
        room = arena[4 * MIB :]
        with within(CALL_S):
            (outcome,) = driver.load([Item(key, [room])])
        assert isinstance(outcome, Failed)
        room[:] = bytes(len(room))
        for holder in two_holders.holders:
            holder.thaw()
        eventually(lambda: driver.load([Item(key, [arena[: 4 * MIB]])]) != [outcome])
        assert bytes(room) == bytes(len(room))


def test_a_transfer_given_up_is_held_back(own_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 60 s the library gives up a transfer that may still write; the call must outlast it. Here: after 0 s."""
    monkeypatch.setattr("kvcore_mooncake.session.GIVEN_UP_S", 0.0)
    monkeypatch.setattr("kvcore_mooncake.session.SETTLE_S", 5.0)
    keys = keys_of(1)
    with own_pool.driver() as driver:
        assert put(driver, keys) == ["stored"]
        own_pool.holders[0].kill()
        begun = time.monotonic()
        assert get(driver, keys) == ["io"]
        assert time.monotonic() - begun >= 5.0


def test_closing_while_a_call_hangs(two_holders: Pool) -> None:
    """Closing under a call would end the process; so the call closes the client when it returns."""
    keys = keys_of(4)
    with two_holders.driver() as driver:
        assert put(driver, keys) == ["stored"] * 4
        for holder in two_holders.holders:
            freeze(holder)
        room = Room(100_000)
        call = driver.submit("load", [room.item(keys[0])])
        time.sleep(0.3)
        with within(CALL_S):
            driver.close()
        assert isinstance(driver.wait(call, "load")[0], Failed)
    with pytest.raises(StorageError, match="not open"):
        driver.storage.exists(keys)
