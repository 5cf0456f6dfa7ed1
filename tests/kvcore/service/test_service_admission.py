"""What is loaded and what is written, with a server between: the engines say how fast they are and what they want."""

from pathlib import Path
from typing import Any

from served import CONFIG, connected, contents, hashes, put, until

from kvcore.control.admission import ENOUGH
from kvcore.l2.speed import ENOUGH as LOADS
from kvcore.testing.servers.kvcore import KVCoreServer


def test_what_an_engine_computes_sooner_is_not_loaded_for_any(folder: Path) -> None:
    slow = {"plugin": "faulty", "storage": "memory", "latency": "200ms", "operations": ["load"]}
    config = {**CONFIG, "lookup_timeout": "10s", "l2": [{"name": "far", "storage": slow}]}
    with KVCoreServer(folder, config) as server:
        (one, space), (other, same) = connected(server), connected(server)
        put(one, space, hashes())
        assert one.drain() == 0
        for _ in range(LOADS):
            one.clear(space)
            assert contents(one, space, hashes()) == list(range(1, 9))
        for _ in range(ENOUGH):
            other.prefilled(same, 8 * same.chunk_tokens, 0.02)
        until(lambda: server.metrics().get("kvcore_prefill_tokens_per_second", 0) > 0, "the server has been told")
        one.clear(space)
        assert asked(one, space) == (0, {"slow_tier": 8})
        assert asked(other, same) == (0, {"slow_tier": 8})
        one.close()
        other.close()


def test_what_two_engines_ask_for_is_written(folder: Path) -> None:
    config = {**CONFIG, "l2": [{"name": "far", "storage": "memory", "write": "reused"}]}
    with KVCoreServer(folder, config) as server:
        (one, space), (other, same) = connected(server), connected(server)
        put(one, space, hashes())
        assert one.drain() == 0
        assert server.metrics()['kvcore_tier_held_back_total{tier="far"}'] == 8
        assert contents(other, same, hashes(3)) == [1, 2, 3]
        assert other.drain() == 0
        other.clear(same)
        assert contents(one, space, hashes()) == [1, 2, 3]
        one.close()
        other.close()


def asked(engine: Any, space: Any) -> tuple[int | None, dict[str, int]]:
    lookup = engine.lookup(space, hashes())
    assert lookup.wait(10)
    answer = lookup.poll()
    engine.release(lookup)
    return answer, lookup.misses
