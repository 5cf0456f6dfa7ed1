"""Scenarios with real stores: each serves a restarted engine; one dies and comes back."""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import crowd, engine
from scenarios_basic import LONG, PROMPTS

from kvcore.testing.servers.redis import RedisServer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))
from stores import STORES


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


def store_serves(models: Path, store: str, folder: str) -> dict[str, Any]:
    """Compute with one engine, reuse with the next: what it needs is in the store only."""
    with STORES[store](Path(folder)) as storage:
        return stored_serves(models, storage)


def stored_serves(models: Path, storage: dict[str, Any]) -> dict[str, Any]:
    """The same with a storage of which nothing needs to be started."""
    out: dict[str, Any] = {}
    extra = {"kvcore.l2": [{"name": "store", "storage": storage}]}
    with engine(str(models / "tiny"), extra) as e:
        out["cold"], out["cold_cached"] = e.run([LONG, *PROMPTS])
        e.settle()
        out["cold_leaks"] = e.leaks()
    with engine(str(models / "tiny"), extra) as e:
        out["hot"], out["hot_cached"] = e.run([LONG, *PROMPTS])
        e.settle()
        out["from_store"] = e.stat('kvcore_hit_chunks_total{source="store"')
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out
