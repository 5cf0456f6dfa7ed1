"""Scenarios with a real store server that dies and comes back."""

import tempfile
import time
from pathlib import Path
from typing import Any

from engines import crowd, engine

from kvcore.testing.servers.redis import RedisServer


def store_dies(models: Path) -> dict[str, Any]:
    """The store is killed in the middle of 40 requests, and started again: no request fails, no token changes."""
    out: dict[str, Any] = {}
    prompts = crowd(40)
    with engine(str(models / "tiny"), None) as e:
        out["plain"], _ = e.run(prompts)
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        url = f"redis://127.0.0.1:{server.port}"
        tier = {"storage": {"plugin": "redis", "url": url, "timeout": "1s", "connect_timeout": "1s"}, "timeout": "2s"}
        # L1 holds a part of the prompts only, so that lookups do ask the store
        with engine(str(models / "tiny"), {"kvcore.l2": [tier], "kvcore.l1.size": "16MiB"}) as e:
            out["cold"], _ = e.run(prompts)
            e.half.engine.drain()
            e.forget()
            out["from_store_before"] = e.stat('kvcore_hit_chunks_total{source="redis"')
            cache, asked = e.half.engine, 0
            lookup = cache.lookup

            def lookup_and_kill(*args: Any) -> Any:
                nonlocal asked
                asked += 1
                if asked == 15:
                    server.kill()
                return lookup(*args)

            cache.lookup = lookup_and_kill
            out["dying"], _ = e.run(prompts)
            cache.lookup = lookup
            out["asked"] = asked
            out["from_store"] = e.stat('kvcore_hit_chunks_total{source="redis"') - out["from_store_before"]
            e.forget(connector=True)
            out["dead"], _ = e.run(prompts)
            tier_of_it = cache.manager.tiers[0]
            out["open_while_dead"] = tier_of_it.breaker.closed
            server.start()
            until = time.monotonic() + 60
            while not tier_of_it.breaker.closed and time.monotonic() < until:
                time.sleep(0.05)
            out["back"] = tier_of_it.breaker.closed
            e.forget(connector=True)
            e.run(prompts)
            e.half.engine.drain()
            e.forget(connector=True)
            before = e.stat('kvcore_hit_chunks_total{source="redis"')
            out["again"], _ = e.run(prompts)
            out["from_store_again"] = e.stat('kvcore_hit_chunks_total{source="redis"') - before
            e.settle()
            out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out
