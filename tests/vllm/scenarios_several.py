"""One engine over two servers, each with one of its two ranks. Run by `scenarios.py`."""

from pathlib import Path
from typing import Any

from engines import Engine
from scenarios_basic import ASYNC, PROMPTS
from scenarios_server import served_leaks, server


def split_over_servers(models: Path) -> dict[str, Any]:
    """Two ranks in processes of their own: what was computed and stored is loaded again, by each from its server."""
    out: dict[str, Any] = {}
    with server() as a, a, server() as b, b:
        made = Engine(str(models / "tiny"), {**ASYNC, "kvcore.server": [a.url, b.url]}, tensor_parallel_size=2)
        out["cold"], out["cold_cached"] = made.run(PROMPTS)
        made.forget()
        out["hot"], out["hot_cached"] = made.run(PROMPTS)
        out["objects"] = [one.metrics()["kvcore_l1_objects"] for one in (a, b)]
        out["hit_tokens"] = [one.metrics()["kvcore_hit_tokens_total"] for one in (a, b)]
        made.close()
        out["held"] = [served_leaks(one) for one in (a, b)]
    return out
