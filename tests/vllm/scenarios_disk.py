"""Scenarios with the disk: restart, and files that were damaged meanwhile."""

import os
from pathlib import Path
from typing import Any

from engines import engine
from scenarios_basic import LONG, PROMPTS


def _disk(folder: str) -> dict[str, Any]:
    return {"kvcore.l2": [{"storage": {"plugin": "disk", "path": folder}}]}


def fill_disk(models: Path, folder: str, model: str = "tiny") -> dict[str, Any]:
    """Compute and end: what waits is written at shutdown."""
    with engine(str(models / model), _disk(folder)) as e:
        texts, cached = e.run([LONG, *PROMPTS])
    return {"texts": texts, "cached": cached, "files": len(_files(folder))}


def from_disk(models: Path, folder: str, model: str = "tiny", extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """A new engine, with nothing in memory."""
    with engine(str(models / model), {**_disk(folder), **(extra or {})}) as e:
        texts, cached = e.run([LONG, *PROMPTS])
        sources = {
            m.labels["source"]: m.value
            for m in e.llm.get_metrics()
            if m.name == "vllm:prompt_tokens_cached_by_source" and m.value
        }
        e.settle()
        return {
            "texts": texts,
            "cached": cached,
            "sources": sources,
            "leaks": e.leaks(),
            "faults": e.faults(),
            "stats": e.half.engine.stats(),
        }


def damaged(models: Path, folder: str, how: str) -> dict[str, Any]:
    """The same after every file was damaged."""
    for path in _files(folder):
        size = path.stat().st_size
        if how == "flipped":
            with path.open("r+b") as stream:
                stream.seek(size // 2)
                byte = stream.read(1)
                stream.seek(size // 2)
                stream.write(bytes([byte[0] ^ 0x40]))
        elif how == "truncated":
            os.truncate(path, size // 2)
        elif how == "empty":
            os.truncate(path, 0)
        else:
            path.unlink()
    return from_disk(models, folder)


def _files(folder: str) -> list[Path]:
    # Objects are large files; whatever else a storage keeps beside them is small.
    return [p for p in Path(folder).rglob("*") if p.is_file() and p.stat().st_size > 64 * 1024]
