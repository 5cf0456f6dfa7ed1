"""A scenario with a real store, which dies and comes back."""

import tempfile
import time
from pathlib import Path
from typing import Any

from engines import Engine, crowd, engine

from kvcore.testing.servers.redis import RedisServer


def store_dies(models: Path) -> dict[str, Any]:
    """The store is killed in the middle of 40 requests, and started again: no request fails, no token changes."""
    out: dict[str, Any] = {}
    prompts = crowd(40)
    with engine(str(models / "tiny"), None) as e:
        out["plain"], _ = e.run(prompts)
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        url = f"redis://127.0.0.1:{server.port}"
        store = {"plugin": "redis", "url": url, "timeout": "1s", "connect_timeout": "1s", "connections": 1}
        # slow, so that it can die in the midst of its answers
        storage = {"plugin": "faulty", "storage": store, "latency": "20ms"}
        tier = {"name": "redis", "storage": storage, "timeout": "2s"}
        with engine(str(models / "tiny"), {"kvcore.l2": [tier]}) as e:
            out["cold"], _ = e.run(prompts)
            _leave_to_the_store(e)
            out["from_store_before"] = e.stat('kvcore_hit_chunks_total{source="redis"')
            cache, served = e.half.engine, 0
            retrieve = cache.retrieve

            def retrieve_and_kill(*args: Any) -> Any:
                nonlocal served
                served += 1
                if served == 3:  # all have asked by now, and few have been answered
                    server.kill()
                return retrieve(*args)

            cache.retrieve = retrieve_and_kill
            out["dying"], _ = e.run(prompts)
            cache.retrieve = retrieve
            out["failed"] = e.stat('kvcore_tier_operations_total{tier="redis",op="load",outcome="')
            out["failed"] -= e.stat('kvcore_tier_operations_total{tier="redis",op="load",outcome="ok"')
            out["from_store"] = e.stat('kvcore_hit_chunks_total{source="redis"') - out["from_store_before"]
            _leave_to_the_store(e)
            out["dead"], _ = e.run(prompts)
            tier_of_it = cache.manager.tiers[0]
            out["open_while_dead"] = tier_of_it.breaker.closed
            server.start()
            until = time.monotonic() + 60
            while not tier_of_it.breaker.closed and time.monotonic() < until:
                time.sleep(0.05)
            out["back"] = tier_of_it.breaker.closed
            _leave_to_the_store(e)
            e.run(prompts)
            _leave_to_the_store(e)
            before = e.stat('kvcore_hit_chunks_total{source="redis"')
            out["again"], _ = e.run(prompts)
            out["from_store_again"] = e.stat('kvcore_hit_chunks_total{source="redis"') - before
            e.settle()
            out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


def _leave_to_the_store(e: Engine) -> None:
    """Neither vLLM nor L1 holds anything any more."""
    e.half.engine.drain()
    e.forget()
    e.half._spaces.clear()
