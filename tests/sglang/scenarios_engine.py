"""The life of a cache behind a real engine: one engine for each scenario, and one scenario for each process, because
SGLang does not start a second time in a process. Imported by `child.py` only, never by pytest."""

from pathlib import Path
from typing import Any

from caches import disk
from engines import PROMPTS, engine

OPERATIONS = "kvcore_tier_operations_total"


def cold_and_hot(model: Path, folder: str, **kwargs: Any) -> dict[str, Any]:
    """Computed, and found in the storage after SGLang has forgotten it."""
    with engine(model, {"kvcore.l2": disk(Path(folder))}, **kwargs) as one:
        result: dict[str, Any] = {"cold": one.run(PROMPTS), "hot": one.again(PROMPTS)}
        result["stored"] = one.number(OPERATIONS, 'op="store"', 'outcome="ok"')
        result["loaded"] = one.number(OPERATIONS, 'op="load"', 'outcome="ok"')
    result["files"] = len(pages(Path(folder)))
    return result


def restarted(model: Path, folder: str) -> dict[str, Any]:
    """Found by another engine; damaged, and whole again; by copies instead of in place; cleared; refused."""
    place = Path(folder)
    options = {"kvcore.l2": disk(place)}
    with engine(model, options) as one:
        result: dict[str, Any] = {"hot": one.run(PROMPTS)}
        for path in pages(place):
            damage(path)
        result["damaged"] = one.again(PROMPTS)
        result["corrupt"] = one.number(OPERATIONS, 'outcome="corrupt"')
        result["whole"] = one.again(PROMPTS)
        result["attached"] = one.attach(options, in_place=False)
        result["flat_cold"] = one.again(PROMPTS)
        result["flat_hot"] = one.again(PROMPTS)
        one.clear()
        result["cleared"] = one.again(PROMPTS)
        result["after_clear"] = one.again(PROMPTS)
        result["refused"] = one.attach({"kvcore.l2": "disc", "confg": "x"})
        result["without"] = one.again(PROMPTS)
    return result


def pages(folder: Path) -> list[Path]:
    """The files of stored pages."""
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 8192]


def damage(path: Path) -> None:
    """Change one bit of a stored page, behind its header."""
    with path.open("r+b") as file:
        file.seek(6000)
        (byte,) = file.read(1)
        file.seek(6000)
        file.write(bytes([byte ^ 1]))
