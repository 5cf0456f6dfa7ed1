"""Engines of one server: what one stores the others find, and a served cache is the same as an embedded one."""

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from served import (
    CONFIG,
    WINDOWED,
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

from kvcore.api import ConfigError, LayoutError, LeaseError
from kvcore.engine import CacheEngine, GroupSpec, ModelSpec
from kvcore.service import open_engine
from kvcore.testing.servers.kvcore import KVCoreServer


def test_what_one_engine_stores_another_finds(server: KVCoreServer) -> None:
    (one, space), (other, same) = connected(server), connected(server)
    assert put(one, space, hashes(6)) == 6
    assert contents(other, same, hashes(8)) == [1, 2, 3, 4, 5, 6]
    assert contents(other, same, hashes(8), first=4) == [5, 6]
    assert put(other, same, hashes(6)) == 0
    assert one.stats()["kvcore_stored_chunks_total"] == 6
    assert other.stats()['kvcore_hit_chunks_total{source="l1"}'] == 6 + 2
    assert other.stats()["kvcore_hit_tokens_total"] == 8 * space.chunk_tokens
    assert other.stats()['kvcore_store_skipped_chunks_total{reason="known"}'] == 6
    assert "kvcore_server_up 1.0" in other.metrics_text()
    assert server.metrics()["kvcore_sessions"] == 2
    assert server.metrics()["kvcore_hit_tokens_total"] == 8 * space.chunk_tokens
    one.close()
    other.close()
    until(lambda: nothing_held(server), "everything is released")


def test_what_left_l1_comes_back_from_the_servers_tier(server: KVCoreServer) -> None:
    engine, space = connected(server)
    assert engine.tiers == {"memory": "memory"}
    put(engine, space, hashes())
    assert engine.drain() == 0
    assert engine.clear(space) == 8
    lookup = engine.lookup(space, hashes())
    assert lookup.poll() in (None, 8)
    assert lookup.wait(10)
    assert lookup.poll() == 8
    assert lookup.sources == {"memory": 8}
    assert len(engine.retrieve(lookup, 0, blocks(space, 8))) == 8
    engine.release(lookup)
    engine.release(lookup)
    assert contents(engine, space, hashes()) == list(range(1, 9))
    engine.close()


def test_prefetched_and_not_used_is_freed(server: KVCoreServer) -> None:
    engine, space = connected(server)
    put(engine, space, hashes())
    engine.drain()
    engine.clear(space)
    empty = server.metrics()['kvcore_l1_bytes{state="free"}']
    lookup = engine.lookup(space, hashes())
    assert lookup.wait(10)
    assert server.metrics()['kvcore_l1_bytes{state="free"}'] < empty
    engine.release(lookup)
    until(lambda: server.metrics()['kvcore_l1_bytes{state="free"}'] == empty, "its slots are free")
    engine.close()


def test_a_failed_store_leaves_nothing_and_late_calls_are_harmless(server: KVCoreServer) -> None:
    engine, space = connected(server)
    plan = engine.reserve(space, hashes(), 0, 8, blocks(space, 8))
    assert len(plan.copies) == 8
    engine.publish(plan.id, False)
    engine.publish(plan.id)
    engine.publish(0)
    engine.publish(12345)
    assert contents(engine, space, hashes()) == []
    assert put(engine, space, hashes()) == 8
    engine.close()
    engine.close()
    assert engine.lookup(space, hashes()).poll() == 0
    assert not engine.reserve(space, hashes(), 0, 8, blocks(space, 8)).copies


def test_tenants_do_not_see_each_other(server: KVCoreServer) -> None:
    engine, nobody = connected(server)
    _, a = connected(server, tenant="a")
    _, b = connected(server, tenant="b")
    own, b_again = engine.register(spec(), "a"), engine.register(spec(), "b")
    for i, space in enumerate((nobody, own, b_again)):
        put(engine, space, hashes(2), first=10 * i)
    assert [contents(engine, s, hashes(2)) for s in (nobody, own, b_again)] == [[1, 2], [11, 12], [21, 22]]
    assert len({nobody.namespace, a.namespace, b.namespace}) == 3
    assert (own.namespace, own.tenant) == (a.namespace, "a")
    engine.close()


def test_a_served_cache_has_the_namespaces_of_an_embedded_one(server: KVCoreServer, tmp_path: Path) -> None:
    """So both find what the other has written to a tier."""
    text = server.config.read_text().replace(f"server: {server.url}", "").replace("metrics_port", "#")
    (tmp_path / "own.yaml").write_text(text)
    own = open_engine(str(tmp_path / "own.yaml"))
    assert isinstance(own, CacheEngine)
    for model, tenant in ((spec(), ""), (spec("other"), "t"), (WINDOWED, "")):
        engine, space = connected(server, model, tenant)
        assert own.register(model, tenant).namespace == space.namespace
        assert own.register(model, tenant).chunk_tokens == space.chunk_tokens
        engine.close()
    for changed in ({"salt": "s"}, {"chunk_tokens": 64}, {"keys": "tokens"}):
        engine, space = connected(server, **changed)
        with_it = CacheEngine.open(str(tmp_path / "own.yaml"), flags=changed)
        assert with_it.register(spec()).namespace == space.namespace != own.register(spec()).namespace
        with_it.close()
        engine.close()
    own.close()


@pytest.mark.parametrize("model", [spec(), WINDOWED], ids=["one group", "a window"])
def test_any_sequence_of_calls_has_the_same_effect_as_on_an_embedded_cache(
    server: KVCoreServer, tmp_path: Path, model: ModelSpec
) -> None:
    """Slots and generations included: a server adds nothing and loses nothing."""
    (tmp_path / "own.yaml").write_text("l1: {size: 8MiB}\nl2: []\nmin_object_size: 128KiB\n")
    server.stop()
    server.config.write_text(server.config.read_text().replace("- storage: memory", "").replace("l2:", "l2: []"))
    server.start()
    own = CacheEngine.open(str(tmp_path / "own.yaml"))
    served, there = connected(server, model)
    here = own.register(model)
    ran = random.Random(7)
    lookups: list[Any] = []
    plans: list[Any] = []
    hits = stored = 0
    for _ in range(400):
        keys = hashes(ran.randint(1, 12), ran.choice((0, 0, 20)))
        first = ran.choice((0, 0, 0, ran.randint(0, len(keys))))
        ids = [list(range(100, 100 + len(keys) * here.chunk_blocks)) for _ in here.groups]
        for group in ids if ran.random() < 0.3 else []:
            group[ran.randrange(len(group))] = -1
        if ran.random() < 0.2:
            ids[-1] = ids[-1][: ran.randint(0, len(ids[-1]))]
        match ran.choices(("lookup", "reserve", "end", "clear"), (10, 10, 16, 1))[0]:
            case "lookup":
                a, b = own.lookup(here, keys, first), served.lookup(there, keys, first)
                assert (a.poll(), a.sources, a.misses, a.first) == (b.poll(), b.sources, b.misses, b.first)
                start = first * here.chunk_blocks + ran.randint(0, 2)
                full = [list(range(len(keys) * here.chunk_blocks)) for _ in here.groups]
                copies = own.retrieve(a, start, full)
                assert copies == served.retrieve(b, start, full)
                hits += len(copies)
                lookups.append((a, b))
            case "reserve":
                c, d = own.reserve(here, keys, first, 99, ids), served.reserve(there, keys, first, 99, ids)
                assert (c.copies, c.skipped, bool(c.id)) == (d.copies, d.skipped, bool(d.id))
                stored += len(c.copies)
                plans.append((c, d))
            case "end" if lookups and ran.random() < 0.5:
                a, b = lookups.pop(ran.randrange(len(lookups)))
                own.release(a)
                served.release(b)
            case "end" if plans:
                c, d = plans.pop(ran.randrange(len(plans)))
                ok = ran.random() < 0.8
                own.publish(c.id, ok)
                served.publish(d.id, ok)
            case "clear":
                assert own.clear(here) == served.clear(there)
    assert hits > 50
    assert stored > 50
    own.close()
    served.close()


def test_a_model_that_cannot_be_cached_is_an_error_without_a_server(folder: Path) -> None:
    engine = engine_of(KVCoreServer(folder, CONFIG))
    with pytest.raises(LayoutError, match="no KV cache group"):
        engine.register(ModelSpec("t", "m", "w", "bf16", 2, "l", "b", "i", 16, 1, ()))
    engine.close()
    engine = engine_of(KVCoreServer(folder, {**CONFIG, "chunk_tokens": 40}))
    with pytest.raises(ConfigError, match="multiple of the block size"):
        engine.register(spec())
    engine.close()


def test_a_model_whose_name_is_no_text_is_not_cached(server: KVCoreServer) -> None:
    engine, _ = connected(server)
    odd = engine.register(spec(b"/models/\xff".decode(errors="surrogateescape")))
    assert engine.lookup(odd, hashes()).poll() == 0
    assert engine.reserve(odd, hashes(), 0, 8, blocks(odd, 8)).skipped == {"refused": 8}
    space = engine.register(spec())
    assert put(engine, space, hashes()) == 8
    engine.close()


def test_over_tcp_with_a_token(folder: Path) -> None:
    from kvcore.testing.servers import free_port

    secret = "a secret of many characters"
    url = f"tcp://127.0.0.1:{free_port()}"
    server = KVCoreServer(folder, {**CONFIG, "server": {"url": url, "token": secret}})
    with server:
        engine, space = connected(server)
        put(engine, space, hashes())
        assert contents(engine, space, hashes()) == list(range(1, 9))
        stranger = engine_of(server, **{"server.token": "another secret, as long"})
        until(lambda: server.metrics().get('kvcore_refused_connections_total{reason="token"}'), "it is refused")
        assert stranger.descriptor() is None
        assert secret not in server.log.read_text()
        assert contents(engine, space, hashes()) == list(range(1, 9))
        stranger.close()
        engine.close()


def test_spaces_that_are_used_no_more_are_forgotten(server: KVCoreServer) -> None:
    engine, space = connected(server)
    for i in range(20):
        engine.register(spec(), f"tenant {i}")
    kept = engine.register(spec(), "kept")
    assert len(engine._registered) == 2
    put(engine, kept, hashes(3))
    old = back(engine)
    server.kill()
    server.start()
    assert back(engine, but=old)
    assert engine._registered == {space.id, kept.id}
    assert contents(engine, kept, hashes(3)) == []
    engine.close()


def test_a_wide_group_spec_and_long_lookups(server: KVCoreServer) -> None:
    """A hundred layers, and lookups of 20,000 chunks: more than a portion of what is received."""
    layers = tuple(f"model.layers.{i}.self_attn.attn" for i in range(100))
    model = ModelSpec("test", "m", "w", "bf16", 2, "l", "b", "i", 32, 1, (GroupSpec(layers, (4096,) * 100),))
    engine, space = connected(server, model)
    put(engine, space, hashes(4))
    many = hashes(20_000)
    lookup = engine.lookup(space, many)
    assert lookup.wait(10)
    assert lookup.poll() == 4
    engine.release(lookup)
    plan = engine.reserve(space, many, 0, len(many), [range(len(many) * space.chunk_blocks)])
    assert plan.skipped["known"] == 4
    assert 0 < len(plan.copies) < 30
    engine.publish(plan.id, False)
    engine.close()


def test_retrieve_says_when_the_leases_have_ended(folder: Path) -> None:
    with KVCoreServer(folder, {**CONFIG, "l1": {"size": "8MiB", "lease": "300ms"}}) as server:
        engine, space = connected(server)
        put(engine, space, hashes(3))
        kept, lost = engine.lookup(space, hashes(3)), engine.lookup(space, hashes(3))
        for _ in range(10):
            time.sleep(0.08)
            assert kept.poll() == 3
        assert kept.poll() == 3
        assert engine.renew(kept)
        assert not engine.renew(lost)
        with pytest.raises(LeaseError):
            engine.retrieve(lost, 0, blocks(space, 3))
        assert lost.poll() == 0
        assert lost.misses == {"lease_expired": 3}
        assert len(engine.retrieve(kept, 0, blocks(space, 3))) == 3
        engine.close()


def test_many_threads_of_one_engine(server: KVCoreServer) -> None:
    """Lookups that are answered at once and by tiers, stores, waits and drains at the same time, each with its own."""
    engine, _ = connected(server)
    rounds = [0] * 6
    wrong: list[Any] = []
    end = time.monotonic() + 2.0

    def work(me: int) -> None:
        space = engine.register(spec(), f"thread {me % 3}")
        keys = hashes(3, 100 * me)
        while time.monotonic() < end:
            put(engine, space, keys, first=30 * me)
            if me % 2:
                engine.drain()
                engine.clear(space)
            found = contents(engine, space, keys)
            expected = [30 * me + i for i in (1, 2, 3)]
            if found != expected[: len(found)]:
                wrong.append((me, found))
            rounds[me] += len(found)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert min(rounds) > 3
    assert engine.stats().get("kvcore_server_lost_total", 0) == 0
    engine.close()
    until(lambda: nothing_held(server), "everything is released")


def test_what_a_server_would_not_take_is_not_sent(server: KVCoreServer) -> None:
    """It would end the connection, and with it every lease."""
    engine, space = connected(server)
    token = back(engine)
    odd = engine.register(spec(), "x" * 10_000)
    assert engine.lookup(odd, hashes()).poll() == 0
    odd_hashes = [*hashes(2), b"short", *hashes(2, 10)]
    assert engine.lookup(space, odd_hashes).poll() == 0
    assert not engine.reserve(space, odd_hashes, 0, 5, blocks(space, 5)).copies
    assert engine.drain(float("inf")) == 0
    assert back(engine) == token
    assert put(engine, space, hashes()) == 8
    engine.close()
