"""Scenarios with a lossy serde: what comes back is near, and never taken for exact KV."""

from pathlib import Path
from typing import Any

from engines import engine
from scenarios_basic import LONG, PROMPTS


def lossy(models: Path, folder: str, form: str) -> dict[str, Any]:
    """Compute and end; a new engine loads. Then one without the serde, over the same files."""
    tier: dict[str, Any] = {"storage": {"plugin": "disk", "path": folder}, "read": "always"}
    quant = {"kvcore.l2": [{**tier, "serde": [{"plugin": "quant", "format": form}]}]}
    with engine(str(models / "tiny"), quant) as e:
        cold, _ = e.run([LONG, *PROMPTS])
    lossy_bytes = _largest(folder)
    with engine(str(models / "tiny"), quant) as e:
        hot, cached = e.run([LONG, *PROMPTS])
        e.settle()
        leaks, faults = e.leaks(), e.faults()
    with engine(str(models / "tiny"), {"kvcore.l2": [tier]}) as e:
        exact, exact_cached = e.run([LONG])
    return {
        "cold": cold,
        "hot": hot,
        "cached": cached,
        "leaks": leaks,
        "faults": faults,
        "exact": exact,
        "exact_cached": exact_cached,
        "ratio": _largest(folder) / lossy_bytes,
    }


def _largest(folder: str) -> int:
    return max(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
