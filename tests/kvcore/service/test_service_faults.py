"""Clients and servers that are killed, frozen, paused or late: nothing wrong is ever read, nothing is kept for ever."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from served import (
    CONFIG,
    Child,
    back,
    blocks,
    connected,
    contents,
    engine_of,
    hashes,
    nothing_held,
    put,
    spec,
    until,
)

from kvcore.api import ArenaError, LeaseError
from kvcore.engine import attach_arena
from kvcore.engine.lookup import SLACK_S
from kvcore.testing.servers.kvcore import KVCoreServer

MISS_S = 0.02
"""A call that finds no server takes far less than a millisecond; this machine may be busy."""


def took(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def fastest(call: Any, times: int = 5) -> float:
    """The best of a few, because others may be busy on this machine."""
    return min(took(call) for _ in range(times))


# -- clients -----------------------------------------------------------------------------------------------------------


def test_a_client_killed_in_the_middle_of_a_store(server: KVCoreServer) -> None:
    """Nothing of what it half wrote is found; its keys and slots are free at once, long before its leases would end."""
    engine, space = connected(server)
    free = server.metrics()['kvcore_l1_bytes{state="free"}']
    with Child("half_stored", str(server.config), "8") as child:
        slots = child.heard()
        assert len(slots) == 8
        assert contents(engine, space, hashes()) == []
        assert engine.reserve(space, hashes(), 0, 8, blocks(space, 8)).skipped == {"known": 8}
    until(lambda: server.metrics()['kvcore_l1_bytes{state="free"}'] == free, "its slots are free")
    assert contents(engine, space, hashes()) == []
    assert put(engine, space, hashes()) == 8
    assert contents(engine, space, hashes()) == list(range(1, 9))
    engine.close()
    until(lambda: nothing_held(server), "everything is released")


def test_a_worker_that_outlives_its_client_writes_into_nobodys_slots(server: KVCoreServer) -> None:
    """Its client's keys are free at once, its slots when it has let go of the arena."""
    engine, space = connected(server)
    size = 8 * space.groups[0].nbytes
    with Child("planned", str(server.config), "8") as client:
        plan = client.heard()
        with Child("worker", plan["descriptor"]) as worker:
            assert worker.heard() == "attached"
            client.end()
            until(lambda: server.metrics()["kvcore_sessions"] == 1, "the client is gone")
            assert server.metrics()['kvcore_l1_bytes{state="quarantined"}'] == size
            many = hashes(64)
            assert put(engine, space, many) == 64 - 8
            other = engine.reserve(space, hashes(64, 100), 0, 64, blocks(space, 64))
            used = {copy.slot for copy in other.copies}
            assert not used & set(plan["slots"])
            engine.publish(other.id, False)
            worker.tell("let go")
            until(lambda: not server.metrics()['kvcore_l1_bytes{state="quarantined"}'], "its slots are free")
        assert contents(engine, space, hashes(200, 300)) == []
    engine.close()


def test_a_worker_killed_with_its_client(server: KVCoreServer) -> None:
    with Child("planned", str(server.config), "8") as client:
        plan = client.heard()
        with Child("worker", plan["descriptor"]) as worker:
            assert worker.heard() == "attached"
    until(lambda: nothing_held(server), "everything is released")


def test_a_worker_that_comes_after_its_clients_end_is_refused(server: KVCoreServer) -> None:
    engine, _ = connected(server)
    descriptor = engine.descriptor()
    attach_arena(descriptor).close()
    engine.close()
    until(lambda: nothing_held(server), "the client is gone")
    with pytest.raises(ArenaError, match="refuses this worker: its engine's session has ended"):
        attach_arena(descriptor)
    assert server.metrics()['kvcore_refused_connections_total{reason="session"}'] == 1


def test_a_client_paused_beyond_its_leases_and_released(folder: Path) -> None:
    """Its late release, its late publish and its late read harm nobody."""
    with KVCoreServer(folder, {**CONFIG, "l2": [], "l1": {"size": "4MiB", "lease": "300ms"}}) as server:
        engine, space = connected(server)
        put(engine, space, hashes())
        with (
            Child("reading", str(server.config), "8") as reader,
            Child("half_stored", str(server.config), "16") as writer,
        ):
            assert reader.heard() == 8
            slots = writer.heard()  # of the other 8
            assert len(slots) == 8
            for child in (reader, writer):
                child.process.send_signal(signal.SIGSTOP)
            until(lambda: server.metrics()['kvcore_l1_bytes{state="quarantined"}'], "the write lease has ended")
            until(lambda: not server.metrics()["kvcore_leases"], "the read lease has ended")
            fresh = hashes(24, 200)
            assert put(engine, space, fresh, first=100) == 24  # in the place of what the reader holds no more
            assert contents(engine, space, fresh) == list(range(101, 125))
            for child in (reader, writer):
                child.process.send_signal(signal.SIGCONT)
                child.tell("go on")
            assert reader.heard() == 8  # it sees that what it read is no longer what it was promised
            assert writer.heard() == "published"
            until(lambda: not server.metrics()['kvcore_l1_bytes{state="quarantined"}'], "its slots are free")
            assert contents(engine, space, fresh) == list(range(101, 125))
            assert contents(engine, space, hashes(16)[8:]) == []
        engine.close()
        until(lambda: nothing_held(server), "everything is released")


def test_64_clients_that_connect_and_vanish(server: KVCoreServer) -> None:
    engine, space = connected(server)
    put(engine, space, hashes(4))
    descriptors = len(os.listdir(f"/proc/{server.pid}/fd"))
    crowds = [Child("crowd", str(server.config), "16") for _ in range(4)]
    assert [crowd.heard() for crowd in crowds] == [16] * 4
    assert server.metrics()["kvcore_sessions"] == 65
    assert contents(engine, space, hashes(4)) == [1, 2, 3, 4]
    for crowd in crowds:
        crowd.process.kill()
    for crowd in crowds:
        crowd.end()
    until(lambda: server.metrics()["kvcore_sessions"] == 1, "they are gone")
    until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= descriptors, "their files are closed")
    assert put(engine, space, hashes(60, 100)) > 50
    engine.close()
    until(lambda: nothing_held(server), "everything is released")


def test_a_fork_of_a_client_has_only_misses_and_keeps_nothing_open(server: KVCoreServer) -> None:
    engine, space = connected(server)
    put(engine, space, hashes(2))
    child = Child("forked", str(server.config))
    said = child.heard()
    assert said["before"] == said["after"] == [1, 2]
    assert said["child"] == [0, 0, None, 0]
    child.process.wait(10)
    os.kill(said["pid"], 0)  # its own child lives
    until(lambda: server.metrics()["kvcore_sessions"] == 1, "the parent is gone")
    os.kill(said["pid"], signal.SIGKILL)
    child.process.communicate()
    engine.close()


# -- servers -----------------------------------------------------------------------------------------------------------


def test_a_server_killed_and_started_again(server: KVCoreServer) -> None:
    """Misses at once; no slot of the old server is read as one of the new; the engine comes back by itself."""
    engine, space = connected(server)
    put(engine, space, hashes())
    old = engine.descriptor()
    answered, reserved = engine.lookup(space, hashes()), engine.reserve(space, hashes(9), 0, 9, blocks(space, 9))
    view = attach_arena(old)
    assert (answered.arena, reserved.arena) == (old["token"], old["token"])
    assert len(reserved.copies) == 1
    server.kill()
    until(lambda: engine.descriptor() is None, "the engine has noticed", timeout_s=1.0)
    assert fastest(lambda: engine.lookup(space, hashes())) < MISS_S
    assert fastest(lambda: engine.reserve(space, hashes(), 0, 8, blocks(space, 8))) < MISS_S
    assert engine.lookup(space, hashes()).misses == {"no_server": 8}
    assert answered.poll() == 0
    answered.answer = 8  # as if it had not been asked in between
    with pytest.raises(LeaseError):
        engine.retrieve(answered, 0, blocks(space, 8))
    assert not engine.renew(answered)
    view.buffer[reserved.copies[0].slot] = 7  # mapped until its copies end
    engine.publish(reserved.id)
    engine.release(answered)
    assert (engine.clear(space), engine.drain()) == (0, 0)
    with pytest.raises(ArenaError):
        attach_arena(old)
    server.start()
    token = back(engine, but=old["token"])
    assert contents(engine, space, hashes(9)) == []
    engine.publish(reserved.id)
    engine.release(answered)
    assert put(engine, space, hashes(), first=50) == 8
    fresh = engine.lookup(space, hashes())
    assert (fresh.poll(), fresh.arena) == (8, token)
    engine.release(fresh)
    assert contents(engine, space, hashes()) == list(range(51, 59))
    assert engine.stats()['kvcore_server_lost_total{reason="closed"}'] == 1
    view.close()
    engine.close()


def test_a_server_killed_while_its_tiers_are_asked(folder: Path) -> None:
    slow = {"plugin": "faulty", "storage": "memory", "latency": "5s"}
    with KVCoreServer(folder, {**CONFIG, "l2": [{"storage": slow}], "lookup_timeout": "8s"}) as server:
        engine, space = connected(server)
        lookup = engine.lookup(space, hashes())
        assert lookup.poll() is None
        assert not lookup.wait(0.1)
        server.kill()
        assert lookup.wait(2)
        assert (lookup.poll(), lookup.misses) == (0, {"no_server": 8})
        engine.close()


def test_who_watches_an_arena_ends_with_it(server: KVCoreServer) -> None:
    """Also where the next connection gets the number of the one that was closed."""
    engine, _ = connected(server)
    for _ in range(50):
        view = attach_arena(engine.descriptor())
        view.watch(lambda: None)
        view.close()
    view = attach_arena(engine.descriptor())
    until(lambda: "kvcore-watch" not in [t.name for t in threading.enumerate()], "the threads have ended")
    view.close()
    engine.close()


def test_an_engine_that_is_gone_when_its_lookup_is_given_up(folder: Path) -> None:
    """The answer finds nobody: that is no reason to end."""
    slow = {"plugin": "faulty", "storage": "memory", "latency": "5s"}
    with KVCoreServer(folder, {**CONFIG, "l2": [{"storage": slow}], "lookup_timeout": "300ms"}) as server:
        engine, space = connected(server)
        lookup = engine.lookup(space, hashes())
        assert lookup.poll() is None
        server.freeze()
        engine.prefilled(space, 1, 1.0)  # is read before the end of the connection is seen
        engine.close()
        time.sleep(0.3 + SLACK_S + 0.2)  # then the server gives the lookup up
        server.thaw()
        other, _ = connected(server)
        other.close()


@pytest.mark.parametrize("pending", [False, True], ids=["idle", "with a lookup under way"])
def test_a_frozen_server_costs_one_reply_time(folder: Path, pending: bool) -> None:
    slow = {"plugin": "faulty", "storage": "memory", "latency": "5s"}
    config = {**CONFIG, "l2": [{"storage": slow}] if pending else [], "lookup_timeout": "30s"}
    with KVCoreServer(folder, config) as server:
        engine, space = connected(server, **{"server.timeout": "300ms"})
        old = back(engine)
        put(engine, space, hashes(4))
        lookup = engine.lookup(space, hashes(8)) if pending else None
        server.freeze()
        if lookup is not None:  # nobody else asks: the wait alone finds out
            assert took(lambda: until(lambda: lookup.poll() is not None, "an answer")) < 5 * 2 * 0.3
            assert lookup.poll() == 0
        else:
            assert took(lambda: engine.lookup(space, hashes(4))) < 5 * 0.3
        assert engine.descriptor() is None
        assert fastest(lambda: engine.lookup(space, hashes(4))) < MISS_S
        time.sleep(1.0)  # it is being connected to all the while
        assert fastest(lambda: engine.lookup(space, hashes(4))) < MISS_S
        server.thaw()
        back(engine, but=old)
        lookup = engine.lookup(space, hashes(4))
        assert lookup.poll() == 4  # the same server, with what it had
        engine.release(lookup)
        assert contents(engine, space, hashes(4)) == [1, 2, 3, 4]
        engine.close()
        until(lambda: server.metrics()["kvcore_sessions"] == 0, "the old session has ended, too")
        server.kill()  # its tier would take its time


def test_a_server_that_is_started_after_the_engine(folder: Path) -> None:
    server = KVCoreServer(folder, CONFIG)
    engine = engine_of(server)
    space = engine.register(spec())
    assert (engine.descriptor(), space.namespace) == (None, b"")
    assert engine.lookup(space, hashes()).poll() == 0
    assert engine.reserve(space, hashes(), 0, 8, blocks(space, 8)).skipped == {"no_server": 8}
    assert engine.tiers == {"memory": "memory"}
    with pytest.raises(ArenaError, match="the server is away"):
        attach_arena(engine.descriptor())
    with server:
        back(engine)
        assert put(engine, space, hashes()) == 8
        assert contents(engine, space, hashes()) == list(range(1, 9))
        assert space.namespace
        engine.close()


def test_a_restart_with_another_l1(server: KVCoreServer) -> None:
    engine, space = connected(server)
    put(engine, space, hashes())
    old = back(engine)
    server.stop()
    server.config.write_text(server.config.read_text().replace("8MiB", "32MiB"))
    server.start()
    back(engine, but=old)
    assert engine.descriptor()["size"] == 32 << 20
    assert put(engine, space, hashes(200)) == 200
    assert contents(engine, space, hashes(200)) == [i % 256 for i in range(1, 201)]
    engine.close()


def test_many_restarts_under_load(server: KVCoreServer) -> None:
    """Every byte that is read is the one that was written, by whichever server."""
    engine, space = connected(server)
    right = 0
    for round_ in range(3):
        old = back(engine)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            put(engine, space, hashes(8), first=10 * round_)
            right += contents(engine, space, hashes(8)) == [10 * round_ + i + 1 for i in range(8)]
        server.kill()
        assert contents(engine, space, hashes(8)) == []
        server.start()
        back(engine, but=old)
    assert right > 3
    engine.close()


def test_another_users_socket_on_the_servers_path_is_not_believed(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was there first could answer anything."""
    server = KVCoreServer(folder, CONFIG)
    us = os.geteuid()
    with Child("squatting", str(server.socket)) as squatter:
        them = squatter.heard()
        if us == them:  # only root can be two users
            us = them + 1
            monkeypatch.setattr(os, "geteuid", lambda: us)
        engine = engine_of(server)
        said = f"it is run by user {them}, this by user {us}: run both as one user"
        until(lambda: said in caplog.text, "it is said")
        assert engine.descriptor() is None
        engine.close()
