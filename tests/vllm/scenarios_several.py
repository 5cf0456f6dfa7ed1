"""One engine over two servers, each with one of its two ranks. Run by `child.py`."""

from pathlib import Path
from typing import Any

from engines import Engine
from scenarios_basic import ASYNC, PROMPTS
from scenarios_server import served_leaks, server


def split_over_servers(models: Path) -> dict[str, Any]:
    """Two ranks in processes of their own: what one engine stores, the next one loads from both servers."""
    out: dict[str, Any] = {}
    made = Engine(str(models / "tiny"), None, tensor_parallel_size=2)
    out["plain"] = made.run(PROMPTS)[0]
    made.close()
    with server() as a, a, server() as b, b:
        extra = {**ASYNC, "kvcore.server": [a.url, b.url]}
        for name in ("cold", "hot"):
            made = Engine(str(models / "tiny"), extra, tensor_parallel_size=2)
            out[name], out[f"{name}_cached"] = made.run(PROMPTS)
            made.close()
        out["held"] = [served_leaks(one) for one in (a, b)]
        out["objects"] = [one.metrics()["kvcore_l1_objects"] for one in (a, b)]
    return out
