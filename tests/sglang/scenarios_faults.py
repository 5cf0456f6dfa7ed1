"""Storages that fail, under a real engine. Imported by `scenarios.py` only, never by pytest."""

from pathlib import Path
from typing import Any

from caches import disk
from engines import PROMPTS, Engine, engine

from kvcore.testing.servers import free_port

FLAKY = {"fail_rate": 0.2, "flip_rate": 0.2, "lost_rate": 0.2, "torn_rate": 0.2, "seed": 1}


def failing(model: Path, folder: str) -> dict[str, Any]:
    """One engine, which starts with a store that is not there, and then has one storage after the other, all of them in
    front of the pages in `folder`."""
    dead = {"storage": {"plugin": "redis", "url": f"redis://127.0.0.1:{free_port()}"}, "timeout": "2s"}
    with engine(model, {"kvcore.l2": [dead]}) as one:
        result = {"dead": seen(one)}
        for name, faults, tier, policy in (
            ("healthy", {}, {}, "wait_complete"),
            ("flaky", FLAKY, {}, "wait_complete"),
            ("failing", {"error_rate": 1.0}, {}, "wait_complete"),
            ("dies", {"crash_after": 3}, {}, "wait_complete"),
            ("slow", {"latency": "3s", "operations": ["load"]}, {}, "timeout"),
            ("hangs", {"hang_rate": 1.0}, {"timeout": "500ms"}, "wait_complete"),
        ):
            inner = disk(Path(folder))[0]["storage"]
            storage = {"plugin": "faulty", "storage": inner, **faults}
            refused = one.attach({"kvcore.l2": [{"storage": storage, **tier}]}, policy=policy)
            assert refused == "", refused
            result[name] = seen(one)
    return result


def seen(one: Engine) -> dict[str, Any]:
    """What requests are answered, cold and after all was forgotten, and what was counted."""
    one.forget()
    first, second = one.run(PROMPTS), one.again(PROMPTS)
    return {
        "texts": [*first[0], *second[0]],
        "from_storage": sum(first[1]) + sum(second[1]),
        "loaded": one.number("kvcore_tier_operations_total", 'op="load"', 'outcome="ok"'),
        "not_loaded": one.number("kvcore_miss_chunks_total"),
        "stored": one.number("kvcore_tier_operations_total", 'op="store"', 'outcome="ok"'),
    }
