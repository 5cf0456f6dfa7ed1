"""Servers that die, freeze, fill up or cut connections: each call ends in time with an outcome per key, no connection
is used again after an error, none is leaked, and everything comes back by itself."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_place import connections, make_redis, nodes, opened, put

from kvcore.api import Item, StorageError, Stored
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, make_key, source
from kvcore.testing.servers import free_port
from kvcore.testing.servers.proxy import Proxy
from kvcore.testing.servers.redis import RedisServer
from moved import eventually, get, keys_of, kind, takes

TIMEOUT_S = 0.5


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


def through(proxy: Proxy, tmp_path: Path) -> Driver:
    return opened(f"redis://127.0.0.1:{proxy.port}", f"{tmp_path}:")


def clients(server: RedisServer) -> int:
    """Connections that the server has, without the one that asks."""
    lines = str(server.ask("INFO", "clients")).splitlines()
    return next(int(line.split(":")[1]) for line in lines if line.startswith("connected_clients:")) - 1


# -- servers that die and come back ----------------------------------------------------------------------------------


def test_killed_and_started_again(own: RedisServer) -> None:
    keys = keys_of(6)
    with opened(own.url) as driver:
        put(driver, keys)
        own.kill()
        with takes(0, TIMEOUT_S):
            assert get(driver, keys) == ["io"] * 6
            assert [kind(o) for o in driver.store([source(k, b"x") for k in keys])] == ["io"] * 6
            for method, argument in (("exists", keys), ("delete", keys), ("ping", None)):
                with pytest.raises(StorageError, match="refused"):
                    driver.call(method, *([argument] if argument else []))
        assert connections(driver) == 0
        own.start()
        assert get(driver, keys) == ["missing"] * 6  # it keeps nothing on disk
        put(driver, keys)
        assert get(driver, keys) == ["ok"] * 6
        assert connections(driver) == 1


def test_a_restart_between_calls_costs_nothing(own: RedisServer) -> None:
    """Idle connections that lead to the old process are found out before they are used."""
    keys = keys_of(4)
    with opened(own.url) as driver:
        calls = [driver.submit("store", [source(key, b"x" * 2_000_000)]) for key in keys]
        assert all(call.result() == [Stored()] for call in calls)
        own.kill()
        own.start()
        put(driver, keys)
        assert get(driver, keys) == ["ok"] * 4
        assert driver.exists(keys) == [True] * 4


def test_connections_closed_by_the_server_cost_nothing(server: RedisServer, tmp_path: Path) -> None:
    """As its `timeout` does with idle ones, and an operator with CLIENT KILL."""
    keys = keys_of(3)
    with opened(server.url, f"{tmp_path}:") as driver:
        put(driver, keys)
        server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert get(driver, keys) == ["ok"] * 3


def test_unreachable_from_the_start(own: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """`open` says so and succeeds; the server is used once it is there."""
    keys = keys_of(3)
    own.kill()
    with caplog.at_level("WARNING", "kvcore"), opened(own.url) as driver:
        assert "does not answer (Connection refused)" in caplog.text
        assert get(driver, keys) == ["io"] * 3
        own.start()
        put(driver, keys)
        assert get(driver, keys) == ["ok"] * 3


def test_who_examines_a_store_is_told_that_it_is_down(own: RedisServer) -> None:
    own.kill()
    storage = make_redis(own.url, passive=True)
    with pytest.raises(StorageError, match="does not answer"):
        storage.open()
    storage.close()


def test_a_name_that_is_not_known_and_a_socket_that_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for url in ("redis://no-such-host.invalid", f"unix://{tmp_path}/none.sock"):
        with caplog.at_level("WARNING", "kvcore"), opened(url) as driver:
            assert "does not answer" in caplog.text
            assert get(driver, keys_of(1)) == ["io"]
        caplog.clear()


def test_a_host_that_swallows_packets(tmp_path: Path) -> None:
    """Connecting ends at `connect_timeout`: here the accept queue is full, and the kernel drops what comes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        filling = [socket.socket() for _ in range(3)]
        for sock in filling:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        with opened(url, connect_timeout="300ms") as driver, takes(0.3, 0.4):
            assert get(driver, keys_of(3)) == ["timeout"] * 3
            assert connections(driver) == 0
        for sock in filling:
            sock.close()


def test_more_clients_than_the_server_takes(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path, options={"maxclients": 1}) as server,
        socket.create_connection(("127.0.0.1", server.port)) as other,
    ):
        other.sendall(b"PING\r\n")
        assert other.recv(7) == b"+PONG\r\n"
        with opened(server.url) as driver:
            assert get(driver, keys_of(1)) == ["io"]
            other.close()
            eventually(lambda: get(driver, keys_of(1)) == ["missing"])


# -- servers that freeze ---------------------------------------------------------------------------------------------


def test_frozen_and_thawed(own: RedisServer) -> None:
    """The call ends at the timeout. The replies that come after the thaw reach nobody."""
    keys = keys_of(4)
    with opened(own.url, timeout=f"{TIMEOUT_S}s") as driver:
        put(driver, keys)
        own.freeze()
        with takes(TIMEOUT_S * 0.95, TIMEOUT_S):
            assert get(driver, keys) == ["timeout"] * 4
        with takes(TIMEOUT_S * 0.95, TIMEOUT_S):
            (outcome,) = driver.store([source(keys[0], content("other", 20_000_000))])
        assert kind(outcome) == "timeout"
        with takes(TIMEOUT_S * 0.95, TIMEOUT_S), pytest.raises(StorageError, match="no answer in time"):
            driver.exists(keys)
        assert connections(driver) == 0
        own.thaw()
        assert get(driver, keys[::-1]) == ["ok"] * 4
        assert driver.exists([make_key("nothing"), *keys]) == [False, True, True, True, True]


def test_frozen_under_many_callers(own: RedisServer) -> None:
    keys = keys_of(8)
    with opened(own.url, timeout=f"{TIMEOUT_S}s") as driver:
        put(driver, keys, 100_000)
        own.freeze()
        with takes(TIMEOUT_S * 0.95, TIMEOUT_S):
            rooms = [Room(100_000) for _ in keys]
            calls = [driver.submit("load", [room.item(key)]) for room, key in zip(rooms, keys, strict=True)]
            assert [kind(call.result()[0]) for call in calls] == ["timeout"] * 8
        own.thaw()
        for _ in range(3):
            assert get(driver, keys, 100_000) == ["ok"] * 8
        assert connections(driver) <= 4
        eventually(lambda: clients(own) <= 4)


def test_frozen_in_the_middle_of_a_value(server: RedisServer, tmp_path: Path) -> None:
    """Part of the value has come, the rest does not: what came before counts, nothing after it is touched."""
    keys = keys_of(4)
    with socket.create_server(("127.0.0.1", 0)) as listener, opened(server.url, f"{tmp_path}:") as direct:
        put(direct, keys, 100_000)
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        driver = Driver(make_redis(url, f"{tmp_path}:", timeout=f"{TIMEOUT_S}s", connect_timeout=f"{TIMEOUT_S}s"))
        opening = driver.submit("open")
        client, _ = listener.accept()
        with client, socket.create_connection(("127.0.0.1", server.port)) as upstream:
            upstream.sendall(client.recv(65536))
            client.sendall(upstream.recv(65536))
            opening.result()
            rooms = [Room(100_000) for _ in keys]
            with takes(TIMEOUT_S * 0.95, TIMEOUT_S):
                call = driver.submit("load", [room.item(key) for room, key in zip(rooms, keys, strict=True)])
                upstream.sendall(client.recv(65536))
                left = 250_000
                while left:
                    data = upstream.recv(min(left, 65536))
                    client.sendall(data)
                    left -= len(data)
                outcomes = call.result()
            assert [kind(o) for o in outcomes] == ["ok", "ok", "timeout", "timeout"]
            assert bytes(rooms[1].view) == content(keys[1], 100_000)
            assert rooms[3].clean_from(0)
            assert connections(driver) == 0
            driver.close()


def test_replies_that_trickle(server: RedisServer, tmp_path: Path) -> None:
    """The time is that of the whole call: a server of which a little always comes does not hold it."""
    keys = keys_of(3)
    with Proxy(server.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        with opened(url, f"{tmp_path}:", timeout=f"{TIMEOUT_S}s", connect_timeout="5s") as driver:
            put(driver, keys, 1_000_000)
            proxy.reply_bytes_s = 100_000
            with takes(TIMEOUT_S * 0.95, TIMEOUT_S):
                assert get(driver, keys, 1_000_000) == ["timeout"] * 3
            assert connections(driver) == 0


def test_close_ends_calls_to_a_frozen_server(own: RedisServer) -> None:
    with opened(own.url, timeout="60s") as driver:
        put(driver, keys_of(1))
        own.freeze()
        call = driver.submit("load", [Room(10_000).item(make_key(0))])
        eventually(lambda: connections(driver) == 1 and not call.done())
        time.sleep(0.1)
        with takes(0, 1):
            driver.call("close")
            assert kind(call.result()[0]) == "io"


# -- connections that break ------------------------------------------------------------------------------------------


def test_a_value_cut_once_is_fetched_again(proxy: Proxy, tmp_path: Path) -> None:
    keys = keys_of(5)
    with through(proxy, tmp_path) as driver:
        put(driver, keys, 300_000)
        proxy.cut_replies_after, proxy.cuts_left = 700_000, 1
        assert get(driver, keys, 300_000) == ["ok"] * 5
        assert proxy.accepted == 2


def test_a_value_cut_for_ever_is_a_failure(proxy: Proxy, tmp_path: Path) -> None:
    """What came whole is loaded, what was cut is not, and the next call starts afresh."""
    keys = keys_of(5)
    with through(proxy, tmp_path) as driver:
        put(driver, keys, 300_000)
        proxy.cut_replies_after = 400_000
        found = get(driver, keys, 300_000)
        whole = found.count("ok")
        assert whole in (1, 2)  # one with each of the two connections, as far as both are used
        assert found == ["ok"] * whole + ["io"] * (5 - whole)
        assert connections(driver) == 0
        proxy.cut_replies_after = None
        assert get(driver, keys, 300_000) == ["ok"] * 5


@pytest.mark.parametrize("limit", [1, 100, 4_300, 150_000])
def test_a_store_cut_in_the_middle_leaves_nothing(proxy: Proxy, tmp_path: Path, limit: int) -> None:
    key = make_key("cut")
    with through(proxy, tmp_path) as driver:
        proxy.cut_requests_after = limit
        (outcome,) = driver.store([source(key, content(key, 300_000), (4096,))])
        assert kind(outcome) == "io"
        assert connections(driver) == 0
        proxy.cut_requests_after = None
        assert get(driver, [key], 300_000) == ["missing"]


def test_a_store_cut_in_the_middle_keeps_the_older_object(proxy: Proxy, tmp_path: Path) -> None:
    key = make_key("kept")
    with through(proxy, tmp_path) as driver:
        put(driver, [key], 300_000)
        proxy.cut_requests_after = 200_000
        (outcome,) = driver.store([source(key, content("new", 300_000), (4096,))])
        assert kind(outcome) == "io"
        proxy.cut_requests_after = None
        assert get(driver, [key], 300_000) == ["ok"]


def test_a_server_that_hangs_up(tmp_path: Path) -> None:
    """It accepts and closes, again and again, as a load balancer without servers does."""
    with Proxy(free_port()) as proxy, through(proxy, tmp_path) as driver:
        assert get(driver, keys_of(2)) == ["io"] * 2
        assert connections(driver) == 0


# -- servers that are full -------------------------------------------------------------------------------------------


def test_no_memory_and_no_eviction(tmp_path: Path) -> None:
    """Stores are refused as `full`, loads go on, and room that is given back is used."""
    with RedisServer(tmp_path, options={"maxmemory": "16mb", "maxmemory-policy": "noeviction"}) as server:
        keys = keys_of(40)
        with opened(server.url) as driver:
            outcomes = driver.store([source(key, content(key, 1_000_000), (4096,)) for key in keys])
            kinds = [kind(outcome) for outcome in outcomes]
            assert set(kinds) == {"ok", "full"}
            held = [key for key, k in zip(keys, kinds, strict=True) if k == "ok"]
            assert get(driver, held, 1_000_000) == ["ok"] * len(held)
            assert "maxmemory-policy" in next(o.reason for o in outcomes if kind(o) == "full")
            assert driver.exists(keys) == [k == "ok" for k in kinds]
            driver.delete(held)
            put(driver, [make_key("later")], 1_000_000)
            assert connections(driver) == 1, "a refusal is no reason to connect anew"


def test_no_memory_and_eviction(tmp_path: Path) -> None:
    """Everything is stored, the oldest make room, and what was evicted is a miss at once."""
    with RedisServer(tmp_path, options={"maxmemory": "16mb", "maxmemory-policy": "allkeys-lru"}) as server:
        keys = keys_of(40)
        with opened(server.url) as driver:
            put(driver, keys[:5], 1_000_000)
            assert driver.exists(keys[:5]) == [True] * 5
            put(driver, keys, 1_000_000)
            with takes(0, 1):
                found = get(driver, keys, 1_000_000)
            assert set(found) == {"ok", "missing"}
            usage = driver.usage()
            assert usage is not None
            assert 0 < usage.objects <= found.count("ok")  # replies take memory, too, and Redis may evict for them
            assert usage.capacity_bytes == 16 << 20


# -- objects that are not as expected --------------------------------------------------------------------------------


def test_deleted_between_exists_and_load(server: RedisServer, tmp_path: Path) -> None:
    keys = keys_of(3)
    with opened(server.url, f"{tmp_path}:") as driver, opened(server.url, f"{tmp_path}:") as other:
        put(driver, keys)
        assert driver.exists(keys) == [True] * 3
        other.delete(keys[1:2])
        assert get(driver, keys) == ["ok", "missing", "ok"]


def test_larger_than_its_room(server: RedisServer, tmp_path: Path) -> None:
    """It is thrown away, the others of the batch arrive, and the connection is still good."""
    keys = keys_of(5)
    with opened(server.url, f"{tmp_path}:") as driver:
        for key, nbytes in zip(keys, (1000, 1001, 5_000_000, 1000, 0), strict=True):
            put(driver, [key], nbytes)
        rooms = [Room(1000, (17,)) for _ in keys]
        outcomes = driver.load([room.item(key) for room, key in zip(rooms, keys, strict=True)])
        assert [kind(o) for o in outcomes] == ["ok", "too_large", "too_large", "ok", "ok"]
        assert rooms[1].clean_from(0)
        assert bytes(rooms[3].view) == content(keys[3], 1000)
        assert connections(driver) == 1


def test_something_else_under_the_name(server: RedisServer, tmp_path: Path) -> None:
    """A list where an object should be is `corrupt`, which the core deletes, and neither counted nor listed."""
    key, good = make_key("list"), make_key("good")
    server.ask("RPUSH", f"{tmp_path}:{key.name}", "x")
    server.ask("SET", f"{tmp_path}:no object's name", "x")
    with opened(server.url, f"{tmp_path}:") as driver:
        put(driver, [good])
        assert get(driver, [key, good]) == ["corrupt", "ok"]
        assert [entry.key for entry in driver.entries()] == [good]
        put(driver, [key])
        assert get(driver, [key, good]) == ["ok", "ok"]


def test_an_error_of_the_caller_costs_the_connection_only(server: RedisServer, tmp_path: Path) -> None:
    """A store that dies halfway, because a buffer is gone, leaves no connection with half a command on it."""
    keys = keys_of(3)
    with opened(server.url, f"{tmp_path}:") as driver:
        put(driver, keys[:1], 6_000_000)
        good = [source(key, content(key, 6_000_000)) for key in keys[:2]]
        gone = memoryview(bytearray(6_000_000))
        items = [*good, Item(keys[2], [memoryview(b"head"), gone])]
        gone.release()
        with pytest.raises(ValueError, match="released"):
            driver.call("store", items)
        assert connections(driver) == 1
        assert get(driver, keys[:1], 6_000_000) == ["ok"]


# -- no leaks --------------------------------------------------------------------------------------------------------


def test_no_connection_is_leaked(own: RedisServer) -> None:
    """One per concurrent call at most, whatever happened, and none after `close`."""
    keys = keys_of(32)
    with opened(own.url, timeout=f"{TIMEOUT_S}s", connections=3) as driver:
        for fault in (lambda: None, own.kill, own.start, own.freeze, own.thaw, own.kill, own.start):
            fault()
            rooms = [Room(10_000) for _ in keys]
            calls = [driver.submit("load", [room.item(key)]) for room, key in zip(rooms, keys, strict=True)]
            calls += [driver.submit("exists", keys) for _ in range(4)]
            for call in calls:
                assert call.exception(30) is None or isinstance(call.exception(), StorageError)
            assert connections(driver) <= 3
        eventually(lambda: clients(own) <= 3)
        assert len(nodes(driver)) == 1
    eventually(lambda: clients(own) == 0)
